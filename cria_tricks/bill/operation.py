"""Define what a memory bill is made of: a line, a moment of the step, an operation of a block, and a product in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FP32 = 4
"""Bytes of one fp32 number."""
BLOCK = 64
"""How many 4-bit weights share one scale (bitsandbytes' absmax)."""
TOKENS_PER_CHUNK = 256
"""How many trained tokens the chunked loss computes logits for at once."""


STATE = ("weights: blocks", "weights: all others", "weights: adapter", "gradients", "optimizer states")
"""Names of the lines for weights, gradients and optimizer states, whose bytes do not depend on the batch."""

EVALUATION = "evaluation"
ANSWERS = "answers of eval.samples"
"""Names of the two moments of an evaluation during training: the loss of its rows, and the answers."""


@dataclass(frozen=True)
class Line:
    """A line of the memory bill.

    Attributes:
        name: what takes the memory, e.g. ``"gradients"``.
        bytes: how much it takes at the moment that the line belongs to.
        why: how this number comes about: its formula in words.
    """

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Moment:
    """A point of the training step, and everything that is in memory at that point.

    Attributes:
        name: which point, e.g. ``"optimizer step"``.
        lines: the lines of the memory bill at this point.
    """

    name: str
    lines: tuple[Line, ...]

    @property
    def bytes(self) -> int:
        """The memory in use at this point: the sum of all lines."""
        return sum(line.bytes for line in self.lines)


def smaller(moment: Moment, bytes: dict[str, int]) -> Moment:
    """Return a copy of a moment, in which some lines are limited to a number of bytes.

    Args:
        moment: the moment; it is not changed.
        bytes: the limits by the names of the lines [bytes]. All other lines stay as they are. A shard is never larger
            than its tensor. So a line with bytes gets exactly its limit, and a line of 0 bytes stays 0.
    """
    lines = (replace(line, bytes=min(line.bytes, bytes.get(line.name, line.bytes))) for line in moment.lines)
    return Moment(moment.name, tuple(lines))


FIRST_NORM = "first norm's input"
INPUT = "block's input"
"""Names of the saved block input: the first if a block begins with a norm, the second if it begins with matrices."""
GATED = "gated product"
"""The input of down_proj: activation(gate) * up."""
ATTENTION = "attention"
"""The name of the operation of a fused attention kernel; the next two are what it returns."""
ATTENDED = "attention's output"
LOG_SUM_EXP = "log-sum-exp"
TILED = "tiled MLP"
"""The name of the operation of an MLP that takes a tile of tokens at a time."""
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


@dataclass(frozen=True)
class Product:
    """One product ``x W``.

    Attributes:
        given: elements of its input.
        made: elements of its result.
        weight: elements of the matrix.
        input_itemsize: bytes of an element of the input.
        compute_itemsize: bytes of an element of what is multiplied.
        made_itemsize: bytes of an element of the result.
        bf16: whether products are computed in bf16.
    """

    given: int
    made: int
    weight: int
    input_itemsize: int
    compute_itemsize: int
    made_itemsize: int
    bf16: bool = False


@dataclass(frozen=True)
class ProductBytes:
    """What a product needs [bytes].

    Attributes:
        forward: open while it runs: the input in the dtype it is multiplied in, the unpacked weight, the result.
        unpacked: of the weight that its backward pass unpacks again.
        pinned: kept for the backward pass out of autograd's sight, where checkpointing cannot drop it.
    """

    forward: int
    unpacked: int = 0
    pinned: int = 0


def stored_as_multiplied(product: Product) -> ProductBytes:
    """The weight is read as it is stored, or autocast's copy of it, which has a line of its own."""
    forward = product.made * product.made_itemsize
    if product.input_itemsize != product.compute_itemsize:
        forward += product.given * product.compute_itemsize
    return ProductBytes(forward)


@dataclass(frozen=True)
class NormBytes:
    """What an RMS norm needs [bytes].

    Attributes:
        saved: its saved input. What it saves besides, a number for each row, is counted elsewhere.
        forward: temporary tensors, its result included.
        backward: temporary tensors in its backward pass, the gradient of the residual stream included.
        copies: whether ``saved`` is a copy of the input.
        apart: the first part of the input's gradient, where it is not added to that of the residual stream at once.
    """

    saved: int
    forward: int
    backward: int
    copies: bool
    apart: int


def norm_in_fp32(elements: int, x: int) -> NormBytes:
    """Bill transformers' norm: it casts its input, of x bytes an element, to fp32, and saves that.

    Backward there are four fp32 tensors: the gradient of the mean of squares, the input, twice that, and the second
    part of the input's gradient. The first part is one more.
    """
    backward = elements * (4 * FP32 + x)
    return NormBytes(elements * FP32, elements * (FP32 + x), backward, copies=x < FP32, apart=elements * FP32)


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
        attended: the part of ``kept`` that a fused attention kernel returned: its output and the log-sum-exp.
        recomputed: whether this block is checkpointed. With a number of blocks, the last ones are not.
        offloaded: whether its tensors wait in the host's memory.
    """

    input: int
    kept: int
    pinned: int
    joined: int
    keeps_input: bool
    attended: int
    recomputed: bool
    offloaded: bool = False


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
