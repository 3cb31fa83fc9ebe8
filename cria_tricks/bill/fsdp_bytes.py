r"""The bytes of one process under FSDP2 (torch 2.13), which is ZeRO-3 block by block.

Every tensor is cut along its first dimension into N pieces of whole rows, the first ones larger where N does not divide
it: of LoRA's A, (r, D), no more than r processes have any. On top come tensors that are whole for a while:

- embedding, last norm and head, from the beginning of the forward to the end of the backward pass;
- while a block is open, its weights, and the buffer they came in or, in the backward pass, that of the next ones; while
  they arrive in the forward pass, the buffer of those before them too;
- gradients of the open block, and those of the one before it, on their way. While micro-batches are accumulated nothing
  is sent: all gradients wait whole until the last one.

Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.3; ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill.bill import STATE
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.moments import moments
from cria_tricks.bill.rows import Moment, Row

_WHOLE = {
    "loss": (1, 0, 0),
    "log-softmax": (1, 0, 0),
    "head": (1, 0, 0),
    "last norm": (1, 0, 0),
    "forward": (2, 0, 0),
    "last block": (2, 0, 1),
    "first block": (2, 1, 2),
    "frozen block": (2, 1, 2),
    "embedding": (0, 1, 1),
}
"""At each moment: whole blocks, whether the blocks' gradients have been sent, and whole gradients of blocks."""


