r"""Collectives, measured: what an all-reduce, an all-gather and a reduce-scatter take between this machine's processes.

Two bandwidths are given, as nccl-tests defines them (its ``doc/PERFORMANCE.md``). The algorithm bandwidth is the bytes
of the whole tensor over the seconds. The bus bandwidth is what each process sends over the seconds, so it can be held
against what a link is sold as: an all-reduce sends 2 (N - 1) / N of the tensor, the two others half of that.

Each collective gets a straight line through its sizes, t = latency + sent / rate: the first term is what a small call
costs, the second what a large one does. ``links.py`` predicts steps with it.

The reference is the ring that these counts are from (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", J. Parallel Distrib. Comput. 69, sec. 3): an all-reduce of sends and receives alone.
"""

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from cria_tricks.errors import BadInput, Lost
from cria_tricks.parallel import numbers, world
from cria_tricks.parallel.traffic import ring_share

SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))
"""Bytes of the tensors: 1 KiB to 64 MiB."""
SECONDS = 0.2
"""What the calls of one size may take together, and at least and at most how many they are."""
CALLS = (5, 100)
PATIENCE = 60.0
"""Seconds that a process waits for another."""
EMULATED = "reduce_scatter: gloo has none; torch makes it of an all-reduce, which sends twice what is counted here"


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Add a tensor up over all processes, in place, with nothing but sends and receives.

    Every process sends 2 (N - 1) / N of the tensor, contiguous, of any shape, the same everywhere.
    """
    pieces = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    ring_reduce_scatter(pieces)
    ring_all_gather(pieces)


def ring_reduce_scatter(pieces: Sequence[torch.Tensor]) -> None:
    """N - 1 times: send a piece to the right, and add what comes from the left to one's own.

    The sum of a piece goes round and grows. At the end piece r + 1 of process r is complete, of N, in place.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size - 1):
        mine, growing = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        received = torch.empty_like(growing)
        _exchange(mine, received)
        growing += received


def ring_all_gather(pieces: Sequence[torch.Tensor]) -> None:
    """N - 1 times: send on the complete piece that came last; the first is one's own, r + 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size - 1):
        _exchange(pieces[(rank + 1 - step) % size], pieces[(rank - step) % size])


def _exchange(to_the_right: torch.Tensor, from_the_left: torch.Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Both at once: if all processes first sent and then received, none would ever receive.
    send = dist.P2POp(dist.isend, to_the_right, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, from_the_left, (rank - 1) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


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


def measure(sizes: Iterable[int] = SIZES, device: str = "cpu") -> list[Timing]:
    """Time the three collectives, in processes that have joined; all must call it, and all get the same.

    Args:
        sizes: bytes; one that N does not divide becomes a little smaller.
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL.
    """
    processes, found = dist.get_world_size(), []
    for size in sizes:
        elements = max(size // 4 // processes, 1)
        whole, piece = torch.zeros(elements * processes, device=device), torch.zeros(elements, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, piece),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, piece, whole),
        }
        seconds = timed(list(calls.values()), device)
        found += [Timing(kind, whole.nbytes, processes, s) for kind, s in zip(calls, seconds, strict=True)]
    return found


def timed(calls: Sequence[Callable[[], Any]], device: str = "cpu") -> list[float]:
    """Seconds of what all processes do together: the median of a process's calls, and of these medians the mean.

    The calls take turns, so that a machine that slows down for a while slows them all.
    """

    def seconds(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for call in calls:
        seconds(call)  # connects, and allocates
    slowest = torch.tensor([seconds(call) for call in calls], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all make as many
    count = min(max(int(SECONDS * len(calls) / slowest.sum().item()), CALLS[0]), CALLS[1])
    spent = [[seconds(call) for call in calls] for _ in range(count)]
    medians = torch.tensor([statistics.median(column) for column in zip(*spent, strict=True)], dtype=torch.float64)
    dist.all_reduce(medians)
    return (medians / dist.get_world_size()).tolist()


def examine(processes: int | None = None, sizes: Sequence[int] = SIZES) -> dict[str, Any] | None:
    """Measure between processes that are started for it, or those that a launcher has started.

    Args:
        processes: how many to start; one a card, or two, when left out. A launcher has its own number.
        sizes: bytes of the tensors.

    Returns:
        :func:`report`'s; ``None`` in all processes of a launcher but the first.

    Raises:
        BadInput: for fewer than two processes, or another number than a launcher's.
        Lost: if a process has died.
    """
    cards, launched = torch.cuda.device_count(), numbers.processes()
    if launched > 1:
        if processes not in (None, launched):
            raise BadInput(f"--nproc {processes}: a launcher has started {launched} processes; leave --nproc out")
        first, here = numbers.rank() == 0, int(os.environ.get("LOCAL_WORLD_SIZE", launched))
        found = _in_each("cuda" if cards >= here else "cpu", sizes)
        return found if first else None
    processes = (cards if cards > 1 else 2) if processes is None else processes
    if processes < 2:
        raise BadInput(f"--nproc {processes}: one process has nobody to talk to; give 2 or more")
    return _start(processes, "cuda" if cards >= processes else "cpu", sizes)


def _start(processes: int, device: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Start processes with torchrun's own launcher, and take the first one's answer."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    for each in ("", ".agent.server.api"):  # what they say in many lines is said in one; the second has its own level
        logging.getLogger(f"torch.distributed.elastic{each}").setLevel(logging.CRITICAL)
    meet: dict[str, Any] = {"run_id": "collectives", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, processes, **meet, max_restarts=0, monitor_interval=0.1)
    try:
        return elastic_launch(config, _in_each)(device, sizes)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        why = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        raise Lost(f"process {rank} of {processes} died while collectives were measured: {why}") from None
    except SignalException:
        raise KeyboardInterrupt from None


@record  # so that the launcher learns why one has died
def _in_each(device: str, sizes: Sequence[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has new names for two of the functions
    with world.joined(timeout=PATIENCE):
        return report(measure(sizes, device), "nccl" if device == "cuda" else "gloo")


def report(timings: Sequence[Timing], backend: str) -> dict[str, Any]:
    """Timings and their lines as plain data.

    ``backend``, ``processes``, ``collectives`` (each a :class:`Timing` with its rates), ``lines`` (by kind ``latency``,
    ``rate`` and ``error``, the largest relative one), and ``notes``.
    """
    lines: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(timing.kind for timing in timings):
        own = [timing for timing in timings if timing.kind == kind]
        line = fit(own)
        error = max(abs(line.seconds(timing.sent) / timing.seconds - 1) for timing in own)
        lines[kind] = {**line._asdict(), "error": error}
    return {
        "backend": backend,
        "processes": timings[0].processes,
        "collectives": [asdict(timing) | timing.rates for timing in timings],
        "lines": lines,
        "notes": [EMULATED] if backend == "gloo" else [],
    }
