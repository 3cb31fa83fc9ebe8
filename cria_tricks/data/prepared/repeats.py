"""Find rows that repeat an earlier row, on files, so that memory does not grow with the rows.

The result is that of :class:`cria_tricks.data.duplicates.Repeats`, which keeps everything in memory. The stages are
those of datatrove's MinHash (``datatrove.pipeline.dedup.minhash``):

1. :class:`Signatures`: each part of the rows writes its signatures, and the keys of its bands in ascending order. Parts
   do not depend on each other, so several processes can write them.
2. The sorted keys of all parts are merged, a range of keys at a time. Rows with an equal key are neighbours then. A key
   that only one row has is dropped.
3. :func:`find`: rows with an equal key are compared by their whole signatures, in the order of the rows. A row that
   repeats an earlier row *which was kept* is left out. (datatrove does not compare them. It leaves out all but one row
   of each cluster of rows that are connected by equal keys.)

Stage 2 sorts at most about :data:`AT_ONCE` keys at a time. Stage 3 keeps one byte in memory for each row, and at its
peak about 60 bytes for each key of a row that another row has, too: 1 KB for a row that shares all 17.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from cria_tricks.common import atomic_files
from cria_tricks.data.duplicates import BANDS, FACTOR, IN_BAND, NEAR, PERMUTATIONS, digest, sign, words
from cria_tricks.data.rows import Chat

KEPT = 0
REASONS = (None, "duplicate", "near duplicate")
"""What :func:`find` says of a row, by its number: kept, or why it is left out."""
AT_ONCE = 2**22
"""About how many keys are sorted at a time: 4 million take 160 MiB, 40 bytes each."""


class Signatures:
    """Collect the keys and signatures of the rows of one part, and write them as files.

    Args:
        near: whether rows that are nearly the same count as repeats, too; else only rows with the same words do.
    """

    def __init__(self, near: bool):
        self.near = near
        self.digests: list[int] = []
        self.signatures: list[np.ndarray] = []

    def add(self, row: Chat) -> None:
        found = words(row.content)
        self.digests.append(digest(found))
        if self.near:
            self.signatures.append(sign(found).hashvalues.astype(np.uint32))

    def clear(self) -> None:
        self.digests.clear()
        self.signatures.clear()

    def write(self, part: Path) -> None:
        """Write the files of this part: its path with ``.signatures``, ``.rows.npy`` and ``.keys.npy`` behind it.

        ``.keys.npy`` holds the keys in ascending order, a line for the words' hash and one for each band, and
        ``.rows.npy`` the row of each key.
        """
        signatures = np.array(self.signatures, np.uint32).reshape(-1, PERMUTATIONS)
        keys = [np.array(self.digests, np.uint64)]
        if self.near:
            keys += _band_keys(signatures)
        order = [np.argsort(column, kind="stable") for column in keys]
        ascending = [column[rows] for column, rows in zip(keys, order, strict=True)]
        with atomic_files.new_file(_file(part, "signatures")) as path:
            signatures.tofile(path)
        with atomic_files.new_file(_file(part, "rows.npy")) as path, path.open("wb") as file:
            np.save(file, np.array(order, np.uint32))
        with atomic_files.new_file(_file(part, "keys.npy")) as path, path.open("wb") as file:
            np.save(file, np.array(ascending))


def _file(part: Path, name: str) -> Path:
    return part.with_name(f"{part.name}.{name}")


def _band_keys(signatures: np.ndarray) -> list[np.ndarray]:
    """Hash each band of each signature to 64 bits: a list of :data:`BANDS` arrays of shape (N,), uint64."""
    bands = signatures.reshape(-1, BANDS, IN_BAND).astype(np.uint64)
    mixed = np.zeros(bands.shape[:2], np.uint64)
    for place in range(IN_BAND):
        mixed = (mixed + bands[:, :, place] + np.uint64(1)) * np.uint64(FACTOR)
        mixed ^= mixed >> np.uint64(29)
    return list(mixed.T)


def find(parts: Sequence[Path]) -> np.ndarray:
    """Find the rows that repeat an earlier row which is kept.

    Args:
        parts: the paths given to :meth:`Signatures.write`, in the order of the rows.

    Returns:
        The index of each row's reason in :data:`REASONS`, shape (rows of all parts,), uint8.
    """
    store = _Store(parts)
    verdicts = np.zeros(store.starts[-1], np.uint8)
    # A group is the rows that share a key. A row is a member of several groups, one for each of its shared keys.
    rows, groups, exact_groups = store.members()
    # The kept members of each group are a linked list, because a group may have any number of them.
    newest = np.full(groups.max(initial=-1) + 1, -1)  # the last kept member of each group
    before = np.full(len(rows), -1)  # the kept member before each kept member of the same group
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    for begin, end in pairwise([*begins.tolist(), len(rows)]):
        row = int(rows[begin])
        mine = groups[begin:end].tolist()
        exact = any(group < exact_groups and newest[group] >= 0 for group in mine)
        if exact:
            verdicts[row] = REASONS.index("duplicate")
            continue
        earlier = {int(rows[member]) for group in mine for member in _kept(group, newest, before)}
        if any(store.similarity(row, other) >= NEAR for other in earlier):
            verdicts[row] = REASONS.index("near duplicate")
            continue
        for member, group in enumerate(mine, begin):
            before[member] = newest[group]
            newest[group] = member
    return verdicts


def _kept(group: int, newest: np.ndarray, before: np.ndarray) -> Iterator[int]:
    """Yield the kept members of a group, the last one first."""
    member = int(newest[group])
    while member >= 0:
        yield member
        member = int(before[member])


class _Store:
    """The files of all parts."""

    def __init__(self, parts: Sequence[Path]):
        self.parts = parts
        self.starts = [0]  # the number of the first row of each part, and the number of all rows
        self.columns = 1
        for part in parts:
            self.columns, rows = np.load(_file(part, "rows.npy"), mmap_mode="r").shape
            self.starts.append(self.starts[-1] + rows)

    def members(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the rows of all groups and their groups, ordered by row, and the number of groups of equal words."""
        rows = [np.empty(0, np.int64)]
        groups = [np.empty(0, np.int64)]
        number = exact = 0
        for column in range(self.columns):
            for found, group in self._shared(column):
                rows.append(found)
                groups.append(group + number)
                number += int(group[-1]) + 1
            if column == 0:
                exact = number
        all_rows = np.concatenate(rows)
        order = np.argsort(all_rows, kind="stable")
        return all_rows[order], np.concatenate(groups)[order], exact

    def _shared(self, column: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows that share a key of a column, and the numbers of their groups, from 0, a range at a time."""
        ranges = self.starts[-1] // AT_ONCE + 1
        edges = [2**64 * number // ranges for number in range(ranges + 1)]
        for begin, end in pairwise(edges):
            keys = []
            rows = []
            for part, start in zip(self.parts, self.starts, strict=False):
                ascending = np.load(_file(part, "keys.npy"), mmap_mode="r")[column]
                # The last key of a range, and not the first of the next, because 2^64 is no 64-bit number.
                first = np.searchsorted(ascending, np.uint64(begin), "left")
                last = np.searchsorted(ascending, np.uint64(end - 1), "right")
                keys.append(np.array(ascending[first:last]))
                in_part = np.load(_file(part, "rows.npy"), mmap_mode="r")[column, first:last]
                rows.append(in_part.astype(np.int64) + start)
            found = np.concatenate(keys)
            order = np.argsort(found, kind="stable")
            found = found[order]
            as_before = np.concatenate([[False], found[1:] == found[:-1]])
            shared = as_before | np.append(as_before[1:], False)
            if shared.any():
                yield np.concatenate(rows)[order][shared], np.cumsum(~as_before[shared]) - 1

    def similarity(self, row: int, other: int) -> float:
        """Estimate J of two rows: the share of equal numbers in their signatures."""
        return float((self._signature(row) == self._signature(other)).mean())

    def _signature(self, row: int) -> np.ndarray:
        # Read, not mapped: the pages of a map would count as memory of this process until the system needs it.
        part = int(np.searchsorted(self.starts, row, "right")) - 1
        offset = (row - self.starts[part]) * PERMUTATIONS * 4
        return np.fromfile(_file(self.parts[part], "signatures"), np.uint32, PERMUTATIONS, offset=offset)
