"""Model PyTorch's CUDA caching allocator: which memory it takes from the card for which tensors.

A card runs out of memory at the *reserved* bytes, which PyTorch's allocator has taken from CUDA, and not at the
*allocated* bytes, which are in tensors. Between the two lies what the allocator keeps for later: it rounds sizes, takes
memory in large segments, and cannot give two tensors the parts of a segment that are free but too small for them
(fragmentation).

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (pytorch commit 001074d, class ``DeviceCachingAllocator``)
with the constants of ``c10/core/AllocatorConfig.h`` (torch 2.13.0, lines 16 to 25). Each method here names the function
that it follows. Left out: other streams than the default one, CUDA graphs, and garbage collection, all of which
training does not use; and ``max_non_split_rounding_mb``, which stays at its 20 MiB.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 2**20
MIN_BLOCK = 512
"""All sizes are rounded up to a multiple of this (``kMinBlockSize``) [bytes]."""
SMALL = 1 * MIB
"""The largest allocation that comes from the pool of small blocks (``kSmallSize``) [bytes]."""
SMALL_SEGMENT = 2 * MIB
"""The size of a segment of small blocks (``kSmallBuffer``) [bytes]."""
LARGE_SEGMENT = 20 * MIB
"""The size of a segment that several large blocks share (``large_segment_size``) [bytes]."""
OWN_SEGMENT = 10 * MIB
"""An allocation of this size or more gets a segment of its own (``kMinLargeAlloc``) [bytes]."""
ROUND_LARGE = 2 * MIB
"""The size of such a segment is a multiple of this (``kRoundLarge``) [bytes]."""
ADDRESS_SPACE = 2**48
"""Addresses of one expandable segment; torch takes 9/8 of the card's memory, which no segment ever fills [bytes]."""


class OutOfMemory(Exception):
    """The allocator needs more memory than the card has."""


