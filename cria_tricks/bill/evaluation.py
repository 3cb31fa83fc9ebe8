"""Estimate the memory of a forward pass without gradients: an evaluation during training, and answers.

Nothing is saved for a backward pass, no block is recomputed, and nothing is offloaded. So the formulas of a block count
it as they count a block through which no gradient flows (``Step.keeps_nothing``). Beside it are the weights, the
optimizer states, and, if tokens are generated, the KV cache. Weight gradients are freed before an evaluation begins.
"""

from dataclasses import replace

from cria_tricks.bill import block
from cria_tricks.bill.fused_operations import tiled
from cria_tricks.bill.loss import cast_copies
from cria_tricks.bill.moments import batch_line
from cria_tricks.bill.operation import ANSWERS, EVALUATION, FP32, TOKENS_PER_CHUNK, Line, Moment
from cria_tricks.bill.step import Step


def without_gradients(step: Step) -> Step:
    """Return the same pass in eval mode: no gradient flows, and there is no dropout.

    Args:
        step: a step without checkpointing, offloading, accumulation and packing.
    """
    return replace(step, learning_blocks=0, dropout=False, waiting_gradient_bytes=0)


def loss_pass(step: Step) -> list[Moment]:
    """Return the moments of one micro-batch of evaluation rows, without what is alive anyway.

    The first is the deepest point of a block; the others are those of the loss.

    Args:
        step: the pass, from :func:`without_gradients`.
    """
    at_the_loss = _chunked if "log-softmax" not in step.loss_moments(step) else _full
    in_block = (batch_line(step, masked=True), *_in_block(step))
    behind = batch_line(step, masked=False)  # the mask is freed when the last block has run
    parts = [in_block, *((behind, *lines) for lines in at_the_loss(step))]
    return [Moment(EVALUATION, (_copies(step), *lines)) for lines in parts]


def fullest_answer(prompts: Step, token: Step, room: int, *, caches: bool = True) -> Moment:
    """Return the fullest moment of generating answers to a batch of prompts, without what is alive anyway.

    It is in the first pass, through the prompts, or in a pass for one token.

    Args:
        prompts: the pass through the prompts, from :func:`without_gradients`.
        token: the same for one token of each row.
        room: the longest prompt and answer together [tokens].
        caches: whether the model can use a KV cache; ``prompts`` then has no tokens of the answers.
    """
    shape = prompts.shape
    rows = prompts.batch
    each = prompts.widest_itemsize + prompts.product_itemsize  # of a key and of a value
    cache = rows * room * shape.layers * shape.kv_width * each * caches
    fixed = (Line("KV cache", cache, "keys and values of prompts and answers"), _copies(prompts))
    # transformers makes the logits of one position of each row, copies them to fp32, and chooses from another copy.
    logits = rows * shape.vocabulary * (prompts.compute_itemsize + 2 * FP32)
    # Where query heads share keys, some kernels get copies for every head, here of the whole past.
    repeated = 0
    if token.repeats_keys and shape.heads != shape.kv_heads:
        repeated = 2 * rows * room * shape.query_width * prompts.compute_itemsize
    (one,) = _in_block(token)
    parts = (
        (batch_line(prompts, masked=True), *_in_block(prompts)),
        (replace(one, bytes=one.bytes + repeated, why="at its attention or its widest product"),),
        (Line("logits", logits, "of one position a row, in fp32"), _head_copy(prompts)),
    )
    moments = (Moment(ANSWERS, (*fixed, *lines)) for lines in parts)
    return max(moments, key=lambda moment: moment.bytes)


def _in_block(step: Step) -> tuple[Line, ...]:
    """Return the line of the open block at its deepest point; a trained copy beside it may be deeper."""
    operations = [step.operations]
    if step.learns_beside:
        operations.append(tuple(tiled(step)))
    points = [point for each in operations for point in block.points(step, each) if not point.backward]
    deepest = max(points, key=lambda point: point.bytes)
    return (Line("open block", deepest.kept + deepest.opened, f"at the {deepest.operation}"),)


def _copies(step: Step) -> Line:
    """Return the line of autocast's 16-bit copies of adapters, which it holds until the forward pass ends."""
    as_recomputed = replace(step, learning_blocks=bool(step.adapted), checkpointed=True)
    return cast_copies(as_recomputed)


def _head_copy(step: Step) -> Line:
    """Return the line of autocast's 16-bit copy of the head; 0 if the head is in the compute dtype already."""
    a = step.compute_itemsize
    cast = a < FP32 and (a != step.other_weight_itemsize or step.trains_head)
    return Line("16-bit copy of the head", step.shape.embedding_weights * a * cast, "by autocast")


def _full(step: Step) -> list[tuple[Line, ...]]:
    """Bill all logits at once: when the head makes them, and at log-softmax, where they are there three times."""
    a = step.compute_itemsize
    logits = step.all_tokens * step.shape.vocabulary
    norm = Line("final norm", _normed(step, a), "its output, as the head takes it")
    head = _head_copy(step)
    stays = replace(head, bytes=head.bytes * step.trains_head)  # autocast keeps only the copy of a trained weight
    capped = a * step.shape.caps_logits
    made = Line("logits", logits * (a + capped), "as computed")
    final = Line("logits", logits * (2 * FP32 + a * (a < FP32)), "as computed, in fp32, and log-softmax")
    return [(norm, head, made), (norm, stays, final)]


def _chunked(step: Step) -> list[tuple[Line, ...]]:
    """Bill the chunked loss: the hidden states of all tokens, those of trained tokens, and one chunk's logits."""
    shape = step.shape
    a = step.compute_itemsize
    picked = step.hidden_itemsize
    if picked != a:  # as they were picked, and cast
        picked += a
    logits = min(TOKENS_PER_CHUNK, step.trained_tokens) * shape.vocabulary
    copied = shape.embedding_weights * a * (a != step.other_weight_itemsize)
    return [
        (
            Line("final norm", step.all_tokens * shape.width * step.hidden_itemsize, "its output"),
            Line("16-bit copy of the head", copied, "once for all chunks"),
            Line("hidden states for the loss", step.trained_tokens * shape.width * picked, "of trained tokens"),
            Line("logits", 2 * logits * FP32, f"of {TOKENS_PER_CHUNK} tokens in fp32, and their exp"),
        )
    ]


def _normed(step: Step, a: int) -> int:
    """Return the bytes of the last norm's output, and of the copy in the dtype that the head takes."""
    hidden = step.hidden_itemsize
    return step.all_tokens * step.shape.width * (hidden + a * (a != hidden))
