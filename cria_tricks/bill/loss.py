"""Bill the end of the forward pass and the beginning of the backward pass: last norm, head and logits."""

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.lines import Line


def full_loss(memory: StepFacts) -> dict[str, tuple[Line, ...]]:
    """Return the lines at the moments around a loss that makes the logits of all positions at once.

    These are n V logits, for n tokens and a vocabulary of V. The largest moment has them three times in fp32.
    """
    return {"loss": _loss(memory), "log-softmax": _log_softmax(memory)}


def cast_copies(memory: StepFacts) -> Line:
    """Return the line of autocast's 16-bit copies of the adapters, which it holds until the forward pass ends.

    There are none where blocks save the copies, because then they are counted there. If whole matrices train, autocast
    caches no copies (``tricks/mixed_precision.py``).
    """
    copied = memory.trained_weights * memory.casts_adapters
    if memory.mlp_tile:  # the copies of an MLP's adapters live as long as a tile does
        inside = [sum(memory.shape.linears[name]) for name in memory.mlp if name in memory.adapted]
        copied -= memory.shape.layers * memory.rank * sum(inside) * memory.casts_adapters
    if memory.kept_blocks and not memory.offloads_the_end:  # the last blocks save theirs
        copied = copied * (memory.shape.layers - memory.kept_blocks) // memory.shape.layers
    size = 0
    cached = memory.learning_blocks and not memory.trains_all and not memory.learns_beside
    if memory.compute_itemsize < FP32 and cached and (memory.checkpointed or memory.offloaded):
        size = copied * memory.compute_itemsize + _input_copy(memory)
    return Line("16-bit copies of weights", size, "by autocast, until the forward pass ends")


def _input_copy(memory: StepFacts) -> int:
    """Return the bytes of autocast's copy of the embedding's result, which it keeps like those of weights; else 0.

    Checkpointing asks for the gradient of the embedding's result, so autocast takes it for a trained weight. It is cast
    as it is only in a model without a norm in front, by an adapter on what the first block multiplies it with.
    """
    asked = memory.checkpointed and memory.shape.norms_behind and memory.hidden_itemsize == FP32
    first = set(memory.shape.input_groups[0]) & set(memory.adapted)
    if not asked or not first or memory.dropout:
        return 0
    return memory.all_tokens * memory.shape.width * memory.compute_itemsize


def normalised(memory: StepFacts) -> int:
    """Return the bytes that the last norm saves: its input, and one fp32 number for each position."""
    n = memory.stream_tokens
    return memory.norm_bytes(n * memory.shape.width, memory.hidden_itemsize).saved + n * FP32


def head_copy(memory: StepFacts) -> int:
    """Return the bytes of autocast's copy of the head, which is saved if the head's input needs a gradient; else 0."""
    if memory.compute_itemsize == memory.other_weight_itemsize or not memory.learning_blocks:
        return 0
    return memory.shape.embedding_weights * memory.compute_itemsize


def _loss(memory: StepFacts) -> tuple[Line, ...]:
    """Bill the beginning of the backward pass, where the gradients of the logits are made."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    norm = normalised(memory)
    if memory.trains_head:  # it saves its input, and a norm that trains its normalised input
        of_norm = memory.stream_tokens * shape.width * memory.hidden_itemsize * memory.trains_all
        norm = norm * bool(memory.learning_blocks) + n * shape.width * a + of_norm
    head = head_copy(memory)
    if memory.offloads_the_end:  # saved tensors come back from the host later, when their operation runs backward
        norm = head = 0
    return (
        Line("final norm", norm, "for its gradients and a trained head's"),
        Line("16-bit copy of the head", head, "by autocast, for its input's gradient"),
        Line("logits", 3 * n * shape.vocabulary * FP32, "log-softmax and 2 gradients, in fp32"),
        Line("capped logits", n * shape.vocabulary * a * shape.caps_logits, "after the tanh that caps them"),
    )


def _log_softmax(memory: StepFacts) -> tuple[Line, ...]:
    """Bill the last operation of the forward pass. Autocast is still on, so its 16-bit copy of the head is alive."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    head = shape.embedding_weights * a * (a < FP32 and (a != memory.other_weight_itemsize or memory.trains_head))
    logits = n * shape.vocabulary * (2 * FP32 + a * (a < FP32))
    if memory.offloads_the_end and not memory.trains_head:  # the copy goes to the host before the fp32 logits are made
        head, logits = 0, max(logits, head + n * shape.vocabulary * a)
    return (
        Line("final norm", _final_norm(memory), "its input and output"),
        Line("16-bit copy of the head", head, "by autocast"),
        cast_copies(memory),
        Line("logits", logits, "as computed, in fp32, and log-softmax"),
    )


def _final_norm(memory: StepFacts) -> int:
    """Return the bytes around the last norm when the head has just run: what it saved, its result, and a cast of it."""
    a = memory.compute_itemsize
    hidden = memory.hidden_itemsize
    saved = memory.norm_bytes(1, hidden).saved
    kept = (saved + hidden * memory.trains_all) * bool(memory.learning_blocks) * (not memory.offloads_the_end)
    # The head sees all tokens, and the norm in front of it those of this process.
    return memory.shape.width * (memory.all_tokens * (hidden + a * (a != hidden)) + memory.stream_tokens * kept)


def head_gradient(memory: StepFacts) -> tuple[Line, ...]:
    """Bill the backward pass of a trained head: its gradient comes in the compute dtype, and is then cast to fp32."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    weights = shape.embedding_weights
    logits = n * shape.vocabulary
    given = n * shape.width * a
    opened = weights * a + logits * a + given * (1 + bool(memory.learning_blocks))
    # In 16 bits there are two candidates: the product, beside the head's copy; and the cast, with the gradient twice.
    if a < FP32:
        opened = max(opened + weights * a, weights * (a + FP32) + given)
    mine = memory.stream_tokens
    kept = mine * shape.width * (FP32 + memory.hidden_itemsize * memory.trains_all) + mine * FP32
    if memory.offloads_the_end or not memory.learning_blocks:
        kept = 0
    return (
        Line("final norm", kept, "its input and output"),
        Line("head gradient", opened, "as computed, in fp32, and its factors"),
    )
