"""The end of the forward pass on paper, and the beginning of the backward pass: last norm, head, logits."""

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.formula import largest
from cria_tricks.bill.rows import Row


def full_loss(memory: StepFacts) -> dict[str, tuple[Row, ...]]:
    """Rows at the moments around a loss of all positions, whose logits are there at once: n V numbers, thrice."""
    return {"loss": _loss(memory), "log-softmax": _log_softmax(memory)}


def cast_copies(memory: StepFacts, *, kept: bool) -> Row:
    """Autocast's copies of what trains in blocks, which autocast holds until the forward pass ends."""
    copied = memory.trained_weights
    matrices = sum(d_in * d_out for d_in, d_out in memory.shape.packable.values())
    if memory.trains_all:
        copied = memory.shape.layers * matrices
    elif memory.learns_beside:
        copied = memory.learning_blocks * (matrices + memory.shape.width**2)
    size = 0
    if memory.compute_itemsize < FP32 and memory.learning_blocks and kept:
        size = copied * memory.compute_itemsize
    return Row("weights in 16 bits", size, "autocast's copies of what trains, until the forward pass ends")


def normalised(memory: StepFacts) -> int:
    """Bytes that the last norm keeps: its input in fp32, and a root for each position."""
    n = memory.all_tokens
    return n * memory.shape.width * FP32 + n * FP32


def head_copy(memory: StepFacts) -> int:
    """Bytes of autocast's copy of the head, which waits where a gradient goes through what it multiplied."""
    if memory.compute_itemsize == memory.other_weight_itemsize or not memory.learning_blocks:
        return 0
    return memory.shape.embedding_weights * memory.compute_itemsize


def _loss(memory: StepFacts) -> tuple[Row, ...]:
    """The end of the forward pass and the beginning of the backward pass, where all logits are made at once."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    norm = normalised(memory)
    if memory.trains_head:
        norm = norm * bool(memory.learning_blocks) + n * shape.width * (a + memory.hidden_itemsize * memory.trains_all)
    head = head_copy(memory)
    if memory.offloaded:  # of what was kept nothing is back before its turn
        norm = head = 0
    return (
        Row("final norm", norm, "its input, and what a trained head and norm need for their gradients"),
        Row("head in 16 bits", head, "autocast's copy, kept for the gradient of what it multiplied"),
        Row("logits", 3 * n * shape.vocabulary * FP32, "n V: log-softmax, and two gradients"),
        Row("capped logits", n * shape.vocabulary * a * shape.caps_logits, "n V: what came out of their tanh"),
    )


def _log_softmax(memory: StepFacts) -> tuple[Row, ...]:
    """Bill the last operation of the forward pass. Autocast is still on, so its 16-bit copy of the head is alive."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    head = shape.embedding_weights * a * (a < FP32 and (a != memory.other_weight_itemsize or memory.trains_head))
    logits = n * shape.vocabulary * (2 * FP32 + a * (a < FP32))
    if memory.offloaded and not memory.trains_head:  # then its copy has gone to the host when the next operation runs
        head, logits = 0, largest(logits, head + n * shape.vocabulary * a)
    return (
        Row("final norm", _final_norm(memory), "its input and output"),
        Row("head in 16 bits", head, "autocast's copy"),
        cast_copies(memory, kept=memory.checkpointed or memory.offloaded),  # else the blocks' saved tensors hold them
        Row("logits", logits, "n V: as the head gave them, in fp32, log-softmax"),
    )


def _final_norm(memory: StepFacts) -> int:
    """Bytes around the last norm when the head has just run."""
    a = memory.compute_itemsize
    hidden = memory.hidden_itemsize
    kept = (FP32 + hidden * memory.trains_all) * bool(memory.learning_blocks) * (not memory.offloaded)
    return memory.all_tokens * memory.shape.width * (kept + hidden + a * (a != hidden))


def head_gradient(memory: StepFacts) -> tuple[Row, ...]:
    """Backward through a trained head: its gradient comes in the operand's dtype, then in fp32."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    weights = shape.embedding_weights
    logits = n * shape.vocabulary
    given = n * shape.width * a
    opened = weights * a + logits * a + given * (1 + bool(memory.learning_blocks))
    if a < FP32:
        opened = largest(opened + weights * a, weights * (a + FP32) + given)
    kept = n * shape.width * (FP32 + memory.hidden_itemsize * memory.trains_all) + n * FP32
    if memory.offloaded or not memory.learning_blocks:
        kept = 0
    return (
        Row("final norm", kept, "its input and output"),
        Row("head's gradient", opened, "as the product gives it and in fp32, beside what it multiplies"),
    )
