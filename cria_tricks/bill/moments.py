"""Estimate the memory of a training step by hand: its peak in bytes, from the widths of the model alone.

The estimate begins with plain fp32 full fine-tuning. Each technique of the recipe then changes its part of the step:
how weights are stored, what trains, what a block saves. Then the bytes that are alive are added up, for each moment of
the step that may be the peak:

- the end of the forward pass, where all saved activations meet the logits, and the loss, where the gradients of the
  logits are made;
- the deepest point of the last block, while the saved activations of all other blocks wait;
- the deepest point of the first block, when the gradients of all other blocks are there;
- if only the first k blocks are checkpointed, also the deepest points of block k, which is recomputed while those below
  it wait, and of the block behind it, which was not dropped;
- the gradient of the embedding, at the end of the backward pass;
- the optimizer step.

The peak is the largest of these moments, and the bill consists of its lines, which sum exactly to the peak.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill import block
from cria_tricks.bill.fused_operations import tiled
from cria_tricks.bill.loss import cast_copies, head_gradient
from cria_tricks.bill.operation import FIRST_NORM, FP32, INPUT, JOINED, BlockTensors, Line, Moment, WaitingBytes
from cria_tricks.bill.step import Step
from cria_tricks.common.units import human


class Waiting(NamedTuple):
    """The bill's line for what blocks have saved for their backward pass, at six moments.

    A block is open while its forward or backward pass runs. What an open block has alive is in lines of its own.

    Attributes:
        all: around the loss, when all blocks wait.
        others: while the last block is open, and all others wait.
        one: while the first block is open, and all others are done.
        frozen: while a frozen block is open that has a trained copy beside it (side network).
        checkpointed: while the last checkpointed block is open, and all blocks behind it are done.
        kept: while the first block that is not checkpointed is open, and all behind it are done; in a side network,
            while the last frozen block is open, and its copy is done.
    """

    all: Line
    others: Line
    one: Line
    frozen: Line
    checkpointed: Line
    kept: Line


def last_blocks(step: Step) -> Step:
    """Return the step as the last block sees it: if only the first blocks are checkpointed, or offloaded, it is not."""
    if not step.staying_blocks:
        return step
    checkpointed = step.checkpointed and not step.kept_blocks
    stays = step.overlapped
    return replace(
        step,
        checkpointed=checkpointed,
        kept_blocks=0,
        offloaded=step.offloaded and not stays,
        overlapped=False,
    )


def _tensors_of(step: Step) -> BlockTensors:
    """Collect what one block saves."""
    operations = step.operations
    tensors = block.kept(operations)
    return BlockTensors(
        input=block_input(step),
        kept=sum(tensors.values()),
        pinned=block.pinned_bytes(operations),
        joined=sum(tensors.get(name, 0) for name in JOINED),
        # A matrix saves the block's input itself. A norm does so if the input is fp32 or norms are fused, else a copy.
        keeps_input=INPUT in tensors or (not step.norms_copy and FIRST_NORM in tensors),
        attended=block.attended_bytes(operations),
        recomputed=step.checkpointed,
        offloaded=step.offloaded,
    )


def waiting_at(step: Step) -> Waiting:
    """Compute what waits in the blocks at the moments of :class:`Waiting`."""
    operations = step.operations
    a_block = _tensors_of(step)
    pinned = a_block.pinned
    waits = step.block_waits(a_block)
    frozen = _frozen_beside(step)
    blocks = step.learning_blocks
    each = waits.each + frozen.each
    below = frozen.below
    # If nothing else trains, it is prompt tuning. The prompt and the embedded tokens are joined into a new tensor.
    prompted = not (step.trains_all or step.adapted or step.learns_beside)
    if step.checkpointed and not step.trains_all and (prompted or step.offloaded or step.shape.scales_hidden):
        below += block_input(step)  # checkpointing asks for the gradient of the embedding's result, so that stays
    through = below + frozen.between
    if step.adapted and not step.checkpointed:
        through -= block.below_adapters(step, operations)  # the first block saves less
    if step.learns_beside and not step.checkpointed and not step.offloaded:
        through -= block.kept(operations).get(FIRST_NORM, 0)  # and so does the first copy
    why = waits.why + frozen.why
    open_too = waits.open_too
    everything = Line("saved activations", blocks * each + through, f"{blocks} blocks x {why}")
    others = max(blocks - 1, 0) * each + open_too + through + frozen.pinned
    # Pinned tensors are freed only when the whole backward pass has run.
    one = open_too + below + blocks * frozen.pinned + frozen.stays + max(blocks - 1, 0) * pinned
    beside = one if step.checkpointed else others - frozen.open
    # While a copy is open, the frozen block beside it still has its attention.
    first = replace(everything, bytes=one + frozen.attended, why=f"1 block x {why}")
    last = replace(everything, bytes=others + frozen.attended, why=f"{blocks - 1} blocks x {why}")
    found = Waiting(everything, last, first, replace(first, bytes=beside), first, replace(last, bytes=others))
    if step.window > 1:
        return _of_window(found, step, each, below, pinned)
    if not step.staying_blocks:
        return found
    if step.learns_beside:  # all its blocks are checkpointed, and the last one's input and join stay
        return found._replace(all=replace(everything, bytes=everything.bytes + a_block.input + a_block.joined))
    return _with_kept(found, step, waits, below)


def _of_window(alone: Waiting, step: Step, each: int, below: int, pinned: int) -> Waiting:
    """Add what waits for the other micro-batches of a window, if all go through the blocks together.

    The outputs of the last block wait for their losses, and stay, with their gradients, until the backward pass ends.

    Args:
        alone: what would wait for one micro-batch.
        step: the step of a micro-batch.
        each: what waits in each block.
        below: what waits below the first block.
        pinned: the part of ``each`` that stays until the whole backward pass has run.
    """
    blocks = step.learning_blocks
    others = step.window - 1
    output = block_input(step)
    gradient = output if blocks else 0
    whole = others * (blocks * each + below)

    def more(line: Line, size: int) -> Line:
        return replace(line, bytes=line.bytes + size, why=f"{line.why}, for {step.window} micro-batches")

    return alone._replace(
        # Offload takes the last block's output away where only the norm behind it needs it.
        all=more(alone.all, whole + others * (output + gradient) + output * step.offloaded),
        others=more(alone.others, whole + others * (output + gradient) + gradient),
        one=more(
            alone.one,
            others * (each + below + gradient + max(blocks - 1, 0) * pinned) + step.window * (output + gradient),
        ),
    )


def _with_kept(uniform: Waiting, step: Step, waits: WaitingBytes, below: int) -> Waiting:
    """Change what waits if only the first k blocks are checkpointed, and the others keep all that they save.

    The same holds if the tensors of the first k blocks are offloaded, and those of the others stay.

    Args:
        uniform: what would wait if all blocks were alike.
        step: the step as the first blocks see it.
        waits: what waits in each of these.
        below: what waits below the first block.
    """
    others = last_blocks(step)
    tensors = _tensors_of(others)
    kept = step.block_waits(tensors)
    k = step.shape.layers - step.staying_blocks
    behind = step.staying_blocks - 1
    pinned = tensors.pinned
    all_k = k * waits.each + below

    def line(size: int, inputs: int, whole: int) -> Line:
        of_each = "on the host" if step.overlapped else waits.why
        of_whole = "its input" if others.checkpointed else "all that is saved"
        why = f"{inputs} x {of_each}, {whole} x {of_whole}"
        return replace(uniform.all, bytes=size, why=why)

    return uniform._replace(
        all=line(all_k + step.staying_blocks * kept.each, k, step.staying_blocks),
        others=line(all_k + behind * kept.each + kept.open_too, k, behind),
        kept=line(all_k + behind * pinned + kept.open_too, k, 0),
        checkpointed=line(all_k - waits.each + waits.open_too + step.staying_blocks * pinned, k - 1, 0),
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
        attended: what the attention of one frozen block has left, if checkpointed blocks keep that.
        why: the words that the bill adds.
    """

    each: int = 0
    between: int = 0
    open: int = 0
    stays: int = 0
    below: int = 0
    pinned: int = 0
    attended: int = 0
    why: str = ""


