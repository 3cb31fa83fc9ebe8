"""Describe one operation of a block for the memory bill, and name the tensors that several operations share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_NORM = "first norm's input"
INPUT = "block's input"
"""Names of the saved block input: the first if a block begins with a norm, the second if it begins with matrices."""
GATED = "gated product"
"""The input of down_proj: activation(gate) * up."""
ATTENDED = "attention's output"
JOINED_DOCUMENTS = "documents' outputs, joined"
JOINED = ("join's input", "join in 16 bits")
"""What the joining matrix of a side network saves; it adds a trained copy's output to that of the frozen block."""


@dataclass(frozen=True)
class Operation:
    """One operation of a block, such as a matrix product or a norm [bytes].

    Attributes:
        name: its name in the bill.
        keeps: the tensors that autograd saves for its backward pass, by name. A tensor that several operations save has
            one name, so it is counted once.
        pins: tensors that are saved where autograd does not see them, so checkpointing cannot drop them. If
            checkpointing repeats the forward pass, what the repetition pins is freed at its end.
        forward: temporary tensors that are alive while it runs, its result included.
        backward: temporary tensors that are alive in its backward pass: gradients of its result and input, gradients
            that wait meanwhile, and what is computed again.
        learns: gradients of its weights, which stay until the optimizer step.
        reads: tensors of earlier operations that its forward pass needs. They count only if nothing is kept on the
            device; otherwise they are in ``keeps`` of some operation.
        fetched: saved tensors that are on the device at the same time in its backward pass, if they come back from the
            host; ``None`` if these are exactly its own ``keeps``.
    """

    name: str
    keeps: Mapping[str, int] = field(default_factory=dict)
    pins: Mapping[str, int] = field(default_factory=dict)
    forward: int = 0
    backward: int = 0
    learns: int = 0
    reads: Mapping[str, int] = field(default_factory=dict)
    fetched: int | None = None
