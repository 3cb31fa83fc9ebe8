"""Describe the activations that blocks save for their backward pass, and how many bytes of them stay on the device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockTensors:
    """The tensors that one block saves for its backward pass [bytes].

    Attributes:
        input: the block's input, s in formulas.
        kept: everything that its operations save, when nothing is recomputed or offloaded.
        pinned: the part of ``kept`` that int8 products save out of autograd's sight. Checkpointing and offloading act
            through autograd's hooks, so they cannot remove it.
        joined: the part of ``kept`` that is saved by the matrix which joins a side network's trained copy to its block.
        keeps_input: whether ``kept`` contains the block's input itself.
    """

    input: int
    kept: int
    pinned: int
    joined: int
    keeps_input: bool


@dataclass(frozen=True)
class WaitingBytes:
    """How much of the saved activations stays on the device until the backward pass [bytes].

    Attributes:
        each: for each block whose backward pass is still to come.
        open_too: added once, while the backward pass of one block runs.
        why: what these bytes are, in words.
    """

    each: int
    open_too: int
    why: str


def everything(block: BlockTensors) -> WaitingBytes:
    """Return the bytes without checkpointing and offloading: each block keeps all that its operations save."""
    return WaitingBytes(block.kept, 0, "all that its operations save")
