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

from cria_tricks.bill.calls import Call, ring_share
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import Card
from cria_tricks.models.shape import Shape
from cria_tricks.predict.per_process import local, stages_of
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import folds

StrategyTraffic = Callable[[Recipe, Shape, int], list[Call]]
"""The ``traffic`` function of a strategy: from a recipe, a shape and N to the calls of one process."""


@dataclass(frozen=True)
class Link:
    """A link that joins the processes, as one of them sees it, one way.

    Attributes:
        name: its name.
        peak: the rate it is sold as [bytes/s].
        reached: the part of the peak that collectives get [ratio].
        hop: the time from one process to the next [s].
        start: the time that every call takes before it sends [s].
        source: where the peak is from, then where the reached part is from.
    """

    name: str
    peak: float
    reached: float
    hop: float
    start: float
    source: str

    @property
    def rate(self) -> float:
        """The rate that collectives get [bytes/s]."""
        return self.peak * self.reached

    def seconds(self, call: Call) -> float:
        """Estimate the time that a call takes in one optimizer step, all its repetitions together [s]."""
        n = call.processes
        hops = {"all_reduce": 2 * (n - 1), "send": 1}.get(call.kind, n - 1)
        return call.times * (self.start + hops * self.hop) + call.sent / self.rate


# NCCL 2.30's constants for large calls over a ring [s], in src/graph/tuning.cc: the start of a call, and one hop over
# NVLink, over PCIe, and over a network.
_START = 8.4e-6
_NVLINK = 3.4e-6
_PCIE = 5.7e-6
_NET = 14.0e-6
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
"""Links by name. NCCL has one hop for all networks; over TCP it is longer, so Ethernet's figures are the best case."""


@dataclass(frozen=True)
class Timing:
    """The measured time of one collective of one size.

    Attributes:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        bytes: the size of the whole tensor: the input of a reduction, the output of an all-gather.
        processes: the number of processes that took part.
        seconds: the time of one call.
    """

    kind: str
    bytes: int
    processes: int
    seconds: float

    @property
    def sent(self) -> float:
        """How much each process sends over a ring [bytes]."""
        return self.bytes * ring_share(self.kind, self.processes)

    @property
    def rates(self) -> dict[str, float]:
        """The rates of nccl-tests [bytes/s]: of the whole tensor (``algbw``), of a process's bytes (``busbw``)."""
        return {"algorithm_rate": self.bytes / self.seconds, "bus_rate": self.sent / self.seconds}


class Line(NamedTuple):
    """A straight line through timings: the time of a small call [s], and the rate of a large one [bytes/s]."""

    latency: float
    rate: float

    def seconds(self, sent: float) -> float:
        """Estimate the time of a call in which a process sends so many bytes [s]."""
        return self.latency + sent / self.rate


def fit_line(timings: Iterable[Timing]) -> Line:
    """Lay a line through timings of a collective so that the sum of squared relative errors is least.

    Relative, as the seconds span three orders of magnitude: absolute errors would let the largest size decide alone.
    """
    timings = list(timings)
    one_size = len({timing.sent for timing in timings}) == 1  # through which many lines go
    # t = latency + slope * sent, divided by t: least squares of latency * x + slope * y = 1, x = 1 / t, y = sent / t.
    x = [1 / timing.seconds for timing in timings]
    y = [timing.sent / timing.seconds for timing in timings]
    xx = _dot(x, x)
    yy = _dot(y, y)
    xy = _dot(x, y)
    # Cramer's rule on the two normal equations: both unknowns are these numerators over one determinant.
    latency = sum(x) * yy - sum(y) * xy
    slope = sum(y) * xx - sum(x) * xy
    determinant = xx * yy - xy * xy
    if one_size or latency < 0 or slope <= 0:
        # No call was small, or the noise was larger than the differences: a line through zero, without a latency.
        return Line(0.0, yy / sum(y))
    return Line(latency / determinant, determinant / slope)


