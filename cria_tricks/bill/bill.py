"""The bill of a process: moments of a step, the lines of each, and what the largest of them needs on a card."""

from dataclasses import dataclass

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.rows import Moment, Row

CONTEXT = 400_000_000
"""Bytes of a CUDA context with the kernels of a step ("around 400MB": ptrblck, pytorch issue 109888)."""


WORKSPACE_CONFIG = ":4096:2:16:8"
"""cuBLAS' workspaces as torch sets them (``CUBLAS_WORKSPACE_CONFIG``): KiB and how many, twice."""


WORKSPACES = 2 * 1024 * (4096 * 2 + 16 * 8)
"""Bytes of the two that a step needs: a handle belongs to a thread, and the backward pass has its own."""

STATE = ("weights: blocks' matrices", "weights: all others", "weights: added", "gradients", "optimizer states")
"""Rows of a bill that are there between two steps."""


@dataclass(frozen=True)
class Bill:
    """What a process needs in a step of training [bytes].

    Attributes:
        facts: what the process computes.
        moments: of the step; the optimizer's step is the last one.
        strategy: how several processes share the work; ``none`` for a single one.
        processes: how many share it; for the strategy ``model``, cards.
    """

    facts: StepFacts
    moments: tuple[Moment, ...]
    strategy: str = "none"
    processes: int = 1

    @property
    def peak(self) -> Moment:
        """The moment at which most is alive."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The lines of the peak that are not empty."""
        return tuple(row for row in self.peak.rows if row.bytes)

    @property
    def state(self) -> tuple[Row, ...]:
        """Weights, gradients and optimizer states, as they lie there when the optimizer steps."""
        return tuple(row for row in self.moments[-1].rows if row.name in STATE)

    @property
    def state_bytes(self) -> int:
        """All of these."""
        return sum(row.bytes for row in self.state)

    @property
    def peak_bytes(self) -> int:
        """What the step's own tensors take."""
        return self.peak.bytes

    @property
    def workspaces(self) -> Row:
        """What products on a card work in: no tensor, but of the same allocator."""
        needed = WORKSPACES * (self.facts.device.kind == "cuda")
        return Row("cuBLAS workspaces", needed, "one for the forward pass's thread, one for the backward pass's")

    @property
    def allocated_bytes(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` sees."""
        return self.peak_bytes + self.workspaces.bytes

    @property
    def around(self) -> tuple[Row, ...]:
        """What a card holds besides."""
        if self.facts.device.kind != "cuda":
            return ()
        return (Row("CUDA context", CONTEXT, "driver and kernels, loaded as they are needed"), self.workspaces)

    @property
    def needed_bytes(self) -> int:
        """What the card must have: the peak, and what no tensor of the step is."""
        return self.peak_bytes + sum(row.bytes for row in self.around)

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.needed_bytes <= self.facts.device.memory_bytes
