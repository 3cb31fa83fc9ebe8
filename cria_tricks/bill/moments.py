r"""The bill by hand: what a recipe costs in bytes, from the widths of the model alone.

A recipe is folded over the same tricks that switch it on. It begins as plain fp32 full fine-tuning; each trick changes
what it changes: how weights are stored, what trains, what a block keeps. Then the moments of a step are added up:

- the end of the forward pass, where everything kept meets the logits, and the loss, where their gradients come;
- the deepest point of the last block, where all other blocks still wait;
- the deepest point of the first block, where the gradients of all others have come;
- the gradient of the embedding, at the very end;
- the optimizer's step.

The peak is the largest of them, and the bill is its rows. They sum to it exactly.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill import block
from cria_tricks.bill.block_operations import walk
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.loss import cast_copies, head_gradient
from cria_tricks.bill.operation import FIRST_NORM, INPUT, JOINED, Operation
from cria_tricks.bill.rows import Moment, Row
from cria_tricks.bill.waiting import BlockTensors

IDS = 8
"""Bytes of a token's number, a label and a position."""


class _Waiting(NamedTuple):
    """What waits in blocks for their backward pass.

    Attributes:
        all: of all blocks.
        others: of all but the last, while the last is open.
        one: while the first is open, and the others are done.
        frozen: while a frozen block is open that has a trained copy beside it.
    """

    all: Row
    others: Row
    one: Row
    frozen: Row


_Pick = Callable[[list[block.Point]], list[block.Point]]
"""Which points of a block are moments of the step."""


def moments(memory: StepFacts, *, every_point: bool = False) -> list[Moment]:
    """Everything that is alive at the moments of a step of which one is the peak.

    Args:
        memory: what is known about the step.
        every_point: of a block all points, and not its deepest only.
    """
    operations = memory.learning_operations(memory)
    gradients = _gradients(memory)
    over = _fixed(memory, masked=memory.checkpointed)  # only blocks that are made again need the mask afterwards
    waiting = _waiting(memory, operations)
    # Gradients of earlier micro-batches wait from the beginning.
    before = replace(gradients, bytes=memory.waiting_gradient_bytes)
    at_the_end = memory.loss_moments(memory)
    if memory.trains_head:
        at_the_end["head"] = head_gradient(memory)
    pick = _all_of if every_point else _deepest
    found = [Moment(name, (*over, before, waiting.all, *rows)) for name, rows in at_the_end.items()]
    found += _forward(memory, waiting, before, pick)
    if memory.learning_blocks:
        found += _backward(memory, operations, waiting, over, pick)
    if memory.learns_beside and (memory.checkpointed or memory.learning_blocks > 1):
        found += _frozen_backward(memory, waiting, over, pick)
    if memory.trains_all:
        found.append(Moment("embedding", (*over, gradients, _embedding_gradient(memory))))
    return [*found, Moment("optimizer step", (*over, gradients))]  # every kernel updates in place


def _forward(memory: StepFacts, waiting: _Waiting, before: Row, pick: _Pick) -> list[Moment]:
    """The forward pass of the last block, and of a frozen one below all that learn."""
    fixed = _fixed(memory, masked=True)
    found: list[Moment] = []
    if memory.learns_beside:  # the frozen blocks below, where no gradient goes and no copy has run
        below = replace(memory, checkpointed=False, learning_blocks=0)
        points = [point for point in block.points(below, walk(below)) if not point.backward]
        found += [Moment("forward", (*fixed, before, *_inside(point))) for point in pick(points)]
    # In its forward pass a block that is made again keeps as little here as one whose tensors are sent away.
    once = replace(memory, checkpointed=False, offloaded=memory.offloaded or memory.checkpointed)
    copies = cast_copies(memory, kept=once.offloaded)
    points = [point for point in block.points(once, memory.learning_operations(once)) if not point.backward]
    for point in pick(points):
        found.append(Moment("forward", (*fixed, before, waiting.others, copies, *_inside(point))))
    return found


