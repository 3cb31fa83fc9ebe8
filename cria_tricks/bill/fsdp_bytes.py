r"""Estimate the memory of one process under FSDP2 (torch 2.13), that is, ZeRO-3 applied block by block.

FSDP2 shards every tensor along its first dimension over N processes. A shard consists of whole slices along that
dimension. If N does not divide it, the first shards are larger, and this file counts the largest one. LoRA's A of shape
(r, D) has r slices, so at most r processes have a shard of it.

On top of the shards come tensors that are unsharded for a while:

- The root, from the beginning of the forward pass to the end of the backward pass. The root is what lies outside the
  blocks: embedding, last norm and head.
- The weights of the open block, whose forward or backward pass is running. FSDP2 gathers a block into one flat buffer,
  copies each weight out of it, and frees the buffer only when the next block has arrived. So in the forward pass an
  open block is there as weights and as buffer. In the backward pass, the buffer of the block that comes next is alive
  instead, because its weights are fetched ahead.
- The gradients of the open block, and those of the block that ran just before, which are being reduce-scattered. With
  gradient accumulation nothing is reduced before the last micro-batch, so until then all gradients stay unsharded.

Sources: Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.3; torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.lines import STATE, Line, Moment
from cria_tricks.bill.moments import moments


class _Unsharded(NamedTuple):
    """What FSDP2 holds for the blocks at a moment of the step, besides the shards.

    Attributes:
        blocks: how many buffers of the size of one block's weights there are: unsharded weights or all-gather buffers.
        reduced: 1 if the gradients of the blocks have been reduced, so that their shards are here; else 0.
        gradients: of how many blocks the unsharded gradients are here.
    """

    blocks: int
    reduced: int
    gradients: int


_UNSHARDED = {
    # The last block's buffer: freed when the root's forward pass ends, and fetched again when its backward pass begins.
    "loss": _Unsharded(blocks=1, reduced=0, gradients=0),
    "log-softmax": _Unsharded(blocks=1, reduced=0, gradients=0),
    "head": _Unsharded(blocks=1, reduced=0, gradients=0),
    "last norm": _Unsharded(blocks=1, reduced=0, gradients=0),
    # In a block: its weights and one buffer.
    "forward": _Unsharded(blocks=2, reduced=0, gradients=0),
    # The backward pass comes to the last block first, so no other block has gradients yet.
    "last block": _Unsharded(blocks=2, reduced=0, gradients=1),
    # Blocks that it reaches later: their own gradients, and those of the block that ran just before, which are being
    # reduced. (No block comes after the model's first one, so there one buffer too many is counted: an upper bound.)
    "last checkpointed block": _Unsharded(blocks=2, reduced=1, gradients=2),
    "first kept block": _Unsharded(blocks=2, reduced=1, gradients=2),
    "first block": _Unsharded(blocks=2, reduced=1, gradients=2),
    "frozen block": _Unsharded(blocks=2, reduced=1, gradients=2),
    "last frozen block": _Unsharded(blocks=2, reduced=0, gradients=1),
    # All blocks are done. The gradients of the first one are still being reduced.
    "embedding": _Unsharded(blocks=0, reduced=1, gradients=1),
}
"""The name of a moment of ``bill/moments.py`` -> what is unsharded. In the optimizer step nothing is."""

_FIXED_LINES = 6
"""How many lines of the first moment of ``bill/moments.py`` are taken as alive when a block arrives: the first ones.