def _frozen_beside(step: Step) -> _Frozen:
    """Compute what frozen blocks save. The gradient goes only through those that have something to train below."""
    if not step.learns_beside:
        return _Frozen()
    operations = tiled(step)
    pinned = block.pinned_bytes(operations)
    if step.checkpointed:
        # Checkpointing asks for the gradient of the embedding's result, so it goes down through all frozen blocks.
        below = step.shape.layers - step.learning_blocks
        attended = step.keeps_attention * block.attended_bytes(operations)
        each = pinned + attended
        one = each
        if not step.offloaded:
            one += block_input(step)
        why = f", {below} x frozen blocks"
        return _Frozen(each=each, pinned=pinned, below=below * one, attended=attended, why=why)
    each = pinned
    if not step.offloaded:
        saved = block.kept(operations)
        each = sum(saved.values())
        if step.hidden_itemsize == FP32 and FIRST_NORM in saved:  # the copy saves the same fp32 input, so count it once
            each -= block_input(step)
    between = step.learning_blocks - 1
    why = f", {between} x frozen blocks"
    return _Frozen(between=between * each, open=each, stays=between * pinned, why=why)


def block_input(step: Step) -> int:
    """Return the bytes of one block's input."""
    return step.stream_tokens * step.shape.width * step.hidden_itemsize


