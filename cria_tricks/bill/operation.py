"""What is known of one operation of a block, and the names of tensors that several operations keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_NORM = "first norm's input"
INPUT = "block's input"
"""What keeps the block's input: a norm in front of it, or else the matrices."""
GATED = "gated product"
ATTENDED = "attention's output"
JOINED_DOCUMENTS = "documents' outputs, joined"
JOINED = ("join's input", "join in 16 bits")
"""What the matrix keeps that joins a trained copy to its block."""


@dataclass(frozen=True)
class Operation:
    """One operation of a block.

    Attributes:
        name: what it is called in a bill.
        keeps: bytes for the backward pass, by tensor; a tensor that several operations keep is there once.
        pins: the same out of autograd's sight, where checkpointing cannot drop it. What is made again is not pinned
            for long: it goes when the forward pass has run a second time.
        forward: bytes open while it computes, its result included.
        backward: bytes open in its backward pass: the gradients that come, go and wait, and what is made again.
        learns: bytes of its weights' gradients, which stay.
        reads: tensors of earlier operations that its forward pass needs, where nothing is kept on the device.
        fetched: bytes that its backward pass has back from the host at once, where that is not all of its own.
    """

    name: str
    keeps: Mapping[str, int] = field(default_factory=dict)
    pins: Mapping[str, int] = field(default_factory=dict)
    forward: int = 0
    backward: int = 0
    learns: int = 0
    reads: Mapping[str, int] = field(default_factory=dict)
    fetched: int | None = None