@dataclass(frozen=True)
class Settings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` can change.

    Attributes:
        expandable_segments: one segment for each pool, which grows by pages, and not a segment for each allocation.
        max_split_size: blocks of this size or more are never split [bytes].
        roundup_power2_divisions: round sizes up to one of so many steps between two powers of two; 0: to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_size: float = math.inf
    roundup_power2_divisions: int = 0


DEFAULT = Settings()
"""What applies when nothing is set."""


class Block:
    """A piece of a segment: free, or in use by one tensor.

    Attributes:
        address: its first byte.
        size: its bytes.
        pool: the pool that it returns to.
        free: whether no tensor uses it.
        mapped: whether memory of the card is behind its addresses; always true without expandable segments.
        before: the neighbour at lower addresses of the same segment, or ``None``.
        after: the neighbour at higher addresses of the same segment, or ``None``.
    """

    def __init__(self, address: int, size: int, pool: "Pool", *, mapped: bool = True):
        self.address = address
        self.size = size
        self.pool = pool
        self.free = True
        self.mapped = mapped
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int) -> "Block":
        """Shorten this block to ``size`` bytes, and return the rest as a block of its own, its neighbour above."""
        rest = Block(self.address + size, self.size - size, self.pool, mapped=self.mapped)
        rest.before, rest.after = self, self.after
        if self.after:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest

    def swallow(self, above: "Block") -> None:
        """Make the neighbour above a part of this block."""
        self.size += above.size
        self.after = above.after
        if self.after:
            self.after.before = self


class Pool:
    """The free blocks of one kind, small or large, in the order of their sizes.

    Attributes:
        segment: the bytes that a segment of this pool has, or grows by.
        unmapped: the part of the expandable segment that has addresses but no memory, lowest address first.
    """

    def __init__(self, segment: int):
        self.segment = segment
        self.unmapped: list[Block] = []
        self._sizes: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], Block] = {}

    def add(self, block: Block) -> None:
        """Offer a free block."""
        key = (block.size, block.address)
        bisect.insort(self._sizes, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        """Offer a block no longer, because it is in use or became part of another."""
        key = (block.size, block.address)
        del self._sizes[bisect.bisect_left(self._sizes, key)]
        del self._blocks[key]

    def at_least(self, size: int) -> Iterator[Block]:
        """Yield the free blocks of at least so many bytes, the smallest first; of equal ones the lowest address."""
        for place in range(bisect.bisect_left(self._sizes, (size, 0)), len(self._sizes)):
            yield self._blocks[self._sizes[place]]

    def free_blocks(self) -> list[Block]:
        """All of them."""
        return list(self._blocks.values())


class CachingAllocator:
    """The allocator of one card.

    Args:
        settings: what ``PYTORCH_CUDA_ALLOC_CONF`` says.
        limit: the memory that it can get from the card [bytes].

    Attributes:
        allocated: bytes in blocks that are in use; ``torch.cuda.memory_allocated``.
        reserved: bytes taken from the card; ``torch.cuda.memory_reserved``.
        peak_allocated: the largest ``allocated`` so far.
        peak_reserved: the largest ``reserved`` so far.
    """

    def __init__(self, settings: Settings = DEFAULT, limit: float = math.inf):
        self.settings = settings
        self.limit = limit
        self.small, self.large = Pool(SMALL_SEGMENT), Pool(LARGE_SEGMENT)
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._next_address = 0

    def allocate(self, wanted: int) -> Block:
        """Return a block for a tensor of ``wanted`` bytes (``malloc``).

        Raises:
            OutOfMemory: if the card has too little memory, even after all unused segments were given back.
        """
        size = self.rounded(wanted)
        pool = self.small if size <= SMALL else self.large
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block is None:
            self.release_cached()
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemory(f"{wanted:,} bytes wanted, {self.limit - self.reserved:,} of {self.limit:,} free")
        if self._should_split(block, size):
            pool.add(block.cut(size))
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours (``free_block``)."""
        self.allocated -= block.size
        block.free = True
        block.pool.add(self._merged(block))

    def rounded(self, wanted: int) -> int:
        """Return the size of the block that a tensor needs (``round_size``)."""
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and wanted > MIN_BLOCK * divisions:
            power = 2 ** (wanted.bit_length() - 1)  # the largest power of two that is not above it
            step = power >> (divisions.bit_length() - 1)
            return _up(wanted, step)
        return _up(max(wanted, 1), MIN_BLOCK)

    def release_cached(self) -> None:
        """Give the card back what no tensor is in (``release_cached_blocks``; ``torch.cuda.empty_cache``)."""
        for pool in (self.small, self.large):
            for block in pool.free_blocks():
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.before and not block.after:  # it is a whole segment
                    pool.remove(block)
                    self.reserved -= block.size

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough (``get_free_block``)."""
        found = next(pool.at_least(size), None)
        if found is None:
            return None
        if self.settings.expandable_segments:
            # The last block of a segment counts as large as it can grow, so that it is kept for those who need that.
            for other in pool.at_least(size):
                if _can_grow_to(other) < _can_grow_to(found):
                    found = other
                elif other is not found:
                    break
        unsplittable = self.settings.max_split_size
        if size < unsplittable <= found.size or (size >= unsplittable and found.size >= size + LARGE_SEGMENT):
            return None  # the rest of such a block would be wasted
        pool.remove(found)
        return found

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether the rest of a block goes back to the pool (``should_split``)."""
        rest = block.size - size
        if block.pool is self.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        return size < self.settings.max_split_size and rest > SMALL

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Take memory from the card; ``None`` if it has not enough (``alloc_block``)."""
        if self.settings.expandable_segments:
            return self._grow(pool, size)
        segment = pool.segment
        if size >= OWN_SEGMENT:
            segment = _up(size, ROUND_LARGE)
        if not self._take(segment):
            return None
        return Block(self._addresses(segment), segment, pool)

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Take memory for the lowest addresses at which ``size`` bytes can be (``try_allocate_expandable_block``)."""
        block = _room(pool, size)
        if block is None:
            block = Block(self._addresses(ADDRESS_SPACE), ADDRESS_SPACE, pool, mapped=False)
            pool.unmapped.append(block)
        if not block.mapped:
            if not self._map(block, min(size, block.size)):
                return None
            block = self._merged(block)
            pool.add(block)
        while block.size < size:
            above = block.after
            assert above  # _room has seen to it
            if not self._map(above, min(size - block.size, above.size)):
                return None
            block = self._merged(above)
            pool.add(block)
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put pages of memory behind the first ``size`` addresses of an unmapped block (``map_block``)."""
        pages = min(_up(size, block.pool.segment), block.size)
        if not self._take(pages):
            return False
        place = block.pool.unmapped.index(block)
        if pages < block.size:
            block.pool.unmapped[place] = block.cut(pages)
        else:
            del block.pool.unmapped[place]
        block.mapped = True
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block (``unmap_block``)."""
        page = block.pool.segment
        first = _up(block.address, page)
        last = (block.address + block.size) // page * page
        if last <= first:
            return
        block.pool.remove(block)
        inside = block
        if first > block.address:
            inside = block.cut(first - block.address)
            block.pool.add(block)
        if last < inside.address + inside.size:
            inside.pool.add(inside.cut(last - first))
        inside.mapped = False
        self.reserved -= inside.size
        inside = self._merged(inside)
        bisect.insort(inside.pool.unmapped, inside, key=lambda one: one.address)

    def _merged(self, block: Block) -> Block:
        """Join a free block with its free neighbours, which leave their pool (``try_merge_blocks``)."""
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
                continue
            if neighbour.mapped:
                block.pool.remove(neighbour)
            else:
                block.pool.unmapped.remove(neighbour)
            lower, upper = sorted((block, neighbour), key=lambda one: one.address)
            lower.swallow(upper)
            block = lower
        return block

    def _take(self, size: int) -> bool:
        """Count memory as taken from the card, if it has so much."""
        if self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _addresses(self, size: int) -> int:
        """Return addresses for a new segment, a page from the last one, so that no two segments are neighbours."""
        address = self._next_address
        self._next_address += _up(size, LARGE_SEGMENT) + LARGE_SEGMENT
        return address


def _room(pool: Pool, size: int) -> Block | None:
    """Return the lowest free block after which free and unmapped addresses follow, ``size`` bytes in all."""
    for unmapped in pool.unmapped:
        first = unmapped
        if unmapped.before and unmapped.before.free:
            first = unmapped.before
        found = 0
        block: Block | None = first
        while block and block.free and found < size:
            found += block.size
            block = block.after
        if found >= size:
            return first
    return None


def _can_grow_to(block: Block) -> int:
    """The size of a free block together with the unmapped addresses after it."""
    if block.after and not block.after.mapped:
        return block.size + block.after.size
    return block.size


def _up(size: int, step: int) -> int:
    """Round up to a multiple of ``step``."""
    return -(-size // step) * step