IDS = 8
"""Bytes of one token id, one label or one position: each is a 64-bit integer."""

_Pick = Callable[[list[block.Point]], list[block.Point]]
"""A function that chooses which points of a block become moments of the step."""


def moments(step: Step, *, every_point: bool = False) -> list[Moment]:
    """Return the moments of a step that may be its peak, each with all that is alive there.

    Args:
        step: the step.
        every_point: whether to return all points of a block, and not only the deepest.
    """
    gradients = _gradients(step)
    over = _fixed(step, masked=step.checkpointed)  # after the forward pass only repeated blocks need the mask
    waiting = waiting_at(step)
    # The gradients of earlier micro-batches are alive from the beginning of the step.
    before = replace(gradients, bytes=step.waiting_gradient_bytes)
    at_the_end = step.loss_moments(step)
    if step.trains_head:
        at_the_end["head"] = head_gradient(step)
    pick = _all_of if every_point else _deepest
    found = [Moment(name, (*over, before, waiting.all, *lines)) for name, lines in at_the_end.items()]
    found += _forward(step, waiting, before, pick)
    if step.learning_blocks:
        found += _backward(step, waiting, over, pick)
    if step.learns_beside and (step.checkpointed or step.learning_blocks > 1):
        found += _frozen_backward(step, waiting, over, pick)
    if step.trains_all:
        found.append(Moment("embedding", (*over, _gradients_at_the_embedding(step), _embedding_gradient(step))))
    if step.steps_in_backward:
        largest = max(elements for _, elements in step.trained)
        gradients = replace(gradients, bytes=largest * FP32, why="fp32: of the largest tensor alone")
    return [*found, Moment("optimizer step", (*over, gradients))]  # all optimizers update in place


def _forward(step: Step, waiting: Waiting, before: Line, pick: _Pick) -> list[Moment]:
    """Return moments of the forward pass: of the last block, and of a frozen block below all trained copies, if any."""
    fixed = _fixed(step, masked=True)
    found: list[Moment] = []
    if step.learns_beside:  # in the blocks below the copies there is no gradient, and no copy has run yet
        below = replace(step, checkpointed=False, learning_blocks=0)
        points = [point for point in block.points(below, tiled(below)) if not point.backward]
        found += [Moment("forward", (*fixed, before, *_inside(point))) for point in pick(points)]
    # In its first forward pass a checkpointed block saves as little on the device as an offloaded one.
    last = last_blocks(step)
    once = replace(last, checkpointed=False, offloaded=last.offloaded or last.checkpointed)
    copies = cast_copies(step)
    points = [point for point in block.points(once, once.operations) if not point.backward]
    for point in pick(points):
        found.append(Moment("forward", (*fixed, before, waiting.others, copies, *_inside(point))))
    return found