Five come from ``moments._fixed`` (three of weights, optimizer states, batch), the sixth is the gradients of earlier
micro-batches. Unless blocks are checkpointed, this moment's "batch" has no attention mask, so the arrivals lack it.
"""


class _Group(NamedTuple):
    """Several tensors of the same shape.

    Attributes:
        tensors: how many there are.
        first_dim: the size of their first dimension, along which FSDP2 shards them.
        elements: elements of one tensor.
    """

    tensors: int
    first_dim: int
    elements: int

    def shard(self, processes: int) -> int:
        """Return the elements of the largest shard, summed over the tensors of the group."""
        return self.tensors * divided_up(self.first_dim, processes) * (self.elements // self.first_dim)


class _Sizes(NamedTuple):
    """Sizes in one process [bytes].

    Attributes:
        shards: the shards of weights, gradients and optimizer states, by the names of their lines (:data:`STATE`).
        block: the unsharded weights of one block, with its adapters or its copy.
        block_gradients: the unsharded gradients of one block that trains.
        reduced_gradients: the shards of the gradients of all blocks.
        root: the unsharded weights of the root.
        root_gradients: the unsharded gradients of the root.
    """

    shards: dict[str, int]
    block: int
    block_gradients: int
    reduced_gradients: int
    root: int
    root_gradients: int


def _sizes(memory: StepFacts, processes: int) -> _Sizes:
    """Compute the sizes of the shards and of the unsharded tensors."""
    matrices, small, root, added = _tensors(memory)
    trained = [*matrices, *small, *root] if memory.trains_all else added
    stored, itemsize = _stored(memory, matrices)
    # FSDP2 shards parameters only. The scales of 4-bit weights are no parameters, so each process holds all of them.
    scales = memory.block_weight_bytes - round(itemsize * _elements(stored))

    def shards(groups: Iterable[_Group], bytes_each: float) -> int:
        return round(bytes_each * sum(group.shard(processes) for group in groups))

    in_order_of_state = (
        shards(stored, itemsize) + scales,
        shards([*small, *root], memory.other_weight_itemsize),
        shards(added, FP32),
        shards(trained, FP32),  # gradients
        shards(trained, 2 * FP32),  # the two states of AdamW
    )
    added_in_blocks = _in_blocks(memory, added)
    layers = memory.shape.layers
    # A side network's copies are only in the last blocks. The largest block counts, so one with a copy.
    with_added = memory.learning_blocks if memory.learns_beside else layers
    block = (round(itemsize * _elements(stored)) + memory.other_weight_itemsize * _elements(small)) // layers
    block += FP32 * _elements(added_in_blocks) // with_added
    trained_in_blocks = [*matrices, *small] if memory.trains_all else added_in_blocks
    with_gradients = layers if memory.trains_all else with_added
    blocks_gradients = FP32 * _elements(trained_in_blocks)
    added_to_root = _elements(added) - _elements(added_in_blocks)
    return _Sizes(
        shards=dict(zip(STATE, in_order_of_state, strict=True)),
        block=block,
        block_gradients=blocks_gradients // with_gradients,
        reduced_gradients=shards(trained_in_blocks, FP32),
        root=memory.other_weight_itemsize * _elements(root) + FP32 * added_to_root,
        root_gradients=FP32 * _elements(trained) - blocks_gradients,
    )


def _in_blocks(memory: StepFacts, added: list[_Group]) -> list[_Group]:
    """Return the added tensors if they belong to blocks (LoRA, a side network), else none (a head, a prompt)."""
    return added if memory.adapted or memory.learns_beside else []


def _tensors(memory: StepFacts) -> tuple[list[_Group], list[_Group], list[_Group], list[_Group]]:
    """List the model's tensors: the blocks' matrices, the blocks' other tensors, those of the root, the added ones."""
    shape = memory.shape
    width = shape.width
    inner = shape.inner
    layers = shape.layers
    experts = shape.experts
    matrices = [_Group(layers, d_out, d_in * d_out) for d_in, d_out in shape.packable.values()]
    small = [_Group(layers * shape.norms, width, width)]
    small += [_Group(layers, shape.linears[name][1], shape.linears[name][1]) for name in shape.biased]
    if shape.qk_norm and shape.norms_whole_queries:  # one norm as wide as all query heads, and one for the keys
        small += [_Group(layers, wide, wide) for wide in (shape.query_width, shape.kv_width)]
    elif shape.qk_norm:  # two norms as wide as one head
        small.append(_Group(2 * layers, shape.head_width, shape.head_width))
    if experts > 1:
        # The router; the gate and up projections of all experts in one tensor; their down projections in another.
        small += [_Group(layers, experts, experts * elements) for elements in (width, 2 * width * inner, width * inner)]
    embeddings = 1 if shape.tied else 2  # a head that is not tied is a second matrix of the same shape
    root = [_Group(embeddings, shape.vocabulary, shape.embedding_weights), _Group(1, width, width)]
    if not memory.adapted:
        # The facts do not tell the shapes of these tensors, so they count as divisible element by element.
        return matrices, small, root, [_Group(count, elements, elements) for count, elements in memory.added]
    added = []
    for name in memory.adapted:
        d_in, d_out = shape.linears[name]
        count = layers * shape.copies(name)
        added += [_Group(count, memory.rank, memory.rank * d_in), _Group(count, d_out, memory.rank * d_out)]  # A, B
        if memory.dora:
            added.append(_Group(count, d_out, d_out))  # the magnitudes
    return matrices, small, root, added


