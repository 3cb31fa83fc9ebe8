"""Bill the end of the forward pass and the beginning of the backward pass: last norm, head and logits."""

from cria_tricks.bill.operation import FP32, Line
from cria_tricks.bill.step import Step


def full_loss(step: Step) -> dict[str, tuple[Line, ...]]:
    """Return the lines at the moments around a loss that makes the logits of all positions at once.

    These are n V logits, for n tokens and a vocabulary of V. The largest moment has them three times in fp32.
    """
    return {"loss": _loss(step), "log-softmax": _log_softmax(step)}


def cast_copies(step: Step) -> Line:
    """Return the line of autocast's 16-bit copies of the adapters, which it holds until the forward pass ends.

    There are none where blocks save the copies, because then they are counted there. If whole matrices train, autocast
    caches no copies (``techniques/mixed_precision.py``).
    """
    copied = step.trained_weights * step.casts_adapters
    if step.mlp_tile:  # the copies of an MLP's adapters live as long as a tile does
        inside = [sum(step.shape.linears[name]) for name in step.mlp if name in step.adapted]
        copied -= step.shape.layers * step.rank * sum(inside) * step.casts_adapters
    if step.kept_blocks and not step.offloads_the_end:  # the last blocks save theirs
        copied = copied * (step.shape.layers - step.kept_blocks) // step.shape.layers
    size = 0
    cached = step.learning_blocks and not step.trains_all and not step.learns_beside
    if step.compute_itemsize < FP32 and cached and (step.checkpointed or step.offloaded):
        size = copied * step.compute_itemsize + _input_copy(step)
    return Line("16-bit copies of weights", size, "by autocast, until the forward pass ends")


def _input_copy(step: Step) -> int:
    """Return the bytes of autocast's copy of the embedding's result, which it keeps like those of weights; else 0.

    Checkpointing asks for the gradient of the embedding's result, so autocast takes it for a trained weight. It is cast
    as it is only in a model without a norm in front, by an adapter on what the first block multiplies it with.
    """
    asked = step.checkpointed and step.shape.norms_behind and step.hidden_itemsize == FP32
    first = set(step.shape.input_groups[0]) & set(step.adapted)
    if not asked or not first or step.dropout:
        return 0
    return step.all_tokens * step.shape.width * step.compute_itemsize


def normalised(step: Step) -> int:
    """Return the bytes that the last norm saves: its input, and one fp32 number for each position."""
    n = step.stream_tokens
    return step.norm_bytes(n * step.shape.width, step.hidden_itemsize).saved + n * FP32


def head_copy(step: Step) -> int:
    """Return the bytes of autocast's copy of the head, which is saved if the head's input needs a gradient; else 0."""
    if step.compute_itemsize == step.other_weight_itemsize or not step.learning_blocks:
        return 0
    return step.shape.embedding_weights * step.compute_itemsize


def _loss(step: Step) -> tuple[Line, ...]:
    """Bill the beginning of the backward pass, where the gradients of the logits are made."""
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    norm = normalised(step)
    if step.trains_head:  # it saves its input, and a norm that trains its normalised input
        of_norm = step.stream_tokens * shape.width * step.hidden_itemsize * step.trains_all
        norm = norm * bool(step.learning_blocks) + n * shape.width * a + of_norm
    head = head_copy(step)
    if step.offloads_the_end:  # saved tensors come back from the host later, when their operation runs backward
        norm = head = 0
    return (
        Line("final norm", norm, "for its gradients and a trained head's"),
        Line("16-bit copy of the head", head, "by autocast, for its input's gradient"),
        Line("logits", 3 * n * shape.vocabulary * FP32, "log-softmax and 2 gradients, in fp32"),
        Line("capped logits", n * shape.vocabulary * a * shape.caps_logits, "after the tanh that caps them"),
    )


def _log_softmax(step: Step) -> tuple[Line, ...]:
    """Bill the last operation of the forward pass. Autocast is still on, so its 16-bit copy of the head is alive."""
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    head = shape.embedding_weights * a * (a < FP32 and (a != step.other_weight_itemsize or step.trains_head))
    logits = n * shape.vocabulary * (2 * FP32 + a * (a < FP32))
    if step.offloads_the_end and not step.trains_head:  # the copy goes to the host before the fp32 logits are made
        head, logits = 0, max(logits, head + n * shape.vocabulary * a)
    return (
        Line("final norm", _final_norm(step), "its input and output"),
        Line("16-bit copy of the head", head, "by autocast"),
        cast_copies(step),
        Line("logits", logits, "as computed, in fp32, and log-softmax"),
    )


def _final_norm(step: Step) -> int:
    """Return the bytes around the last norm when the head has just run: what it saved, its result, and a cast of it."""
    a = step.compute_itemsize
    hidden = step.hidden_itemsize
    saved = step.norm_bytes(1, hidden).saved
    kept = (saved + hidden * step.trains_all) * bool(step.learning_blocks) * (not step.offloads_the_end)
    # The head sees all tokens, and the norm in front of it those of this process.
    return step.shape.width * (step.all_tokens * (hidden + a * (a != hidden)) + step.stream_tokens * kept)


def head_gradient(step: Step) -> tuple[Line, ...]:
    """Bill the backward pass of a trained head: its gradient comes in the compute dtype, and is then cast to fp32."""
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    weights = shape.embedding_weights
    logits = n * shape.vocabulary
    given = n * shape.width * a
    opened = weights * a + logits * a + given * (1 + bool(step.learning_blocks))
    # In 16 bits there are two candidates: the product, beside the head's copy; and the cast, with the gradient twice.
    if a < FP32:
        opened = max(opened + weights * a, weights * (a + FP32) + given)
    mine = step.stream_tokens
    kept = mine * shape.width * (FP32 + step.hidden_itemsize * step.trains_all) + mine * FP32
    if step.offloads_the_end or not step.learning_blocks:
        kept = 0
    return (
        Line("final norm", kept, "its input and output"),
        Line("head gradient", opened, "as computed, in fp32, and its factors"),
    )
