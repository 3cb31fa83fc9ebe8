r"""When more cards stop helping: seconds of a step from its bytes and the link that they cross.

A collective takes t = start + hops * hop + sent / rate. An all-reduce over a ring has 2 (N - 1) hops, and each process
sends 2 (N - 1) / N of the tensor; an all-gather and a reduce-scatter half of either. So what a process sends hardly
grows with N, the hops do, and what it computes shrinks: at some N a doubling buys next to nothing.

The seconds of a collective are added to those of computing; what a strategy can hide behind the backward pass is given
as ``overlap``. Computing is ``bill/step_time.py``'s estimate of what one process computes, right within a factor of
two, and so is the N that comes out. One link stands for all: where a ring crosses several, take the slowest.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cria_tricks.bill import step_time
from cria_tricks.bill.calls import Call, ring_share
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import Card
from cria_tricks.models.shape import Shape
from cria_tricks.predict.per_process import local, stages_of
from cria_tricks.recipe import Recipe, with_settings

Traffic = Callable[[Recipe, Shape, int], list[Call]]
"""A strategy's ``traffic``."""


@dataclass(frozen=True)
class Link:
    """What processes are joined by, for one of them and one way.

    Attributes:
        name: what it is called.
        peak: bytes a second it is sold as.
        reached: how much of that collectives get.
        hop: seconds from one process to the next.
        start: seconds of any call.
        source: of the peak, then of what is reached.
    """

    name: str
    peak: float
    reached: float
    hop: float
    start: float
    source: str

    @property
    def rate(self) -> float:
        """Bytes a second that collectives get."""
        return self.peak * self.reached

    def seconds(self, call: Call) -> float:
        """What a call takes in one step, all its times."""
        n = call.processes
        hops = {"all_reduce": 2 * (n - 1), "send": 1}.get(call.kind, n - 1)
        return call.times * (self.start + hops * self.hop) + call.sent / self.rate


# NCCL 2.30's constants for large calls over a ring, in src/graph/tuning.cc: a start, a hop of NVLink, PCIe, a network.
_START, _NVLINK, _PCIE, _NET = 8.4e-6, 3.4e-6, 5.7e-6, 14.0e-6
_TCP = 1448 / 1538
"""Payload of a full Ethernet frame: of 1,538 bytes on the wire 1,448 are left by frame, IP and TCP with timestamps."""

LINKS: dict[str, Link] = {
    "pcie3": Link("PCIe 3.0 x16", 15.75e9, 12 / 15.75, _PCIE, _START,
                  "8 GT/s x 16 lanes x 128/130; NCCL 2.30, src/graph/topo.h: PCI_BW 12.0"),
    "pcie4": Link("PCIe 4.0 x16", 31.5e9, 24 / 31.5, _PCIE, _START,
                  "16 GT/s x 16 lanes x 128/130; NCCL 2.30, src/graph/topo.cc: 120 x 100 Mbit/s a lane"),
    "nvlink_a100": Link("NVLink of an A100", 300e9, 232.5 / 300, _NVLINK, _START,
                        "NVIDIA A100 datasheet, 600 GB/s both ways; measured on 8 cards: nccl-tests issue 175"),
    "nvlink_h100": Link("NVLink of an H100", 450e9, 370 / 450, _NVLINK, _START,
                        "NVIDIA H100 datasheet, 900 GB/s both ways; NCCL's author on rings: nccl-tests issue 212"),
    "hdr": Link("InfiniBand HDR", 25e9, 24 / 25, _NET, _START,
                "200 Gbit/s; NCCL's author: nccl-tests issue 119"),
    "ndr": Link("InfiniBand NDR", 50e9, 47 / 50, _NET, _START,
                "400 Gbit/s; an NCCL developer, 46 to 48: nccl-tests issue 290"),
    "10gbe": Link("10 Gbit Ethernet", 1.25e9, _TCP, _NET, _START,
                  "10 Gbit/s; TCP's payload at best, frames of 1,500 bytes"),
    "25gbe": Link("25 Gbit Ethernet", 3.125e9, _TCP, _NET, _START,
                  "25 Gbit/s; TCP's payload at best, frames of 1,500 bytes"),
    "100gbe": Link("100 Gbit Ethernet", 12.5e9, _TCP, _NET, _START,
                   "100 Gbit/s; TCP's payload at best, frames of 1,500 bytes; one connection reaches less"),
}  # fmt: skip
"""By short name. NCCL has one hop for all networks; over TCP it is longer, so Ethernet's figures are the best case."""


@dataclass(frozen=True)
class Timing:
    """One collective of one size.

    Attributes:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        bytes: of the whole tensor: what goes into a reduction, what comes out of an all-gather.
        processes: that took part.
        seconds: of a call.
    """

    kind: str
    bytes: int
    processes: int
    seconds: float

    @property
    def sent(self) -> float:
        """Bytes that each process sends, over a ring."""
        return self.bytes * ring_share(self.kind, self.processes)

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second: of the whole tensor (nccl-tests' ``algbw``), and that each process sends (``busbw``)."""
        return {"algorithm_rate": self.bytes / self.seconds, "bus_rate": self.sent / self.seconds}


class Line(NamedTuple):
    """Seconds of a call that sends next to nothing, bytes a second of one that sends much."""

    latency: float
    rate: float

    def seconds(self, sent: float) -> float:
        """Of a call in which a process sends so many bytes."""
        return self.latency + sent / self.rate


def fit(timings: Iterable[Timing]) -> Line:
    """Lay a line through timings of a collective so that the sum of squared relative errors is least.

    Relative, as the seconds span three orders of magnitude: absolute errors would let the largest size decide alone.
    """
    # Least squares of latency * x + slope * y = 1, with x = 1 / t and y = sent / t.
    x, y = zip(*((1 / timing.seconds, timing.sent / timing.seconds) for timing in timings), strict=True)
    xx, yy, xy = (sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (y, y), (x, y)))
    latency, slope, both_over = sum(x) * yy - sum(y) * xy, sum(y) * xx - sum(x) * xy, xx * yy - xy * xy
    if latency < 0 or slope <= 0:  # no call was small, or the noise was larger than the sizes: through zero
        return Line(0.0, yy / sum(y))
    return Line(latency / both_over, both_over / slope)


