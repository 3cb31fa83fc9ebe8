"""Count what ring attention holds in one of N processes, which has two of the 2 N chunks of each row [bytes].

The formulas for a single process count it, with rows of as many tokens as a process has. Only attention differs: keys
and values of two processes are there at a time, partial results are in fp32, and each kernel runs on a pair of chunks.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from cria_tricks.bill.moments import IDS
from cria_tricks.bill.operation import ATTENTION, FP32, Line, Operation
from cria_tricks.bill.step import Step


def through_the_ring(step: Step) -> Step:
    """Bill ring attention in place of a single process's.

    Args:
        step: a step with as many tokens of a row as a process has.
    """
    # Keys and values are saved as they come, for the few key heads. There is no mask, except for one pair at a time.
    kernel = "memory-efficient" if step.device.kind == "cuda" else "flash"
    rule = functools.partial(_operations, step.learning_operations, step.joins_documents)
    return replace(
        step, kernel=kernel, repeats_keys=False, maskless=True, joins_documents=False, learning_operations=rule
    )


def _operations(inner: Callable[[Step], list[Operation]], packed: bool, step: Step) -> list[Operation]:
    """List the operations of a block, with the ring's attention."""
    return [_ring(step, one, packed) if one.name == ATTENTION else one for one in inner(step)]


def _ring(step: Step, single: Operation, packed: bool) -> Operation:
    """Change the bytes of a fused kernel into those of the ring, at the deepest point of each direction."""
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    queries = n * shape.query_width
    keys_values = 2 * n * shape.kv_width
    chunk = queries // 2
    in_flight = 2 * keys_values * a
    if packed:  # a pair's mask, and the booleans that it is made of
        in_flight += step.batch * (step.tokens // 2) ** 2 * (a + 2)
    repeated = 2 * chunk * a * (shape.heads != shape.kv_heads)
    # Forward: the partial results so far, and those of a pair of chunks while the two are merged: its output, both
    # weighted, and their sum.
    forward = in_flight + queries * FP32 + max(repeated + chunk * a, chunk * (a + 3 * FP32))
    # Backward: the gradients of the queries so far, those of keys and values that travel, and either those of a pair
    # of chunks, or those that arrive from the left neighbour.
    pair = repeated + 3 * chunk * a
    grown = queries * FP32 + keys_values * FP32
    plain = 2 * queries * a + keys_values * a  # what the single kernel has: its result's gradient, and three of its own
    backward = single.backward - plain + queries * a + in_flight + grown + max(pair, keys_values * FP32)
    return replace(single, forward=forward, backward=backward)


def whole_rows(step: Step, tokens: int) -> Line:
    """Return the line of the whole rows, which each process has before it cuts them.

    Args:
        step: the step.
        tokens: the tokens of a whole row.
    """
    return Line("batch: whole rows", 3 * step.batch * tokens * IDS, "before they are cut: ids, labels, mask")
