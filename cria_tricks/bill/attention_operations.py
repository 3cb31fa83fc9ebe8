"""The attention of a block on paper: what its kernel keeps for the backward pass, and what is open around it.

Letters as in ``block_operations.py``: n tokens of a micro-batch, T of a row; a bytes of an element of what products
multiply.
"""

from dataclasses import dataclass

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.operation import ATTENDED, Operation


@dataclass(frozen=True)
class _Operands:
    """What attention multiplies, in the dtype of products [bytes]; and how many scores, n T H."""

    queries: int
    keys: int
    values: int
    scores: int

    @property
    def by_name(self) -> dict[str, int]:
        """As a bill calls them."""
        return {"queries": self.queries, "keys": self.keys, "values": self.values}


def attention(memory: StepFacts, residual: int) -> list[Operation]:
    """What the kernel keeps: what it multiplies, and, of those that hold it, the T x T matrix.

    Args:
        memory: the setting.
        residual: bytes of gradient that wait beside it.
    """
    operands = _operands(memory)
    if memory.kernel == "math":
        return [_math(memory, operands, residual)]
    if memory.kernel == "eager":
        return _eager(memory, operands, residual)
    return [_fused(memory, operands, residual)]


def _operands(memory: StepFacts) -> _Operands:
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    queries = n * shape.query_width * a
    keys = n * shape.kv_width * a
    if memory.repeats_keys or memory.kernel == "math":  # which repeats them itself
        keys = queries
    values = keys
    if shape.joined and a == memory.product_itemsize and (shape.heads == shape.kv_heads or not memory.repeats_keys):
        values = n * (shape.query_width + 2 * shape.kv_width) * a  # as a part of what one matrix gave, they keep it all
    return _Operands(queries, keys, values, n * memory.tokens * shape.heads)


def _math(memory: StepFacts, operands: _Operands, residual: int) -> Operation:
    """The math kernel computes in fp32 whatever it is given.

    What it is given waits, as do its casts to 16 bits and to fp32; the causal mask, as numbers and as what they were
    made from. The softmax holds its input beside its result, and a byte for each number that says where a row is -inf;
    back: the gradients of both.
    """
    a = memory.compute_itemsize
    shape = memory.shape
    scores = operands.scores
    kept = {name: size // a * FP32 for name, size in operands.by_name.items()}
    kept["probabilities"] = scores * FP32
    ways = a
    if a < FP32:
        ways += FP32
    if memory.widest_itemsize != a:
        ways += memory.widest_itemsize
    given = memory.all_tokens * (shape.query_width + 2 * shape.kv_width) * ways
    forward = scores * (FP32 + 1) + given + memory.tokens**2 * (FP32 + 1)
    back = residual + operands.queries + operands.keys
    return Operation("scores and softmax", kept, {}, forward, back + 2 * scores * FP32)


def _eager(memory: StepFacts, operands: _Operands, residual: int) -> list[Operation]:
    """Scores, scaled and masked, then the softmax in fp32; back: the gradients of both, beside that of the values."""
    a = memory.compute_itemsize
    queries = operands.queries
    keys = operands.keys
    scores = operands.scores
    kept = {"queries": queries, "keys": keys, "probabilities": scores * FP32}
    multiplied = {"values": operands.values}
    if a < FP32:
        multiplied["probabilities in 16 bits"] = scores * a
    if memory.shape.caps_scores:
        kept["capped scores"] = scores * a
    # A mask in fp32 makes the scores so, and else the softmax does.
    forward = scores * FP32
    if max(a, memory.hidden_itemsize) < FP32:
        forward += scores * a
    # The values' gradient waits, as wide as their product gave them.
    of_values = keys // a * memory.product_itemsize
    if memory.keeps_nothing:  # not the 16 bits that are multiplied are alive then, but what they were made from
        forward += (queries + keys) // a * memory.widest_itemsize + of_values - queries - keys
    backward = residual + of_values + 2 * scores * FP32
    reads = {"probabilities": scores * FP32}
    return [
        Operation("scores and softmax", kept, {}, forward, backward, fetched=scores * FP32),
        Operation("weighted values", multiplied, {}, queries, backward=residual + queries + keys + scores * a,
                  reads=reads, fetched=scores * a + keys),
    ]  # fmt: skip


def _fused(memory: StepFacts, operands: _Operands, residual: int) -> Operation:
    """A kernel that keeps no score: flash, or memory-efficient."""
    n = memory.all_tokens
    queries = operands.queries
    kept = operands.by_name
    if not memory.maskless:
        kept["mask"] = n * memory.tokens * memory.compute_itemsize  # for each row, and all heads
    kept |= {ATTENDED: queries, "log-sum-exp": n * memory.shape.heads * FP32}
    if memory.shape.joined and memory.kernel == "flash":  # its result lies as the queries do, here head by head
        kept["attention's output, by heads"] = queries
    return Operation("attention", kept, {}, queries, residual + 2 * queries + 2 * operands.keys)
