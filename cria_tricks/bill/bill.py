"""Compute what one process needs: the moments of its step, the largest of them, and the overhead of a GPU."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cria_tricks.bill.operation import ANSWERS, EVALUATION, STATE, Line, Moment
from cria_tricks.bill.step import Step
from cria_tricks.hardware.trust import verdict

CONTEXT = 400_000_000
"""Bytes of a CUDA context with the kernels of a step ("around 400MB": ptrblck, pytorch issue 109888)."""


WORKSPACE_CONFIG = ":4096:2:16:8"
"""cuBLAS' workspaces as torch sets them (``CUBLAS_WORKSPACE_CONFIG``): 2 of 4,096 KiB, and 8 of 16 KiB."""


WORKSPACES = 2 * 1024 * (4096 * 2 + 16 * 8)
"""Bytes of the workspaces of a step, which needs them twice: the backward pass runs in a thread of its own, and each
thread has its own cuBLAS handle."""


class Shares(NamedTuple):
    """What PyTorch's allocator reserves beyond the bytes of tensors, as shares of what is there at the peak.

    The allocator takes memory from a card in segments and keeps it. When rows of different lengths follow each other,
    some free parts of these segments are too small for the next tensors, so it takes more. ``predict/allocator.py``
    models that event by event, which takes seconds. These shares are a rule for the closed form. It should be
    an upper estimate, because how tensors happen to lie cannot be told from sizes; an H200 reserved up to 7 % more. A
    run can work with less, because a full allocator first gives unused segments back to the card.

    The shares are fitted on the replays of 204 drawn settings (``benchmarks/reserved.py``): whole models, a window of
    shorter rows before one of full rows, and no figure from a card. They are the smallest shares by which no replay is
    underestimated by more than 2 %, except for the one that :data:`EXPANDABLE` tells of.

    Attributes:
        activations: of all lines that depend on the batch.
        gradients: of the gradients.
        states: of the optimizer states.
        weights: of the weights.
    """

    activations: float
    gradients: float
    states: float
    weights: float


EXPANDABLE = Shares(0.294, 0.262, 0.41, 0.0)
"""With ``expandable_segments:True``, where each pool is one segment that grows by pages of 20 MiB.

In one replay, the one that needs most, 29 GB of gradients come into the holes that logits have left. So the gradients'
share is larger than in the fit, and the states' is smaller.
"""
SEGMENTS = Shares(1.248, 0.242, 0.414, 0.16)
"""Without: a segment for each large allocation, which only tensors that are no larger can use again."""


def unused_bytes(peak: Moment, *, expandable: bool, gradients_wait: bool = True) -> int:
    """Estimate how many bytes more the allocator may have reserved than tensors use [bytes].

    Args:
        peak: the fullest moment of the step.
        expandable: whether its segments are expandable.
        gradients_wait: whether gradients wait for the optimizer. One that is freed at once leaves room for the next.
    """
    shares = EXPANDABLE if expandable else SEGMENTS
    activations, gradients, states, weights = parts(peak.lines)
    sizes = (activations, gradients * gradients_wait, states, weights)
    return int(sum(share * size for share, size in zip(shares, sizes, strict=True)))


def parts(lines: tuple[Line, ...]) -> tuple[int, int, int, int]:
    """Return the bytes of activations, gradients, optimizer states and weights."""
    weights = sum(line.bytes for line in lines if line.name.startswith("weights"))
    gradients = sum(line.bytes for line in lines if line.name == "gradients")
    states = sum(line.bytes for line in lines if line.name == "optimizer states")
    everything = sum(line.bytes for line in lines)
    return everything - weights - gradients - states, gradients, states, weights


@dataclass(frozen=True)
class Bill:
    """The memory that a process needs in a training step, and in an evaluation if there is one [bytes].

    Attributes:
        step: the part of the step that this process computes.
        moments: the moments of the step and of an evaluation; the optimizer step is the last one.
        strategy: how several processes share the work; ``none`` for a single process.
        processes: how many processes share the work; for the strategy ``model``, how many GPUs.
    """

    step: Step
    moments: tuple[Moment, ...]
    strategy: str = "none"
    processes: int = 1

    @property
    def training(self) -> "Bill":
        """The bill of the training step alone, without evaluations."""
        moments = tuple(moment for moment in self.moments if moment.name not in (EVALUATION, ANSWERS))
        return replace(self, moments=moments)

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes alive."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the peak, without empty ones; they sum to :attr:`peak_bytes`."""
        return tuple(line for line in self.peak.lines if line.bytes)

    @property
    def state(self) -> tuple[Line, ...]:
        """The lines of weights, gradients and optimizer states in the optimizer step."""
        return tuple(line for line in self.moments[-1].lines if line.name in STATE)

    @property
    def state_bytes(self) -> int:
        """The sum of :attr:`state`."""
        return sum(line.bytes for line in self.state)

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at the peak."""
        return self.peak.bytes

    @property
    def workspaces(self) -> Line:
        """The memory in which a GPU's matrix products work. It holds no tensor, but torch's allocator counts it."""
        needed = WORKSPACES * (self.step.device.kind == "cuda")
        return Line("cuBLAS workspaces", needed, "one each for forward and backward")

    @property
    def allocated_bytes(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` reports."""
        return self.peak_bytes + self.workspaces.bytes

    @property
    def unused(self) -> Line:
        """The memory that torch's allocator may have reserved and no tensor uses; none on a CPU."""
        expandable = self.step.expandable_segments
        waits = not self.step.steps_in_backward
        # An evaluation may have the fullest moment, and the allocator may still have reserved more for the training.
        reserved = (
            moment.bytes + unused_bytes(moment, expandable=expandable, gradients_wait=waits)
            for moment in (self.peak, self.training.peak)
        )
        found = (max(reserved) - self.peak_bytes) * (self.step.device.kind == "cuda")
        ways = "expandable segments" if expandable else "a segment for each large tensor"
        return Line("reserved, not used", found, f"estimated, with {ways}")

    @property
    def reserved_bytes(self) -> int:
        """What ``torch.cuda.max_memory_reserved`` may report: an H200 reported up to 7 % more."""
        return self.allocated_bytes + self.unused.bytes

    @property
    def around(self) -> tuple[Line, ...]:
        """The lines of what a GPU holds besides the step's tensors; none on a CPU."""
        if self.step.device.kind != "cuda":
            return ()
        return (Line("CUDA context", CONTEXT, "driver and kernels"), self.workspaces, self.unused)

    @property
    def needed_bytes(self) -> int:
        """The memory that the device should have: the peak, and the lines of :attr:`around`."""
        return self.peak_bytes + sum(line.bytes for line in self.around)

    @property
    def least_bytes(self) -> int:
        """The memory without which the run cannot work, even if no byte that the allocator reserves stays unused."""
        return self.needed_bytes - self.unused.bytes

    @property
    def fits(self) -> bool:
        """Whether the run can work on the device: its verdict is ``fits`` or ``tight``."""
        return self.verdict != "does not fit"

    @property
    def verdict(self) -> str:
        """``fits``, ``tight`` or ``does not fit``."""
        return verdict(self.needed_bytes, self.step.device.memory_bytes, self.least_bytes)