def _backward(
    memory: StepFacts, operations: list[Operation], waiting: _Waiting, over: tuple[Row, ...], pick: _Pick
) -> list[Moment]:
    """The backward pass of the last block, where all others wait, and of the first one, where all others are done."""
    points = block.points(memory, operations, learns=not memory.accumulates)
    if not memory.checkpointed:
        points = [point for point in points if point.backward]
    of_a_block = sum(operation.learns for operation in operations)
    found = []
    for point in pick(points):
        behind, nearly = _gradients_at(memory, point, of_a_block)
        lowest = point
        if memory.learns_beside and not memory.checkpointed:
            # Nothing learns below the first copy, so no gradient waits for the frozen block beside it.
            lowest = replace(point, opened=point.opened - _block_input(memory))
        last = point if memory.learning_blocks > 1 else lowest
        found.append(Moment("last block", (*over, behind, waiting.others, *_inside(last))))
        found.append(Moment("first block", (*over, nearly, waiting.one, *_inside(lowest))))
    return found


def _frozen_backward(memory: StepFacts, waiting: _Waiting, over: tuple[Row, ...], pick: _Pick) -> list[Moment]:
    """The backward pass of a frozen block beside a trained copy.

    It is the lowest of them, when all copies above have learnt, if inputs are all that waits, or all else is on the
    host; else the highest, when its own copy is the only one that has learnt.
    """
    waits = _block_input(memory)  # the gradient that the copy gave for the input of both
    frozen = [replace(one, forward=one.forward + waits, backward=one.backward + waits) for one in walk(memory)]
    blocks = memory.learning_blocks
    learnt = 1
    if memory.checkpointed or memory.accumulates:
        learnt = blocks
    elif memory.offloaded:
        learnt = blocks - 1
    gradients = _gradients(memory)
    of_copies = replace(gradients, bytes=gradients.bytes * learnt // blocks)
    return [
        Moment("frozen block", (*over, of_copies, waiting.frozen, *_inside(point)))
        for point in pick(block.points(memory, frozen))
    ]


def _deepest(points: list[block.Point]) -> list[block.Point]:
    return [max(points, key=lambda point: point.bytes)]


def _all_of(points: list[block.Point]) -> list[block.Point]:
    return points


def _gradients_at(memory: StepFacts, point: block.Point, of_a_block: int) -> tuple[Row, Row]:
    """The gradients that are there while the last block's backward pass is at a point, and while the first block's is.

    Args:
        memory: what is known about the step.
        point: of a block.
        of_a_block: bytes of the gradients of all its weights.
    """
    gradients = _gradients(memory)
    embedding = memory.shape.embedding_weights * FP32 * memory.trains_all
    if memory.accumulates:
        # Of an embedding that is the head too, the first part of the new gradient waits to be added to the second.
        with_head = replace(gradients, bytes=gradients.bytes + embedding * memory.shape.tied)
        return with_head, with_head
    to_come = of_a_block - point.learnt + embedding * (not memory.shape.tied)
    return (
        replace(gradients, bytes=embedding + point.learnt, why="fp32, of the head and of what is behind the point"),
        replace(gradients, bytes=gradients.bytes - to_come, why="fp32, of all but what is before the point"),
    )


def _fixed(memory: StepFacts, *, masked: bool) -> tuple[Row, ...]:
    """What lives through the whole step, and the mask, if it is still there."""
    shape = memory.shape
    n = memory.all_tokens
    leftovers = shape.weights - shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values())
    added = sum(many * elements for many, elements in memory.added)
    mask = 0
    if masked and not memory.maskless:
        mask = memory.batch * memory.tokens**2
        if memory.kernel == "eager":  # which adds it to the scores; else it has one byte
            mask = mask * memory.hidden_itemsize
    rows = 1
    if memory.joins_documents:  # where documents begin is another place in each row
        rows = memory.batch
    positions = 2 * rows * memory.tokens * shape.head_width * memory.hidden_itemsize
    return (
        Row("weights: blocks' matrices", memory.block_weight_bytes, f"{shape.layers} blocks, as they are stored"),
        Row(
            "weights: all others",
            leftovers * memory.other_weight_itemsize,
            "embedding, head if it is another, norms, biases, experts",
        ),
        Row("weights: added", added * FP32, "what trains beside them, in fp32"),
        Row("optimizer states", _states(memory), f"two of {memory.optimizer_state_bits} bits for each trained weight"),
        Row("batch", 3 * n * IDS + positions + mask, "numbers of tokens, labels, cosines and sines, the mask"),
    )


def _inside(point: block.Point) -> tuple[Row, Row]:
    """The block that is open."""
    return (
        Row("block: kept", point.kept, f"one block up to the {point.operation}"),
        Row("block: open", point.opened, f"results and gradients around the {point.operation}"),
    )