def sharded_moments(memory: StepFacts, processes: int) -> list[Moment]:
    """Return the moments of a step under FSDP2: weights, gradients and states as shards, plus what is unsharded.

    Args:
        memory: the facts of the step that one process computes, with its own micro-batches.
        processes: the number of processes, N.

    Returns:
        Two moments at which the weights of a block arrive in the forward pass, and then those of ``bill/moments.py``.
    """
    sizes = _sizes(memory, processes)
    steps = moments(memory)
    state = {name: size for name, size in sizes.shards.items() if name != "gradients"}
    found = _arrivals(sizes, steps, state)
    # With accumulation, the line "gradients" of ``bill/moments.py`` includes the new gradient of a trained embedding
    # that is also the head, so it is not added again.
    has_root_gradient = memory.accumulates and memory.trains_all and memory.shape.tied
    for moment in steps[:-1]:
        here = _UNSHARDED[moment.name]
        limits = dict(state)
        blocks_with_gradients = here.gradients
        if memory.accumulates:
            # Nothing is reduced before the last micro-batch, and autograd adds new gradients to the old ones in place.
            # So the line "gradients" stays, all unsharded. On top comes the buffer in which one block's gradients are
            # reduce-scattered. Adding an untied root's gradients is an upper bound: they, too, are added in place.
            blocks_with_gradients = min(here.gradients, 1)
        else:
            limits["gradients"] = here.reduced * sizes.reduced_gradients
        # The gradients of the root are reduced last, so they are unsharded during the backward pass of all blocks.
        # (That of an untied embedding comes after all blocks; counting it here is an upper bound.)
        in_backward = moment.name.endswith("block") and not has_root_gradient
        # At "embedding", without accumulation, the limit above leaves only the blocks' shards in the line "gradients".
        # So the root's gradients are added here.
        root_waits = in_backward or (moment.name == "embedding" and not memory.accumulates)
        gradients = blocks_with_gradients * sizes.block_gradients + root_waits * sizes.root_gradients
        lines = smaller(moment, limits).lines
        unsharded = _unsharded_lines(sizes, roots=1, blocks=here.blocks, gradients=gradients)
        found.append(Moment(moment.name, (*lines, *unsharded)))
    optimizer_step = smaller(steps[-1], sizes.shards)
    return [*found, optimizer_step]


def _arrivals(sizes: _Sizes, steps: list[Moment], state: dict[str, int]) -> list[Moment]:
    """Return the two moments of the forward pass at which the weights of the first and of the last block arrive.

    The arriving block has saved no activations yet.

    Args:
        sizes: of the process.
        steps: the moments of ``bill/moments.py``.
        state: the shards by the names of their lines, without the gradients [bytes].
    """
    fixed = smaller(Moment("", steps[0].lines[:_FIXED_LINES]), state).lines
    saved: list[Line] = []
    for step in steps:
        if step.name == "last block":
            # The saved activations of all blocks but the last.
            saved += [line for line in step.lines if line.name == "saved activations"]
    # First block: weights and buffer of the root, which arrived just before, and those of the block.
    first = _unsharded_lines(sizes, roots=2, blocks=2, gradients=0)
    # Last block: its weights and its buffer, and the buffer of the block before.
    last = _unsharded_lines(sizes, roots=1, blocks=3, gradients=0)
    return [Moment("first block arrives", (*fixed, *first)), Moment("last block arrives", (*fixed, *saved, *last))]