class _Cut(NamedTuple):
    """Tensors alike: how many, their first dimension, elements of each."""

    many: int
    first: int
    elements: int

    def piece(self, processes: int) -> int:
        """Elements of the largest piece of all: whole rows of the first dimension."""
        return self.many * divided_up(self.first, processes) * (self.elements // self.first)


class _Sizes(NamedTuple):
    """Bytes of the state in one process, by row, and of what is whole for a while."""

    pieces: dict[str, int]
    block: int
    block_gradients: int
    sent_gradients: int
    root: int
    root_gradients: int


def _sizes(memory: StepFacts, processes: int) -> _Sizes:
    matrices, small, root, added = _tensors(memory)
    trained = [*matrices, *small, *root] if memory.trains_all else added
    packed, each = _stored(memory, matrices)
    scales = memory.block_weight_bytes - round(each * _all(packed))  # what 4-bit weights are scaled by is cut by nobody

    def pieces(cuts: Iterable[_Cut], size: float) -> int:
        return round(size * sum(cut.piece(processes) for cut in cuts))

    sizes = (
        pieces(packed, each) + scales,
        pieces([*small, *root], memory.other_weight_itemsize),
        pieces(added, FP32),
        pieces(trained, FP32),
        pieces(trained, 2 * FP32),
    )
    in_blocks = added if memory.adapted or memory.learns_beside else []  # else a head, or a prompt
    blocks = round(each * _all(packed)) + memory.other_weight_itemsize * _all(small) + FP32 * _all(in_blocks)
    learning = [*matrices, *small] if memory.trains_all else in_blocks
    learns = FP32 * _all(learning)
    at_the_top = memory.other_weight_itemsize * _all(root) + FP32 * (_all(added) - _all(in_blocks))
    return _Sizes(
        dict(zip(STATE, sizes, strict=True)),
        blocks // memory.shape.layers,
        learns // memory.shape.layers,
        pieces(learning, FP32),
        at_the_top,
        FP32 * _all(trained) - learns,
    )


def _tensors(memory: StepFacts) -> tuple[list[_Cut], list[_Cut], list[_Cut], list[_Cut]]:
    """The blocks' matrices, their other tensors, those of no block, and those that are added."""
    shape = memory.shape
    width = shape.width
    inner = shape.inner
    layers = shape.layers
    experts = shape.experts
    matrices = [_Cut(layers, d_out, d_in * d_out) for d_in, d_out in shape.packable.values()]
    small = [_Cut(layers * shape.norms, width, width)]
    small += [_Cut(layers, shape.linears[name][1], shape.linears[name][1]) for name in shape.biased]
    if shape.qk_norm:
        small.append(_Cut(2 * layers, shape.head_width, shape.head_width))
    if experts > 1:  # the router, and all experts' matrices in two tensors
        small += [_Cut(layers, experts, experts * elements) for elements in (width, 2 * width * inner, width * inner)]
    root = [_Cut(1 if shape.tied else 2, shape.vocabulary, shape.embedding_weights), _Cut(1, width, width)]
    if not memory.adapted:
        return matrices, small, root, [_Cut(many, elements, elements) for many, elements in memory.added]
    added = []
    for name in memory.adapted:
        (d_in, d_out) = shape.linears[name]
        many = layers * shape.copies(name)
        added += [_Cut(many, memory.rank, memory.rank * d_in), _Cut(many, d_out, memory.rank * d_out)]
        added += [_Cut(many, d_out, d_out)] * memory.dora
    return matrices, small, root, added


def sharded_moments(memory: StepFacts, processes: int) -> list[Moment]:
    """The moments of a step, with pieces for the state, and what is whole beside them.

    Args:
        memory: of what a process computes.
        processes: N.
    """
    sizes = _sizes(memory, processes)
    steps = moments(memory)
    gradients = dict[str, int]()
    if not memory.accumulates:
        gradients["gradients"] = sizes.sent_gradients
    state = {name: size for name, size in sizes.pieces.items() if name != "gradients"}
    found = _arrivals(sizes, steps, state)
    for moment in steps[:-1]:
        blocks, sent, whole = _WHOLE[moment.name]
        made = whole
        if memory.accumulates:
            made = min(whole, 1)
        # The step of one card has the first part of a tied embedding's new gradient already, where others wait.
        waits = moment.name.endswith("block") and not (memory.accumulates and memory.trains_all and memory.shape.tied)
        at_the_top = waits or (moment.name == "embedding" and not memory.accumulates)
        opened = made * sizes.block_gradients + at_the_top * sizes.root_gradients
        rows = smaller(moment, state | {name: sent * size for name, size in gradients.items()}).rows
        found.append(Moment(moment.name, (*rows, *_whole(1, blocks, sizes, opened))))
    return [*found, smaller(steps[-1], sizes.pieces)]


def _arrivals(sizes: _Sizes, steps: list[Moment], state: dict[str, int]) -> list[Moment]:
    """The forward pass, when the weights of a block have just come: nothing of it is kept yet."""
    always = smaller(Moment("", steps[0].rows[:6]), state).rows  # what lives through the step, accumulated gradients
    kept: list[Row] = []
    for step in steps:
        if step.name == "last block":
            kept += [row for row in step.rows if row.name == "blocks: waiting"]
    return [
        Moment("first block arrives", (*always, *_whole(2, 2, sizes, 0))),
        Moment("last block arrives", (*always, *kept, *_whole(1, 3, sizes, 0))),
    ]


def _whole(roots: int, blocks: int, sizes: _Sizes, gradients: int) -> tuple[Row, Row]:
    return (
        Row(
            "weights: whole",
            roots * sizes.root + blocks * sizes.block,
            f"{roots} x embedding, last norm, head, {blocks} x a block; buffers included",
        ),
        Row("gradients: whole", gradients, "as they were made, and on their way"),
    )


class Gathered(NamedTuple):
    """Bytes that travel when all blocks are made whole, when the rest is, and when what learns is added up."""

    blocks: int
    root: int
    blocks_gradients: int
    root_gradients: int


def gathered(memory: StepFacts, processes: int) -> Gathered:
    """What FSDP2 sends to make a model whole once: N pieces of every tensor, as large as the largest of them."""
    matrices, small, root, added = _tensors(memory)
    packed, each = _stored(memory, matrices)
    in_blocks = added if memory.adapted or memory.learns_beside else []
    at_the_top = [] if in_blocks else added

    def padded(cuts: Iterable[_Cut], size: float) -> int:
        return round(size * processes * sum(cut.piece(processes) for cut in cuts))

    def learning(loaded: list[_Cut], beside: list[_Cut]) -> int:
        if memory.trains_all:
            return padded([*loaded, *beside], FP32)
        return padded(beside, FP32)

    return Gathered(
        padded(packed, each) + padded(small, memory.other_weight_itemsize) + padded(in_blocks, FP32),
        padded(root, memory.other_weight_itemsize) + padded(at_the_top, FP32),
        learning([*matrices, *small], in_blocks),
        learning(root, at_the_top),
    )


def _stored(memory: StepFacts, matrices: list[_Cut]) -> tuple[list[_Cut], float]:
    """The blocks' matrices as they lie in memory, and bytes of an element."""
    if not memory.unpacks:
        return matrices, memory.block_weight_bytes / _all(matrices)
    # Two in a byte, in one column.
    return [_Cut(cut.many, divided_up(cut.elements, 2), divided_up(cut.elements, 2)) for cut in matrices], 1


def smaller(moment: Moment, bytes: dict[str, int]) -> Moment:
    """A moment with some of its rows, by name, made as small as this."""
    rows = (replace(row, bytes=min(row.bytes, bytes.get(row.name, row.bytes))) for row in moment.rows)
    return Moment(moment.name, tuple(rows))


def divided_up(total: int, parts: int) -> int:
    """The largest of N whole parts."""
    return -(-total // parts)


def _all(cuts: Iterable[_Cut]) -> int:
    return sum(cut.many * cut.elements for cut in cuts)
