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

from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill import block
from cria_tricks.bill.block_operations import learning, walk
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.loss import cast_copies, head_gradient
from cria_tricks.bill.operation import FIRST_NORM, INPUT, JOINED, Operation
from cria_tricks.bill.rows import Moment, Row
from cria_tricks.bill.waiting import BlockTensors

IDS = 8
"""Bytes of a token's number, a label and a position."""


def moments(memory: StepFacts, *, every_point: bool = False) -> list[Moment]:
    """Everything that is alive at the moments of a step of which one is the peak.

    Args:
        memory: what is known about the step.
        every_point: of a block all points, and not its deepest only.
    """
    operations = learning(memory)
    fixed, gradients = _fixed(memory, masked=True), _gradients(memory)
    over = _fixed(memory, masked=memory.checkpointed)  # only blocks that are made again need the mask afterwards
    waiting = _waiting(memory, operations)
    # Gradients of earlier micro-batches wait from the beginning.
    before = replace(gradients, bytes=memory.waiting_gradient_bytes)
    at_the_end = memory.loss_moments(memory)
    if memory.trains_head:
        at_the_end["head"] = head_gradient(memory)
    found = [Moment(name, (*over, before, waiting.all, *rows)) for name, rows in at_the_end.items()]
    pick = _all_of if every_point else _deepest
    if memory.learns_beside:  # the frozen blocks below, where no gradient goes and no copy has run
        below = replace(memory, checkpointed=False, learning_blocks=0)
        points = block.points(below, walk(below))
        for point in pick([point for point in points if not point.backward]):
            found.append(Moment("forward", (*fixed, before, *_inside(point))))
    # In its forward pass a block that is made again keeps as little here as one whose tensors are sent away.
    once = replace(memory, checkpointed=False, offloaded=memory.offloaded or memory.checkpointed)
    copies = cast_copies(memory, kept=once.offloaded)
    for point in pick([point for point in block.points(once, learning(once)) if not point.backward]):
        found.append(Moment("forward", (*fixed, before, waiting.others, copies, *_inside(point))))
    points = block.points(memory, operations, learns=not memory.accumulates)
    if not memory.checkpointed:
        points = [point for point in points if point.backward]
    for point in pick(points) if memory.learning_blocks else []:
        behind, nearly = _gradients_at(memory, point, sum(operation.learns for operation in operations))
        # Nothing learns below the first copy, so no gradient waits for the frozen block beside it.
        ends = memory.learns_beside and not memory.checkpointed
        lowest = replace(point, opened=point.opened - _block_input(memory)) if ends else point
        last = point if memory.learning_blocks > 1 else lowest
        found.append(Moment("last block", (*over, behind, waiting.others, *_inside(last))))
        found.append(Moment("first block", (*over, nearly, waiting.one, *_inside(lowest))))
    if memory.learns_beside and (memory.checkpointed or memory.learning_blocks > 1):
        waits = _block_input(memory)  # the gradient that the copy gave for the input of both
        frozen = [replace(one, forward=one.forward + waits, backward=one.backward + waits) for one in walk(memory)]
        # The lowest of them, when all copies above have learnt, if inputs are all that waits, or all else is on the
        # host; else the highest, when its own copy is the only one that has learnt.
        blocks = memory.learning_blocks
        learnt = blocks - 1 if memory.offloaded else 1
        learnt = blocks if memory.checkpointed or memory.accumulates else learnt
        of_copies = replace(gradients, bytes=gradients.bytes * learnt // blocks)
        for point in pick(block.points(memory, frozen)):
            found.append(Moment("frozen block", (*over, of_copies, waiting.frozen, *_inside(point))))
    if memory.trains_all:
        found.append(Moment("embedding", (*over, gradients, _embedding_gradient(memory))))
    return [*found, Moment("optimizer step", (*over, gradients))]  # every kernel updates in place


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
    gradients, embedding = _gradients(memory), memory.shape.embedding_weights * FP32 * memory.trains_all
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
    shape, n = memory.shape, memory.all_tokens
    leftovers = shape.weights - shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values())
    added = sum(many * elements for many, elements in memory.added)
    mask = 0
    if masked and not memory.maskless:  # of one byte, or added to the scores
        mask = memory.batch * memory.tokens**2 * (memory.stream if memory.kernel == "eager" else 1)
    rows = memory.batch if memory.joins_documents else 1  # where documents begin is another place in each row
    positions = 2 * rows * memory.tokens * shape.head_width * memory.stream
    return (
        Row("weights: blocks' matrices", memory.matrices, f"{shape.layers} blocks, as they are stored"),
        Row(
            "weights: all others", leftovers * memory.others, "embedding, head if it is another, norms, biases, experts"
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


def _waiting(memory: StepFacts, operations: list[Operation]) -> _Waiting:
    tensors = block.kept(operations)
    pinned = block.pinned_bytes(operations)
    a_block = BlockTensors(
        input=_block_input(memory),
        kept=sum(tensors.values()),
        pinned=pinned,
        joined=sum(tensors.get(name, 0) for name in JOINED),
        # A matrix keeps its input as it is, a norm only if it is fp32.
        keeps_input=INPUT in tensors or (memory.stream == FP32 and FIRST_NORM in tensors),
    )
    waits = memory.block_waits(a_block)
    frozen = _frozen_beside(memory)
    each = waits.each + frozen.each
    below = frozen.below
    blocks = memory.learning_blocks
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
    return _Waiting(
        everything,
        replace(everything, bytes=others, why=f"{blocks - 1} blocks x {why}"),
        replace(everything, bytes=one, why=f"1 block x {why}"),
        replace(everything, bytes=one if memory.checkpointed else others - frozen.open, why=f"1 block x {why}"),
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
    if memory.checkpointed:
        # Checkpointing wants a gradient of the embedding's result, so it goes through all frozen blocks down to there.
        held, below = block.pinned_bytes(operations), memory.shape.layers - memory.learning_blocks
        one = held + (0 if memory.offloaded else _block_input(memory))
        return _Frozen(each=held, pinned=held, below=below * one, why=f", and {below} x the frozen ones'")
    between, pinned = memory.learning_blocks - 1, block.pinned_bytes(operations)
    each, why = pinned, f", and {between} x the frozen ones'"
    if not memory.offloaded:  # an fp32 input is the copy's, too
        each = sum(block.kept(operations).values()) - (_block_input(memory) if memory.stream == FP32 else 0)
    return _Frozen(between=between * each, open=each, stays=between * pinned, why=why)


def _block_input(memory: StepFacts) -> int:
    return memory.all_tokens * memory.shape.width * memory.stream


def _gradients(memory: StepFacts) -> Row:
    return Row("gradients", memory.trained_weights * FP32, "fp32, one for each trained weight")


def _embedding_gradient(memory: StepFacts) -> Row:
    many = 2 * memory.shape.tied + memory.accumulates  # and the one that is added to
    came = memory.all_tokens * memory.shape.width * memory.stream
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