def _waiting(memory: StepFacts, operations: list[Operation]) -> _Waiting:
    tensors = block.kept(operations)
    pinned = block.pinned_bytes(operations)
    a_block = BlockTensors(
        input=_block_input(memory),
        kept=sum(tensors.values()),
        pinned=pinned,
        joined=sum(tensors.get(name, 0) for name in JOINED),
        # A matrix keeps its input as it is, a norm only if it is fp32.
        keeps_input=INPUT in tensors or (memory.hidden_itemsize == FP32 and FIRST_NORM in tensors),
    )
    waits = memory.block_waits(a_block)
    frozen = _frozen_beside(memory)
    blocks = memory.learning_blocks
    each = waits.each + frozen.each
    below = frozen.below
    # A prompt is what trains where nothing else does; its vectors and the embedded tokens together are a new tensor.
    prompted = not (memory.trains_all or memory.adapted or memory.learns_beside)
    if memory.checkpointed and (prompted or (memory.offloaded and not memory.trains_all)):
        below += _block_input(memory)  # checkpointing asks for a gradient of what the embedding gives, so it stays here
    through = below + frozen.between
    if memory.adapted and not memory.checkpointed:
        through -= block.below_adapters(memory, operations)  # of the first block: no gradient goes there
    if memory.learns_beside and not memory.checkpointed and not memory.offloaded:
        through -= tensors.get(FIRST_NORM, 0)  # nor to what the first copy is given
    why = waits.why + frozen.why
    open_too = waits.open_too
    everything = Row("blocks: waiting", blocks * each + through, f"{blocks} blocks x {why}")
    others = max(blocks - 1, 0) * each + open_too + through + frozen.pinned
    # What is pinned goes when the whole backward pass has run.
    one = open_too + below + blocks * frozen.pinned + frozen.stays + max(blocks - 1, 0) * pinned
    beside = one if memory.checkpointed else others - frozen.open
    return _Waiting(
        everything,
        replace(everything, bytes=others, why=f"{blocks - 1} blocks x {why}"),
        replace(everything, bytes=one, why=f"1 block x {why}"),
        replace(everything, bytes=beside, why=f"1 block x {why}"),
    )


class _Frozen(NamedTuple):
    """What frozen blocks keep that have a trained copy beside them, or are below such: each, between them, below.

    Of what is between them, one's goes when that one is open; a part of it stays until the whole backward pass has run.
    """

    each: int = 0
    between: int = 0
    open: int = 0
    stays: int = 0
    below: int = 0
    pinned: int = 0
    why: str = ""


def _frozen_beside(memory: StepFacts) -> _Frozen:
    """A side network's. The gradient goes through a frozen block only if something learns below it."""
    if not memory.learns_beside:
        return _Frozen()
    operations = walk(memory)
    pinned = block.pinned_bytes(operations)
    if memory.checkpointed:
        # Checkpointing wants a gradient of the embedding's result, so it goes through all frozen blocks down to there.
        below = memory.shape.layers - memory.learning_blocks
        one = pinned
        if not memory.offloaded:
            one += _block_input(memory)
        return _Frozen(each=pinned, pinned=pinned, below=below * one, why=f", and {below} x the frozen ones'")
    each = pinned
    if not memory.offloaded:
        each = sum(block.kept(operations).values())
        if memory.hidden_itemsize == FP32:  # an fp32 input is the copy's, too
            each -= _block_input(memory)
    between = memory.learning_blocks - 1
    why = f", and {between} x the frozen ones'"
    return _Frozen(between=between * each, open=each, stays=between * pinned, why=why)


def _block_input(memory: StepFacts) -> int:
    return memory.all_tokens * memory.shape.width * memory.hidden_itemsize


def _gradients(memory: StepFacts) -> Row:
    return Row("gradients", memory.trained_weights * FP32, "fp32, one for each trained weight")


def _embedding_gradient(memory: StepFacts) -> Row:
    many = 2 * memory.shape.tied + memory.accumulates  # and the one that is added to
    came = memory.all_tokens * memory.shape.width * memory.hidden_itemsize
    return Row(
        "embedding's gradient",
        many * memory.shape.embedding_weights * FP32 + came,
        "the head's, its own, and their sum, and what they are made from",
    )


def _states(memory: StepFacts) -> int:
    every = sum(many * memory.state_bytes(elements) for many, elements in memory.trained)
    if memory.trains_all:
        of_embedding = memory.shape.embedding_weights
        every += memory.embedding_state_bytes(of_embedding) - memory.state_bytes(of_embedding)
    return every
