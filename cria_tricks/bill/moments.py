r"""Estimate the memory of a training step by hand: its peak in bytes, from the widths of the model alone.

The estimate begins with plain fp32 full fine-tuning. Each trick of the recipe then changes its part of the facts: how
weights are stored, what trains, what a block saves. From the facts the bytes that are alive are added up, for each
moment of the step that may be the peak:

- the end of the forward pass, where all saved activations meet the logits, and the loss, where the gradients of the
  logits are made;
- the deepest point of the last block, while the saved activations of all other blocks wait;
- the deepest point of the first block, when the gradients of all other blocks are there;
- the gradient of the embedding, at the end of the backward pass;
- the optimizer step.

The peak is the largest of these moments, and the bill consists of its lines, which sum exactly to the peak.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill import block
from cria_tricks.bill.block_operations import walk
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.lines import Line, Moment
from cria_tricks.bill.loss import cast_copies, head_gradient
from cria_tricks.bill.operation import FIRST_NORM, INPUT, JOINED, Operation
from cria_tricks.bill.saved_activations import BlockTensors

IDS = 8
"""Bytes of one token id, one label or one position: each is a 64-bit integer."""


class _Waiting(NamedTuple):
    """The bill's line for what blocks have saved for their backward pass, at four moments.

    A block is open while its forward or backward pass runs. What an open block has alive is in lines of its own.

    Attributes:
        all: around the loss, when all blocks wait.
        others: while the last block is open, and all others wait.
        one: while the first block is open, and all others are done.
        frozen: while a frozen block is open that has a trained copy beside it (side network).
    """

    all: Line
    others: Line
    one: Line
    frozen: Line


_Pick = Callable[[list[block.Point]], list[block.Point]]
"""A function that chooses which points of a block become moments of the step."""


def moments(memory: StepFacts, *, every_point: bool = False) -> list[Moment]:
    """Return the moments of a step that may be its peak, each with all that is alive there.

    Args:
        memory: the facts of the step.
        every_point: whether to return all points of a block, and not only the deepest. Formulas need all of them,
            because the deepest point may depend on the numbers.
    """
    operations = memory.learning_operations(memory)
    gradients = _gradients(memory)
    over = _fixed(memory, masked=memory.checkpointed)  # after the forward pass only repeated blocks need the mask
    waiting = _waiting(memory, operations)
    # The gradients of earlier micro-batches are alive from the beginning of the step.
    before = replace(gradients, bytes=memory.waiting_gradient_bytes)
    at_the_end = memory.loss_moments(memory)
    if memory.trains_head:
        at_the_end["head"] = head_gradient(memory)
    pick = _all_of if every_point else _deepest
    found = [Moment(name, (*over, before, waiting.all, *lines)) for name, lines in at_the_end.items()]
    found += _forward(memory, waiting, before, pick)
    if memory.learning_blocks:
        found += _backward(memory, operations, waiting, over, pick)
    if memory.learns_beside and (memory.checkpointed or memory.learning_blocks > 1):
        found += _frozen_backward(memory, waiting, over, pick)
    if memory.trains_all:
        found.append(Moment("embedding", (*over, gradients, _embedding_gradient(memory))))
    return [*found, Moment("optimizer step", (*over, gradients))]  # all optimizers update in place


def _forward(memory: StepFacts, waiting: _Waiting, before: Line, pick: _Pick) -> list[Moment]:
    """Return moments of the forward pass: of the last block, and of a frozen block below all trained copies, if any."""
    fixed = _fixed(memory, masked=True)
    found: list[Moment] = []
    if memory.learns_beside:  # in the blocks below the copies there is no gradient, and no copy has run yet
        below = replace(memory, checkpointed=False, learning_blocks=0)
        points = [point for point in block.points(below, walk(below)) if not point.backward]
        found += [Moment("forward", (*fixed, before, *_inside(point))) for point in pick(points)]
    # In its first forward pass a checkpointed block saves as little on the device as an offloaded one.
    once = replace(memory, checkpointed=False, offloaded=memory.offloaded or memory.checkpointed)
    copies = cast_copies(memory, kept=once.offloaded)
    points = [point for point in block.points(once, memory.learning_operations(once)) if not point.backward]
    for point in pick(points):
        found.append(Moment("forward", (*fixed, before, waiting.others, copies, *_inside(point))))
    return found


def _backward(
    memory: StepFacts, operations: list[Operation], waiting: _Waiting, over: tuple[Line, ...], pick: _Pick
) -> list[Moment]:
    """Return moments of the backward pass: of the last block, while all others wait, and of the first, after them."""
    points = block.points(memory, operations, learns=not memory.accumulates)
    if not memory.checkpointed:  # else a block first runs forward again
        points = [point for point in points if point.backward]
    of_a_block = sum(operation.learns for operation in operations)
    found = []
    for point in pick(points):
        behind, nearly = _gradients_at(memory, point, of_a_block)
        lowest = point
        if memory.learns_beside and not memory.checkpointed:
            # Nothing learns below the first copy. So the frozen block beside it has no backward pass, and no gradient
            # waits for that.
            lowest = replace(point, opened=point.opened - _block_input(memory))
        last = point if memory.learning_blocks > 1 else lowest
        found.append(Moment("last block", (*over, behind, waiting.others, *_inside(last))))
        found.append(Moment("first block", (*over, nearly, waiting.one, *_inside(lowest))))
    return found


def _frozen_backward(memory: StepFacts, waiting: _Waiting, over: tuple[Line, ...], pick: _Pick) -> list[Moment]:
    """Return moments of the backward pass of a frozen block that has a trained copy beside it.

    Only one of these blocks can be the peak. If blocks save only their input, or the host has what they save, it is the
    lowest block, because by then all copies above it have their gradients. Else it is the highest, because most saved
    activations still wait; then only its own copy has gradients.
    """
    waits = _block_input(memory)  # the gradient of the input, which the copy has given already
    frozen = [replace(one, forward=one.forward + waits, backward=one.backward + waits) for one in walk(memory)]
    blocks = memory.learning_blocks
    learnt = 1
    if memory.checkpointed or memory.accumulates:
        learnt = blocks
    elif memory.offloaded:  # the block beside the first copy has no backward pass, so the lowest is the second
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


def _gradients_at(memory: StepFacts, point: block.Point, of_a_block: int) -> tuple[Line, Line]:
    """Return the line of gradients for a point of the last block's backward pass, and for that point of the first's.

    Args:
        memory: the facts of the step.
        point: a point of a block.
        of_a_block: bytes of the gradients of all weights of a block.
    """
    gradients = _gradients(memory)
    embedding = memory.shape.embedding_weights * FP32 * memory.trains_all
    if memory.accumulates:
        # If the embedding is also the head, its new gradient has two parts. The head's comes first, and waits here.
        with_head = replace(gradients, bytes=gradients.bytes + embedding * memory.shape.tied)
        return with_head, with_head
    to_come = of_a_block - point.learnt + embedding * (not memory.shape.tied)
    return (
        replace(gradients, bytes=embedding + point.learnt, why="fp32: the head, the last block so far"),
        replace(gradients, bytes=gradients.bytes - to_come, why="fp32: all but those still to come"),
    )


def _fixed(memory: StepFacts, *, masked: bool) -> tuple[Line, ...]:
    """Return the lines that are the same in the whole step; the batch includes the attention mask if ``masked``."""
    shape = memory.shape
    n = memory.all_tokens
    leftovers = shape.weights - shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values())
    added = sum(many * elements for many, elements in memory.added)
    mask = 0
    if masked and not memory.maskless:
        mask = memory.batch * memory.tokens**2
        if memory.kernel == "eager":  # added to the scores, so a float; other kernels take one byte
            mask = mask * memory.hidden_itemsize
    rows = 1  # all rows of a batch share their positions, unless each begins its documents at other places
    if memory.joins_documents:
        rows = memory.batch
    positions = 2 * rows * memory.tokens * shape.head_width * memory.hidden_itemsize
    others = "embedding, norms, biases" if shape.tied else "embedding, head, norms, biases"
    if shape.experts > 1:
        others += ", experts"
    return (
        Line("weights: blocks", memory.block_weight_bytes, f"matrices of {shape.layers} blocks, as stored"),
        Line("weights: all others", leftovers * memory.other_weight_itemsize, others),
        Line("weights: adapter", added * FP32, "trained in fp32, beside the loaded ones"),
        Line("optimizer states", _states(memory), f"2 of {memory.optimizer_state_bits} bits for each trained weight"),
        Line("batch", 3 * n * IDS + positions + mask, "token ids, labels, positions, mask"),
    )


def _inside(point: block.Point) -> tuple[Line, Line]:
    """Return the two lines of the open block."""
    return (
        Line("open block: saved", point.kept, f"up to the {point.operation}"),
        Line("open block: temporary", point.opened, f"at the {point.operation}"),
    )


def _waiting(memory: StepFacts, operations: list[Operation]) -> _Waiting:
    """Compute what waits in the blocks at the four moments of :class:`_Waiting`."""
    tensors = block.kept(operations)
    pinned = block.pinned_bytes(operations)
    a_block = BlockTensors(
        input=_block_input(memory),
        kept=sum(tensors.values()),
        pinned=pinned,
        joined=sum(tensors.get(name, 0) for name in JOINED),
        # A matrix saves the block's input itself. A norm saves an fp32 copy, which is the input only if that is fp32.
        keeps_input=INPUT in tensors or (memory.hidden_itemsize == FP32 and FIRST_NORM in tensors),
    )
    waits = memory.block_waits(a_block)
    frozen = _frozen_beside(memory)
    blocks = memory.learning_blocks
    each = waits.each + frozen.each
    below = frozen.below
    # If nothing else trains, it is prompt tuning. The prompt and the embedded tokens are joined into a new tensor.
    prompted = not (memory.trains_all or memory.adapted or memory.learns_beside)
    if memory.checkpointed and not memory.trains_all and (prompted or memory.offloaded or memory.shape.scales_hidden):
        below += _block_input(memory)  # checkpointing asks for the gradient of the embedding's result, so that stays
    through = below + frozen.between
    if memory.adapted and not memory.checkpointed:
        through -= block.below_adapters(memory, operations)  # the first block saves less
    if memory.learns_beside and not memory.checkpointed and not memory.offloaded:
        through -= tensors.get(FIRST_NORM, 0)  # and so does the first copy
    why = waits.why + frozen.why
    open_too = waits.open_too
    everything = Line("saved activations", blocks * each + through, f"{blocks} blocks x {why}")
    others = max(blocks - 1, 0) * each + open_too + through + frozen.pinned
    # Pinned tensors are freed only when the whole backward pass has run.
    one = open_too + below + blocks * frozen.pinned + frozen.stays + max(blocks - 1, 0) * pinned
    beside = one if memory.checkpointed else others - frozen.open
    return _Waiting(
        everything,
        replace(everything, bytes=others, why=f"{blocks - 1} blocks x {why}"),
        replace(everything, bytes=one, why=f"1 block x {why}"),
        replace(everything, bytes=beside, why=f"1 block x {why}"),
    )


class _Frozen(NamedTuple):
    """What the frozen blocks of a side network save [bytes].

    Attributes:
        each: comes on top for each block with a copy beside it.
        between: of the frozen blocks beside copies, but the lowest, which the gradient does not reach.
        open: the share of one of these blocks, which does not wait while that block is open.
        stays: the part of ``between`` that stays until the whole backward pass has run.
        below: of the frozen blocks below all copies.
        pinned: the part of ``each`` that stays until the whole backward pass has run.
        why: the words that the bill adds.
    """

    each: int = 0
    between: int = 0
    open: int = 0
    stays: int = 0
    below: int = 0
    pinned: int = 0
    why: str = ""


def _frozen_beside(memory: StepFacts) -> _Frozen:
    """Compute what frozen blocks save. The gradient goes only through those that have something to train below."""
    if not memory.learns_beside:
        return _Frozen()
    operations = walk(memory)
    pinned = block.pinned_bytes(operations)
    if memory.checkpointed:
        # Checkpointing asks for the gradient of the embedding's result, so it goes down through all frozen blocks.
        below = memory.shape.layers - memory.learning_blocks
        one = pinned
        if not memory.offloaded:
            one += _block_input(memory)
        return _Frozen(each=pinned, pinned=pinned, below=below * one, why=f", {below} x frozen blocks")
    each = pinned
    if not memory.offloaded:
        saved = block.kept(operations)
        each = sum(saved.values())
        if (
            memory.hidden_itemsize == FP32 and FIRST_NORM in saved
        ):  # the copy saves the same fp32 input, so count it once
            each -= _block_input(memory)
    between = memory.learning_blocks - 1
    why = f", {between} x frozen blocks"
    return _Frozen(between=between * each, open=each, stays=between * pinned, why=why)


def _block_input(memory: StepFacts) -> int:
    return memory.all_tokens * memory.shape.width * memory.hidden_itemsize


def _gradients(memory: StepFacts) -> Line:
    return Line("gradients", memory.trained_weights * FP32, "fp32, one number for each trained weight")


def _embedding_gradient(memory: StepFacts) -> Line:
    """Return the line of what is alive beside all weight gradients when the embedding gets its gradient."""
    # If the embedding is also the head, their two gradients are alive beside the sum of both. With accumulation the new
    # gradient is alive beside the earlier one, to which it is added.
    many = 2 * memory.shape.tied + memory.accumulates
    came = memory.all_tokens * memory.shape.width * memory.hidden_itemsize
    return Line(
        "embedding gradient",
        many * memory.shape.embedding_weights * FP32 + came,
        "with the head's if tied, and its source",
    )


def _states(memory: StepFacts) -> int:
    """Return the bytes of all optimizer states; the embedding has a rule of its own."""
    every = sum(many * memory.state_bytes(elements) for many, elements in memory.trained)
    if memory.trains_all:
        of_embedding = memory.shape.embedding_weights
        every += memory.embedding_state_bytes(of_embedding) - memory.state_bytes(of_embedding)
    return every