def _backward(step: Step, waiting: Waiting, over: tuple[Line, ...], pick: _Pick) -> list[Moment]:
    """Return moments of the backward pass: of the last block, while all others wait, and of the first, after them.

    If only the first blocks are checkpointed, also of the two blocks on both sides of the border. If their inputs come
    back beside the computing, also of the second block, because from there on none comes back ahead.
    """
    done = step.staying_blocks
    if step.learns_beside or not done:
        over += _fetched_ahead(step)
        return _of_blocks(step, ("last block", waiting.others), ("first block", waiting.one), over, pick)
    kept = last_blocks(step)
    if step.overlapped:
        return _overlapped_backward(step, kept, waiting, over, pick)
    return [
        *_of_blocks(kept, ("last block", waiting.others), ("first kept block", waiting.kept), over, pick, until=done),
        *_of_blocks(
            step, ("last checkpointed block", waiting.checkpointed), ("first block", waiting.one), over, pick,
            since=done,
        ),
    ]  # fmt: skip


def _overlapped_backward(step: Step, kept: Step, waiting: Waiting, over: tuple[Line, ...], pick: _Pick) -> list[Moment]:
    """Return moments of the backward pass if the inputs of the first blocks come back beside the computing.

    Args:
        step: the step as the first blocks see it.
        kept: as the others see it.
        waiting: what waits.
        over: the lines that are the same in the whole pass.
        pick: which points of a block become moments.
    """
    done = step.staying_blocks
    ahead = over + _fetched_ahead(step)
    last = "last block", waiting.others
    highest = "last offloaded block", waiting.checkpointed
    # Behind the checkpointed blocks, the first copy begins when the one before the last of them is nearly done.
    beside = ahead if kept.checkpointed else over
    found = _of_blocks(kept, last, ("first kept block", waiting.kept), beside, pick, until=done)
    found += _of_blocks(step, highest, ("first block", waiting.one), over, pick, since=done)
    if step.shape.layers - done > 1:
        until = step.shape.layers - 1
        found += _of_blocks(step, highest, ("second block", waiting.one), ahead, pick, since=done, until=until)
    return found


def _fetched_ahead(step: Step) -> tuple[Line, ...]:
    """Return the line of the next block's input, which comes back from the host while a block is open; else none."""
    if not step.overlapped:
        return ()
    return (Line("saved activations, ahead", block_input(step), "the next block's input, from the host"),)


def _of_blocks(
    step: Step,
    highest: tuple[str, Line],
    lowest: tuple[str, Line],
    over: tuple[Line, ...],
    pick: _Pick,
    since: int = 0,
    until: int | None = None,
) -> list[Moment]:
    """Return moments of the backward pass of blocks that are alike: of the highest of them, and of the lowest.

    Args:
        step: the step as these blocks see it.
        highest: the name of the moment, and what waits then.
        lowest: the same for the lowest block.
        over: the lines that are the same in the whole pass.
        pick: which points of a block become moments.
        since: how many blocks are above the highest, and done.
        until: how many blocks are done when the lowest is; ``None`` if it is the first block of the model.
    """
    operations = step.operations
    # The gradients of a window's other micro-batches are in the open block, too, so the new ones of a matrix are added
    # to theirs: those of both factors of its adapter, at most.
    added = 2 * max((elements for _, elements in step.added), default=0) * FP32 * (step.window > 1)
    points = block.points(step, operations, learns=step.gradients_wait and step.window == 1)
    if not step.checkpointed:  # else a block first runs forward again
        points = [point for point in points if point.backward]
    of_a_block = sum(operation.learns for operation in operations)
    found = []
    for point in pick(points):
        behind = _gradients_behind(step, point, (since + (step.window > 1)) * of_a_block)
        if until is None:
            nearly = _gradients_before(step, point, of_a_block)
        else:
            nearly = _gradients_behind(step, point, (until - 1) * of_a_block)
        behind = replace(behind, bytes=behind.bytes + added)
        nearly = replace(nearly, bytes=nearly.bytes + added)
        below = point
        if step.learns_beside and not step.checkpointed:
            # Nothing learns below the first copy. So the frozen block beside it has no backward pass, and no gradient
            # waits for that.
            below = replace(point, opened=point.opened - block_input(step))
        above = point if step.learning_blocks > 1 else below
        found.append(Moment(highest[0], (*over, behind, highest[1], *_inside(above))))
        found.append(Moment(lowest[0], (*over, nearly, lowest[1], *_inside(below))))
    return found


