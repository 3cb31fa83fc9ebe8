r"""Estimate when more GPUs stop helping: the time of a step follows from its bytes and the link that they cross.

A collective takes t = start + hops * hop + sent / rate: the fixed time of a call, the latency of each hop from one
process to the next, and the bytes that a process sends, divided by the rate of the link. An all-reduce over a ring of N
processes has 2 (N - 1) hops, and each process sends 2 (N - 1) / N times the tensor. An all-gather and a reduce-scatter
have half of both. So with a larger N the bytes that a process sends hardly grow, the hops do grow, and the work of each
process shrinks. Therefore, at some N, doubling N gains almost nothing.

The time of the collectives is added to the computing time. What a strategy can hide behind the backward pass is given
as ``overlap``. The computing time is the estimate of ``bill/step_time.py`` for the work of one process, the middle of a
range. The N at which more GPUs stop helping is no better known.

One link stands for all: where a ring crosses several links, take the slowest. Between machines the ports of a machine
add up (:meth:`Link.over`), because NCCL lays a ring through each of them. This needs NVLink inside the machines: over
PCIe several ports help little (NCCL's author: nccl issue 412).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cria_tricks.bill import step_time
from cria_tricks.bill.calls import Call
from cria_tricks.bill.step_time import HEAD
from cria_tricks.hardware.cards import Card
from cria_tricks.models.shape import Shape
from cria_tricks.predict.per_process import local, stages_of, stream_pieces
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds


@dataclass(frozen=True)
class Link:
    """A link between processes, as one of them sees it, in one direction; between machines, one port of each machine.

    Attributes:
        name: its name.
        peak: the advertised rate [bytes/s].
        reached: the share of the peak that collectives reach [ratio].
        hop: the latency from one process to the next [s].
        start: the fixed time of every call, before it sends anything [s].
        source: the source of the peak, then the source of the reached share.
    """

    name: str
    peak: float
    reached: float
    hop: float
    start: float
    source: str

    @property
    def rate(self) -> float:
        """The rate that collectives reach [bytes/s]."""
        return self.peak * self.reached

    def over(self, ports: float) -> "Link":
        """Return the link of a ring that has so many ports of each machine; 1/2 if two groups share a port.

        If each card has a port, a ring has as many as it has cards in a machine. A single send has one at most.
        """
        return replace(self, peak=self.peak * ports, reached=self.reached * (_TOGETHER if ports > 1 else 1))

    def seconds(self, call: Call) -> float:
        """Estimate the time that a call takes in one optimizer step, all its repetitions together [s]."""
        n = call.processes
        # An all-reduce goes around the ring twice: N - 1 hops to add up, and N - 1 to distribute the sum.
        hops = {"all_reduce": 2 * (n - 1), "send": 1}.get(call.kind, n - 1)
        return call.times * (self.start + hops * self.hop) + call.sent / self.rate


_TOGETHER = 86 / (4 * 24)
"""What several ports of a machine reach together, of the sum of what each reaches alone [ratio]: two machines of eight
A100s reached 86 GB/s over four HDR ports each, and 24 over one (measured: nccl-tests issue 175, nccl issue 1048)."""

# NCCL 2.30's constants for large calls over a ring (its protocol Simple) [s], from src/graph/tuning.cc: the start of a
# call, and one hop over NVLink, over PCIe and over a network. For small calls NCCL takes the protocol LL, which starts
# after 6.6e-6 and hops in 0.6e-6, 1.0e-6 and 2.7e-6, at a lower rate. So small calls take less than these say.
_START = 8.4e-6
_NVLINK = 3.4e-6
_PCIE = 5.7e-6
_NET = 14.0e-6
_TCP = 1448 / 1538
"""The payload of a full Ethernet frame [ratio]: of its 1,538 bytes on the wire, 1,448 are data. The others are the
headers of the frame, of IP and of TCP with timestamps."""

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
    "10gbe": Link("10 Gbit Ethernet", 1.25e9, _TCP, _NET, _START,
                  "10 Gbit/s; TCP's payload at best, frames of 1,500 bytes"),
}  # fmt: skip
"""Links by name. NCCL has one hop latency for all networks. A hop over TCP takes longer, so the figures for Ethernet
are the best case. Those for PCIe presume that cards copy to each other directly (peer-to-peer). In a virtual machine
this may be slow, or NCCL copies through the host's memory (NCCL's user guide, troubleshooting)."""


@dataclass(frozen=True)
class ProcessTime:
    """The time of one optimizer step of one process.

    Attributes:
        compute: the computing time [s].
        calls: the name and the time [s] of each collective.
        hidden: the part of the collectives' time that passes while the process computes [s].
    """

    compute: float
    calls: tuple[tuple[str, float], ...]
    hidden: float

    @property
    def communication(self) -> float:
        """The time of all collectives [s]."""
        return sum(seconds for _, seconds in self.calls)

    @property
    def seconds(self) -> float:
        """The time of the step [s]."""
        return self.compute + self.communication - self.hidden


def step_seconds(compute: float, calls: Iterable[Call], link: Link, overlap: float = 0.0) -> ProcessTime:
    """Combine the computing time and the collectives of a step.

    Args:
        compute: the time that one process computes [s].
        calls: the collectives that it takes part in.
        link: the link that they cross.
        overlap: the share of the computing time during which collectives may run [ratio]: under ddp, at best, the
            share of the last micro-batch's backward pass.
    """
    each = tuple((f"{call.kind}: {call.why}", link.seconds(call)) for call in calls)
    return ProcessTime(compute, each, min(overlap * compute, sum(seconds for _, seconds in each)))


def compute_seconds(recipe: Recipe, shape: Shape, card: Card, strategy: str, processes: int) -> float:
    """Estimate how long one of N processes computes in an optimizer step of the whole run [s].

    Raises:
        BadInput: if the strategy cannot divide the model among so many processes.
    """
    if strategy == "pipeline":
        return _through_the_stages(recipe, shape, card, processes)
    own_recipe, own_shape = local(recipe, shape, strategy, processes)
    own = folds.step_of(own_recipe, own_shape, card.device)
    own = replace(own, stream_pieces=stream_pieces(recipe, strategy, processes))
    total = 0.0
    # The ring repeats keys and values itself, for a kernel that takes no grouped heads (parallel/ring_attention.py).
    repeated = with_settings(recipe, ["tricks.expand_kv=true"]) if strategy == "context" else recipe
    whole = folds.time_of(repeated, shape, card)
    for part in step_time.time_of(own, card).parts:
        if part.name == "optimizer" and strategy == "fsdp":
            total += part.seconds / processes  # each process updates only its own 1 / N of the weights
        elif part.name == "attention" and strategy == "context":
            # A process has 1 / N of the queries, and these see as many keys as in one process.
            total += sum(one.seconds for one in whole.parts if one.name == "attention") / processes
        else:
            total += part.seconds
    return total


def _through_the_stages(recipe: Recipe, shape: Shape, card: Card, processes: int) -> float:
    """Estimate how long a pipeline computes in a step [s].

    The first micro-batch passes through all stages. Each of the k - 1 others comes out later by the time that the
    slowest stage takes for one. The optimizer runs once, at the end.
    """
    micro_batches = []
    optimizers = []
    stages = stages_of(recipe, shape, "pipeline", processes)
    k = stages[0].recipe.tricks.gradient_accumulation
    for stage in stages:
        parts = folds.time_of(stage.recipe, replace(shape, layers=stage.shape.layers), card).parts
        seconds = {one.name: one.seconds for one in parts if stage.has_head or one.name not in HEAD}
        optimizers.append(seconds.pop("optimizer"))  # it runs once, after all micro-batches
        micro_batches.append(sum(seconds.values()) / k)
    return sum(micro_batches) + max(micro_batches) * (k - 1) + max(optimizers)
