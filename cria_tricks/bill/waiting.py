"""Compute what the blocks have saved for their backward pass, at each moment of a step that may be its peak [bytes]."""

from dataclasses import replace
from typing import NamedTuple

from cria_tricks.bill import block
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.fused_operations import tiled
from cria_tricks.bill.lines import Line
from cria_tricks.bill.operation import FIRST_NORM, INPUT, JOINED, BlockTensors, WaitingBytes
from cria_tricks.bill.step import Step


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