def _dot(a: list[float], b: list[float]) -> float:
    return sum(one * other for one, other in zip(a, b, strict=True))


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step of one process.

    Attributes:
        compute: the time it computes [s].
        calls: the name and the time [s] of each call.
        hidden: the time of calls that passes while it computes [s].
    """

    compute: float
    calls: tuple[tuple[str, float], ...]
    hidden: float

    @property
    def communication(self) -> float:
        """The time of all calls [s]."""
        return sum(seconds for _, seconds in self.calls)

    @property
    def seconds(self) -> float:
        """The time of the step [s]."""
        return self.compute + self.communication - self.hidden


def step_seconds(compute: float, calls: Iterable[Call], link: Link, overlap: float = 0.0) -> StepTime:
    """Put a step together.

    Args:
        compute: the time that one process computes [s].
        calls: the calls that it takes part in.
        link: the link that they cross.
        overlap: the part of the computing during which calls may be under way: under ddp at best the backward pass of
            the last micro-batch.
    """
    each = tuple((f"{call.kind}: {call.why}", link.seconds(call)) for call in calls)
    return StepTime(compute, each, min(overlap * compute, sum(seconds for _, seconds in each)))


def compute_seconds(recipe: Recipe, shape: Shape, card: Card, strategy: str, processes: int) -> float:
    """Estimate how long one of N processes computes in an optimizer step of the whole run [s].

    Raises:
        BadInput: if the model's heads do not divide.
    """
    if strategy == "pipeline":
        return _through_the_stages(recipe, shape, card, processes)
    own_recipe, own_shape = local(recipe, shape, strategy, processes)
    total = 0.0
    for part in folds.step(own_recipe, own_shape, card).parts:
        if part.name == "optimizer" and strategy == "fsdp":
            total += part.seconds / processes  # each process steps its own 1 / N of the weights only
        else:
            total += part.seconds
    return total


def _through_the_stages(recipe: Recipe, shape: Shape, card: Card, processes: int) -> float:
    """Let all wait for the slowest stage: the first micro-batch goes through all, each next one through the slowest."""
    micro_batches = []
    optimizers = []
    stages = stages_of(recipe, shape, "pipeline", processes)
    k = stages[0].recipe.tricks.gradient_accumulation
    for stage in stages:
        parts = folds.step(stage.recipe, replace(shape, layers=stage.shape.layers), card).parts
        seconds = {one.name: one.seconds for one in parts if stage.has_head or one.name != "head and loss"}
        optimizers.append(seconds.pop("optimizer"))  # it runs once, after all micro-batches
        micro_batches.append(sum(seconds.values()) / k)
    return sum(micro_batches) + max(micro_batches) * (k - 1) + max(optimizers)


@dataclass(frozen=True)
class ScalingPoint:
    """A number of processes, and the speed that it reaches.

    Attributes:
        processes: the number of processes, N.
        step: the time of a step of one process.
        speedup: tokens a second over those of a single process [ratio].
    """

    processes: int
    step: StepTime
    speedup: float

    @property
    def efficiency(self) -> float:
        """The part of N-fold speed that is reached [ratio]."""
        return self.speedup / self.processes


@dataclass(frozen=True)
class Scaling:
    """The speed with 1, 2, 4, ... processes, and where doubling stops to help.

    Attributes:
        points: one entry for each number of processes.
        stops: the number of processes from which another doubling is not worth it; ``None`` if it always was.
        why: the reason.
    """

    points: tuple[ScalingPoint, ...]
    stops: int | None
    why: str


def when_it_stops(
    recipe: Recipe, shape: Shape, card: Card, link: Link, strategy: str, traffic: StrategyTraffic, *,
    growing: bool = False, overlap: float = 0.0, gain: float = 1.5, most: int = 256,
) -> Scaling:  # fmt: skip
    """Double the processes as long as it helps.

    Args:
        recipe: the run on one card.
        shape: the shape of the model.
        card: the card of each process.
        link: the link between them.
        strategy: ``ddp``, ``fsdp`` or ``tensor``.
        traffic: the strategy's function from a recipe, a shape and N to its calls.
        growing: let the window grow with N, so that a step sees N times the rows. Else the recipe's own is divided, its
            batch stays, and it ends where no micro-batch is left.
        overlap: see :func:`step_seconds`.
        gain: how many times as many tokens a second a doubling must bring at least [ratio].
        most: the largest number of processes that is tried.
    """
    window = recipe.tricks.gradient_accumulation
    alone = step_seconds(compute_seconds(recipe, shape, card, strategy, 1), [], link, overlap)
    points = [ScalingPoint(1, alone, 1.0)]

    def stopped(why: str) -> Scaling:
        return Scaling(tuple(points), points[-1].processes, why)

    n = 2
    while n <= most:
        wanted = recipe
        work = 1  # rows of a step, over those of a step of one process
        if growing:
            wanted = with_settings(recipe, [f"tricks.gradient_accumulation={window * n}"])
            work = n
        elif n > window and strategy != "tensor":
            # All but tensor parallelism share out whole micro-batches, and there are no more of them.
            return stopped(f"the {window} micro-batches of a step are all given out")
        try:
            compute = compute_seconds(wanted, shape, card, strategy, n)
        except BadInput:
            return stopped(f"{n} does not divide the model's heads and widths")
        step = step_seconds(compute, traffic(wanted, shape, n), link, overlap)
        speedup = work * alone.seconds / step.seconds
        ratio = speedup / points[-1].speedup
        points.append(ScalingPoint(n, step, speedup))
        if ratio < gain:
            return Scaling(tuple(points), n // 2, f"{n} are {ratio:.2f} times as fast as {n // 2}")
        n *= 2
    return Scaling(tuple(points), None, "each doubling helped")