def _frozen_backward(step: Step, waiting: Waiting, over: tuple[Line, ...], pick: _Pick) -> list[Moment]:
    """Return moments of the backward pass of a frozen block that has a trained copy beside it.

    Only one of these blocks can be the peak. If blocks save only their input, or the host has what they save, it is the
    lowest block, because by then all copies above it have their gradients. Else it is the highest, because most saved
    activations still wait; then only its own copy has gradients.
    """
    over += _fetched_ahead(step)
    waits = block_input(step)  # the gradient of the input, which the copy has given already
    frozen = [replace(one, forward=one.forward + waits, backward=one.backward + waits) for one in tiled(step)]
    blocks = step.learning_blocks
    learnt = 1
    if step.checkpointed or step.accumulates:
        learnt = blocks
    elif step.offloaded:  # the block beside the first copy has no backward pass, so the lowest is the second
        learnt = blocks - 1
    gradients = _gradients(step)
    of_copies = replace(gradients, bytes=gradients.bytes * learnt // blocks)
    of_one = of_copies if step.accumulates else replace(gradients, bytes=gradients.bytes // blocks)
    if step.steps_in_backward:
        of_copies = of_one = replace(gradients, bytes=0)
    found = []
    for point in pick(block.points(step, frozen)):
        found.append(Moment("frozen block", (*over, of_copies, waiting.frozen, *_inside(point))))
        if step.keeps_attention:
            # Then blocks wait with more than their inputs, and the highest may be the peak, too.
            found.append(Moment("last frozen block", (*over, of_one, waiting.kept, *_inside(point))))
    return found


def _deepest(points: list[block.Point]) -> list[block.Point]:
    return [max(points, key=lambda point: point.bytes)]


def _all_of(points: list[block.Point]) -> list[block.Point]:
    return points


def _gradients_behind(step: Step, point: block.Point, done: int) -> Line:
    """Return the line of gradients for a point of a block's backward pass.

    Args:
        step: the step.
        point: a point of the block.
        done: bytes of the gradients of the blocks above it.
    """
    gradients = _gradients(step)
    embedding = step.shape.embedding_weights * FP32 * step.trains_all
    if step.accumulates:
        # If the embedding is also the head, its new gradient has two parts. The head's comes first, and waits here.
        return replace(gradients, bytes=gradients.bytes + embedding * step.shape.tied)
    if step.steps_in_backward:
        # The same holds here. All other gradients are freed, but the one that is made at this point.
        return replace(gradients, bytes=embedding * step.shape.tied, why="fp32: the head's, if it is the embedding")
    return replace(gradients, bytes=embedding + done + point.learnt, why="fp32: the head, the last block so far")


def _gradients_before(step: Step, point: block.Point, of_a_block: int) -> Line:
    """Return the line of gradients for a point of the first block's backward pass.

    Args:
        step: the step.
        point: a point of the block.
        of_a_block: bytes of the gradients of all weights of a block.
    """
    if not step.gradients_wait:
        return _gradients_behind(step, point, 0)
    gradients = _gradients(step)
    embedding = step.shape.embedding_weights * FP32 * step.trains_all
    of_block = 0 if step.window > 1 else of_a_block - point.learnt
    to_come = of_block + embedding * (not step.shape.tied)
    return replace(gradients, bytes=gradients.bytes - to_come, why="fp32: all but those still to come")


def _fixed(step: Step, *, masked: bool) -> tuple[Line, ...]:
    """Return the lines that are the same in the whole step; the batch includes the attention mask if ``masked``."""
    return (*weight_lines(step), _states(step), batch_line(step, masked=masked))


def weight_lines(step: Step, adapter_itemsize: int = FP32) -> tuple[Line, Line, Line]:
    """Return the lines of all weights: matrices of blocks, the other loaded ones, and what was added to them."""
    shape = step.shape
    leftovers = shape.weights - shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values())
    added = sum(many * elements for many, elements in step.added)
    others = "embedding, norms, biases" if shape.tied else "embedding, head, norms, biases"
    if shape.experts > 1:
        others += ", experts"
    blocks = Line("weights: blocks", step.block_weight_bytes, f"matrices of {shape.layers} blocks, as stored")
    if step.blocks_on_device is not None:
        there = step.blocks_on_device
        size = step.block_weight_bytes * there // shape.layers
        blocks = replace(blocks, bytes=size, why=f"matrices of {there} blocks at a time, of {shape.layers}")
    trained = "trained in fp32, beside the loaded ones" if adapter_itemsize == FP32 else "in 16 bits"
    return (
        blocks,
        Line("weights: all others", leftovers * step.other_weight_itemsize, others),
        Line("weights: adapter", added * adapter_itemsize, trained),
    )


def batch_line(step: Step, *, masked: bool) -> Line:
    """Return the line of the micro-batch: ids, labels, positions, and the attention mask if ``masked``."""
    mask = 0
    if masked and not step.maskless:
        mask = step.batch * step.tokens**2
        if step.kernel == "eager":  # added to the scores, so a float; other kernels take one byte
            mask = mask * step.hidden_itemsize
    rows = step.batch if step.own_positions else 1
    positions = 2 * rows * step.tokens * step.shape.head_width * step.hidden_itemsize
    if step.window > 1:  # each micro-batch keeps its own, and its loss computes the positions once more
        positions = positions * (step.window + 1)
        mask = mask * step.window
    ids = 3 * step.all_tokens * IDS * step.window
    return Line("batch", ids + positions + mask, "token ids, labels, positions, mask")


def _inside(point: block.Point) -> tuple[Line, Line]:
    """Return the two lines of the open block."""
    return (
        Line("open block: saved", point.kept, f"up to the {point.operation}"),
        Line("open block: temporary", point.opened, f"at the {point.operation}"),
    )


def _gradients(step: Step) -> Line:
    return Line("gradients", step.trained_weights * FP32, "fp32, one number for each trained weight")


def _gradients_at_the_embedding(step: Step) -> Line:
    """Return the line of gradients when the embedding gets its own: all of them, or, if none waits, this one."""
    if step.steps_in_backward:
        return replace(_gradients(step), bytes=step.shape.embedding_weights * FP32, why="fp32: the embedding's")
    return _gradients(step)


def _embedding_gradient(step: Step) -> Line:
    """Return the line of what is alive beside all weight gradients when the embedding gets its gradient."""
    # If the embedding is also the head, their two gradients are alive beside the sum of both. With accumulation the new
    # gradient is alive beside the earlier one, to which it is added.
    many = 2 * step.shape.tied + step.accumulates
    came = step.all_tokens * step.shape.width * step.hidden_itemsize
    return Line(
        "embedding gradient",
        many * step.shape.embedding_weights * FP32 + came,
        "with the head's if tied, and its source",
    )


def _states(step: Step) -> Line:
    """Return the line of the optimizer states that the allocator sees, which also says what is paged besides."""
    rules = [(many, elements, step.state_bytes) for many, elements in step.trained]
    if step.trains_all:  # the embedding has a rule of its own
        of_embedding = step.shape.embedding_weights
        rules += [(1, of_embedding, step.embedding_state_bytes), (-1, of_embedding, step.state_bytes)]
    seen, paged = 0, 0
    for many, elements, rule in rules:
        if 0 < step.paged_from <= elements:
            paged += many * rule(elements)
        else:
            seen += many * rule(elements)
    why = f"2 of {step.optimizer_state_bits} bits for each trained weight"
    if paged:
        why = f"2 of {step.optimizer_state_bits} bits a weight; {human(paged)} are paged"
    return Line("optimizer states", seen, why)