def measured_link(timings: Iterable[Timing]) -> Link:
    """A link as ``cria doctor --collectives`` has found it, for as many processes and collectives of this kind."""
    line = fit(timings)
    return Link("measured", line.rate, 1.0, 0.0, line.latency, "measured here")


@dataclass(frozen=True)
class StepTime:
    """One optimizer step of one process.

    Attributes:
        compute: seconds it computes.
        calls: what is sent, and its seconds.
        hidden: seconds of these that pass while it computes.
    """

    compute: float
    calls: tuple[tuple[str, float], ...]
    hidden: float

    @property
    def communication(self) -> float:
        """Seconds of all calls."""
        return sum(seconds for _, seconds in self.calls)

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.compute + self.communication - self.hidden


def step_seconds(compute: float, calls: Iterable[Call], link: Link, overlap: float = 0.0) -> StepTime:
    """Put a step together.

    Args:
        compute: seconds that one process computes.
        calls: that it takes part in.
        link: that they cross.
        overlap: the part of the computing during which calls may be under way: under ddp at best the backward pass of
            the last micro-batch.
    """
    each = tuple((f"{call.kind}: {call.why}", link.seconds(call)) for call in calls)
    return StepTime(compute, each, min(overlap * compute, sum(seconds for _, seconds in each)))


def compute_seconds(recipe: Recipe, shape: Shape, card: Card, strategy: str, processes: int) -> float:
    """What one of N processes computes in a step of the whole run: its micro-batches, its part of the blocks.

    Raises:
        BadInput: if the model's heads do not divide.
    """
    if strategy == "pipeline":
        return _through_the_stages(recipe, shape, card, processes)
    parts = step_time.step(*local(recipe, shape, strategy, processes), card).parts
    pieces = processes if strategy == "fsdp" else 1  # in which the optimizer has its states
    return sum(part.seconds / (pieces if part.name == "optimizer" else 1) for part in parts)


def _through_the_stages(recipe: Recipe, shape: Shape, card: Card, processes: int) -> float:
    """Let all wait for the slowest stage: the first micro-batch goes through all, each next one through the slowest."""
    each = []
    stages = stages_of(recipe, shape, "pipeline", processes)
    for part in stages:
        parts = step_time.step(part.recipe, replace(shape, layers=part.shape.layers), card).parts
        each.append(sum(one.seconds for one in parts if part.has_head or one.name != "head and loss"))
    k = stages[0].recipe.tricks.gradient_accumulation
    return sum(each) / k + max(each) * (k - 1) / k


@dataclass(frozen=True)
class Point:
    """A number of processes, and what it brings.

    Attributes:
        processes: N.
        step: of one process.
        speedup: tokens a second, over those of one process.
    """

    processes: int
    step: StepTime
    speedup: float

    @property
    def efficiency(self) -> float:
        """Of N-fold speed, how much it is."""
        return self.speedup / self.processes


@dataclass(frozen=True)
class Scaling:
    """Doublings of the processes.

    Attributes:
        points: 1, 2, 4, ...
        stops: from how many on another doubling is not worth it; ``None`` if it always was.
        why: what stopped it.
    """

    points: tuple[Point, ...]
    stops: int | None
    why: str


def when_it_stops(
    recipe: Recipe, shape: Shape, card: Card, link: Link, strategy: str, traffic: Traffic, *,
    growing: bool = False, overlap: float = 0.0, gain: float = 1.5, most: int = 256,
) -> Scaling:  # fmt: skip
    """Double the processes as long as it helps.

    Args:
        recipe: the run on one card.
        shape: the model's.
        card: of each process.
        link: between them.
        strategy: ``ddp``, ``fsdp`` or ``tensor``.
        traffic: the strategy's, from a recipe, a shape and N to its calls.
        growing: let the window grow with N, so that a step sees N times the rows. Else the recipe's own is divided, its
            batch stays, and it ends where no micro-batch is left.
        overlap: see :func:`step_seconds`.
        gain: what a doubling must bring at least, in tokens a second.
        most: where to end.
    """
    window, points = recipe.tricks.gradient_accumulation, list[Point]()
    for n in (2**doublings for doublings in range(most.bit_length())):
        wanted = with_settings(recipe, [f"tricks.gradient_accumulation={window * n}"]) if growing else recipe
        if n > window and strategy != "tensor" and not growing:
            return Scaling(tuple(points), n // 2, f"the {window} micro-batches of a step are all given out")
        try:
            compute = compute_seconds(wanted, shape, card, strategy, n)
        except BadInput:
            return Scaling(tuple(points), n // 2, f"{n} does not divide the model's heads and widths")
        step = step_seconds(compute, traffic(wanted, shape, n) if n > 1 else [], link, overlap)
        work = n if growing else 1
        points.append(Point(n, step, work * points[0].step.seconds / step.seconds if points else 1.0))
        ratio = points[-1].speedup / points[-2].speedup if n > 1 else gain
        if ratio < gain:
            return Scaling(tuple(points), n // 2, f"{n} are {ratio:.2f} times as fast as {n // 2}")
    return Scaling(tuple(points), None, "each doubling helped")
