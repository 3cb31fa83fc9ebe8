"""List the operations of attention for the memory bill: what each kernel saves, and its temporary tensors [bytes].

Short names as in ``block_operations.py``: n is the number of tokens of a micro-batch, T of a row, H the number of query
heads, and a the bytes of one element in the compute dtype.
"""

from dataclasses import dataclass

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.operation import ATTENDED, ATTENTION, LOG_SUM_EXP, Operation
from cria_tricks.bill.step import Step


@dataclass(frozen=True)
class _Operands:
    """The inputs of attention in the compute dtype [bytes], and the number of its scores, n T H."""

    queries: int
    keys: int
    values: int
    scores: int

    @property
    def by_name(self) -> dict[str, int]:
        """The bytes of the inputs, by their names in the bill."""
        return {"queries": self.queries, "keys": self.keys, "values": self.values}


def attention(step: Step, residual: int) -> list[Operation]:
    """List the operations of the kernel that runs. All kernels save their inputs, and some each head's T x T matrix.

    Args:
        step: the step.
        residual: the gradient of the residual stream, which waits in the backward pass [bytes].
    """
    operands = _operands(step)
    if step.kernel == "math":
        return [_math(step, operands, residual)]
    if step.kernel == "eager":
        return _eager(step, operands, residual)
    return [_fused(step, operands, residual)]


def _operands(step: Step) -> _Operands:
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    queries = n * shape.query_width * a
    keys = n * shape.kv_width * a
    if step.repeats_keys or step.kernel == "math":  # the math kernel repeats them itself
        keys = queries
    values = keys
    # Phi-3's values are a slice of one product, which gives queries and keys, too. If the slice is saved as it is (not
    # cast, not repeated), it keeps the whole product alive.
    if shape.joined and a == step.product_itemsize and (shape.heads == shape.kv_heads or not step.repeats_keys):
        values = n * (shape.query_width + 2 * shape.kv_width) * a
    return _Operands(queries, keys, values, n * step.tokens * shape.heads)


def _math(step: Step, operands: _Operands, residual: int) -> Operation:
    """Bill the math kernel, which computes in fp32 even if its inputs are in 16 bits.

    In the forward pass its inputs are alive in each dtype that they have had: as they were computed, in the compute
    dtype, and in fp32. So is the causal mask, as fp32 numbers and as the booleans that these were made from. The
    softmax has its input beside its result, and one byte for each score, which marks those that are -inf. In the
    backward pass it has the gradients of both.
    """
    a = step.compute_itemsize
    shape = step.shape
    scores = operands.scores
    kept = {name: size // a * FP32 for name, size in operands.by_name.items()}
    kept["probabilities"] = scores * FP32
    ways = a  # bytes of one element of the inputs, summed over all dtypes in which it is alive
    if a < FP32:
        ways += FP32
    if step.widest_itemsize != a:
        ways += step.widest_itemsize
    given = step.all_tokens * (shape.query_width + 2 * shape.kv_width) * ways
    forward = scores * (FP32 + 1) + given + step.tokens**2 * (FP32 + 1)
    # While the softmax runs backward, the gradient of attention's result (as wide as the queries) and that of the
    # values wait.
    back = residual + operands.queries + operands.keys
    return Operation("scores and softmax", kept, {}, forward, back + 2 * scores * FP32)


def _eager(step: Step, operands: _Operands, residual: int) -> list[Operation]:
    """Bill attention without a fused kernel: scores, scaled and masked, then the softmax in fp32, then the values.

    The backward pass of the softmax has the gradients of its input and its result, beside the gradient of the values.
    """
    a = step.compute_itemsize
    queries = operands.queries
    keys = operands.keys
    scores = operands.scores
    kept = {"queries": queries, "keys": keys, "probabilities": scores * FP32}
    multiplied = {"values": operands.values}
    if a < FP32:
        multiplied["probabilities in 16 bits"] = scores * a
    if step.shape.caps_scores:
        kept["capped scores"] = scores * a
    # The softmax needs fp32 scores. If the mask is fp32, adding it gives these; else the softmax makes an fp32 copy.
    forward = scores * FP32
    if max(a, step.hidden_itemsize) < FP32:
        forward += scores * a
    # The gradient of the values waits in the dtype in which v_proj gave the values.
    of_values = keys // a * step.product_itemsize
    # If nothing is kept on the device, queries and keys are not alive in the compute dtype, but as they were before the
    # cast, and so are the values.
    if step.keeps_nothing:
        forward += (queries + keys) // a * step.widest_itemsize + of_values - queries - keys
    backward = residual + of_values + 2 * scores * FP32
    reads = {"probabilities": scores * FP32}
    # ``fetched`` is what comes back from the host for one product: for the values these and the probabilities in their
    # dtype, then for the softmax its result. Queries and keys come back after that.
    return [
        Operation("scores and softmax", kept, {}, forward, backward, fetched=scores * FP32),
        Operation("weighted values", multiplied, {}, queries, backward=residual + queries + keys + scores * a,
                  reads=reads, fetched=scores * a + keys),
    ]  # fmt: skip


def _fused(step: Step, operands: _Operands, residual: int) -> Operation:
    """Bill a fused kernel, flash or memory-efficient: it saves no scores, only a log-sum-exp for each query."""
    n = step.all_tokens
    queries = operands.queries
    kept = operands.by_name
    if step.shape.kv_heads == 1:  # to repeat a single head takes no memory: all query heads look at the same numbers
        kept |= dict.fromkeys(("keys", "values"), n * step.shape.kv_width * step.compute_itemsize)
    if not step.maskless:
        kept["mask"] = n * step.tokens * step.compute_itemsize  # T x T for each row, for all heads
    kept |= {ATTENDED: queries, LOG_SUM_EXP: n * step.shape.heads * FP32}
    # The flash kernel lays its result out in memory like the queries. In Phi-3 these lie head by head, so o_proj needs
    # a copy, and both are saved.
    if step.shape.joined and step.kernel == "flash":
        kept["attention's output, by heads"] = queries
    # The result counts in the forward pass and among what is kept: at most so much. The backward pass has the gradients
    # of the result, the queries, the keys and the values.
    return Operation(ATTENTION, kept, {}, queries, residual + 2 * queries + 2 * operands.keys)
