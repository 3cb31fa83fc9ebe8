"""Compute what one process needs: the moments of its step, the largest of them, and the overhead of a GPU."""

from dataclasses import dataclass

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.lines import Line, Moment

CONTEXT = 400_000_000
"""Bytes of a CUDA context with the kernels of a step ("around 400MB": ptrblck, pytorch issue 109888)."""


WORKSPACE_CONFIG = ":4096:2:16:8"
"""cuBLAS' workspaces as torch sets them (``CUBLAS_WORKSPACE_CONFIG``): 2 of 4,096 KiB, and 8 of 16 KiB."""


WORKSPACES = 2 * 1024 * (4096 * 2 + 16 * 8)
"""Bytes of the workspaces of a step, which needs them twice: the backward pass runs in a thread of its own, and each
thread has its own cuBLAS handle."""

STATE = ("weights: blocks", "weights: all others", "weights: adapter", "gradients", "optimizer states")
"""Names of the lines for weights, gradients and optimizer states, whose bytes do not depend on the batch."""


@dataclass(frozen=True)
class Bill:
    """The memory that a process needs in a training step [bytes].

    Attributes:
        facts: the facts of the part of the step that this process computes.
        moments: the moments of the step; the optimizer step is the last one.
        strategy: how several processes share the work; ``none`` for a single process.
        processes: how many processes share the work; for the strategy ``model``, how many GPUs.
    """

    facts: StepFacts
    moments: tuple[Moment, ...]
    strategy: str = "none"
    processes: int = 1

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
        needed = WORKSPACES * (self.facts.device.kind == "cuda")
        return Line("cuBLAS workspaces", needed, "one each for forward and backward")

    @property
    def allocated_bytes(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` reports."""
        return self.peak_bytes + self.workspaces.bytes

    @property
    def around(self) -> tuple[Line, ...]:
        """The lines of what a GPU holds besides the step's tensors; none on a CPU."""
        if self.facts.device.kind != "cuda":
            return ()
        return (Line("CUDA context", CONTEXT, "driver and kernels"), self.workspaces)

    @property
    def needed_bytes(self) -> int:
        """The memory that the device must have: the peak, and the lines of :attr:`around`."""
        return self.peak_bytes + sum(line.bytes for line in self.around)

    @property
    def fits(self) -> bool:
        """Whether the device has that much memory."""
        return self.needed_bytes <= self.facts.device.memory_bytes
