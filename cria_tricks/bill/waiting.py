"""What a block leaves for its backward pass, and how much of it waits on the device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockTensors:
    """What one block has to leave for its backward pass [bytes].

    Attributes:
        input: the block's input, s in formulas.
        kept: all that its operations keep.
        pinned: of these, what int8 products keep out of autograd's sight, where no hook can take it away.
        joined: of these, what the matrix keeps that joins a trained copy to its block.
        keeps_input: whether one of its operations keeps the block's input as it is.
    """

    input: int
    kept: int
    pinned: int
    joined: int
    keeps_input: bool


@dataclass(frozen=True)
class WaitingBytes:
    """What waits in blocks [bytes].

    Attributes:
        each: of each block that waits for its backward pass.
        open_too: comes on top, once, while one block's backward pass runs.
        why: what these are, in words.
    """

    each: int
    open_too: int
    why: str


def everything(block: BlockTensors) -> WaitingBytes:
    """All that a block's operations keep waits, for each block from its forward to its backward pass."""
    return WaitingBytes(block.kept, 0, "all that their operations keep")