def _unsharded_lines(sizes: _Sizes, *, roots: int, blocks: int, gradients: int) -> tuple[Line, Line]:
    """Return the bill's lines of unsharded tensors.

    Args:
        sizes: of the process.
        roots: how many buffers of the size of the root's weights.
        blocks: how many buffers of the size of one block's weights.
        gradients: the unsharded gradients [bytes].
    """
    return (
        Line(
            "weights: unsharded",
            roots * sizes.root + blocks * sizes.block,
            f"{roots} x embedding and head, {blocks} x a block",
        ),
        Line("gradients: unsharded", gradients, "before and during the reduce-scatter"),
    )


class Gathered(NamedTuple):
    """The sizes of FSDP2's collectives [bytes].

    Attributes:
        blocks: all-gather of the weights of all blocks.
        root: all-gather of the root's weights.
        blocks_gradients: reduce-scatter of the gradients of all blocks.
        root_gradients: reduce-scatter of the root's gradients.
    """

    blocks: int
    root: int
    blocks_gradients: int
    root_gradients: int


def gathered(memory: StepFacts, processes: int) -> Gathered:
    """Return the sizes of the collectives that gather the whole model once, and reduce its gradients once.

    FSDP2 pads all shards of a tensor to the largest, so a collective is as large as N times the largest shard.

    Args:
        memory: the facts of the step.
        processes: the number of processes, N.
    """
    matrices, small, root, added = _tensors(memory)
    stored, itemsize = _stored(memory, matrices)
    added_in_blocks = _in_blocks(memory, added)
    added_to_root = [] if added_in_blocks else added

    def padded(groups: Iterable[_Group], bytes_each: float) -> int:
        return round(bytes_each * processes * sum(group.shard(processes) for group in groups))

    def padded_gradients(loaded: list[_Group], added: list[_Group]) -> int:
        if memory.trains_all:
            return padded([*loaded, *added], FP32)
        return padded(added, FP32)

    blocks = padded(stored, itemsize) + padded(small, memory.other_weight_itemsize) + padded(added_in_blocks, FP32)
    return Gathered(
        blocks=blocks,
        root=padded(root, memory.other_weight_itemsize) + padded(added_to_root, FP32),
        blocks_gradients=padded_gradients([*matrices, *small], added_in_blocks),
        root_gradients=padded_gradients(root, added_to_root),
    )


def _stored(memory: StepFacts, matrices: list[_Group]) -> tuple[list[_Group], float]:
    """Return the blocks' matrices as they are stored, and the bytes of one stored element."""
    if memory.elements_per_byte == 1:
        return matrices, memory.block_weight_bytes / _elements(matrices)
    # A 4-bit matrix is stored as one column of bytes, with two elements in each byte.
    packed = []
    for group in matrices:
        bytes_of_one = divided_up(group.elements, memory.elements_per_byte)
        packed.append(_Group(group.tensors, bytes_of_one, bytes_of_one))
    return packed, 1


def smaller(moment: Moment, bytes: dict[str, int]) -> Moment:
    """Return a copy of a moment, in which some lines are limited to a number of bytes.

    Args:
        moment: the moment; it is not changed.
        bytes: the limits by the names of the lines [bytes]. All other lines stay as they are. A shard is never larger
            than its tensor. So a line with bytes gets exactly its limit, and a line of 0 bytes stays 0.
    """
    lines = (replace(line, bytes=min(line.bytes, bytes.get(line.name, line.bytes))) for line in moment.lines)
    return Moment(moment.name, tuple(lines))


def divided_up(total: int, parts: int) -> int:
    """Return ``total / parts``, rounded up: the size of the largest part."""
    return -(-total // parts)


def _elements(groups: Iterable[_Group]) -> int:
    """Return the elements of all tensors in the groups."""
    return sum(group.tensors * group.elements for group in groups)
