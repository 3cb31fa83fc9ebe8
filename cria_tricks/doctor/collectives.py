r"""Measure how fast processes exchange data by the collectives all-reduce, all-gather and reduce-scatter.

The report gives two bandwidths for each measurement, as nccl-tests defines them (its ``doc/PERFORMANCE.md``). The
algorithm bandwidth is the size of the whole tensor, divided by the time of a call. The bus bandwidth is what each
process sends, divided by the same time. It can be compared with the rate that a link is sold as, because it counts
the bytes that cross the link. Of N processes, each sends 2 (N - 1) / N of the tensor in an all-reduce, and half of
that in the two others.

The times of each collective at all sizes are fitted by a straight line, t = latency + sent / rate
(``predict/links.py``). The latency decides the time of a small call, the rate that of a large one.

The counts of sent bytes are those of the ring algorithm (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69, sec. 3). ``parallel/ring_collectives.py``
implements it.
"""

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from cria_tricks.common.errors import BadInput, Lost
from cria_tricks.predict.links import Timing, fit_line
from cria_tricks.processes import numbers, world

SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))
"""The sizes of the tensors that are measured: 1 KiB to 64 MiB [bytes]. There are fewer small ones, because there the
latency decides and the size hardly matters."""
SECONDS = 0.2
"""The planned time for all calls of one collective at one size [s]. A round calls each of the three once, so this holds
for their mean."""
FEWEST_CALLS = 5
MOST_CALLS = 100
"""The number of timed calls of one collective at one size lies between these two."""
PATIENCE = 60.0
"""The time after which a process that waits for another one gives up [s]."""
EMULATED = "reduce_scatter: gloo has none; torch makes it of an all-reduce, which sends twice what is counted here"


def measure(sizes: Iterable[int] = SIZES, device: str = "cpu") -> list[Timing]:
    """Time the three collectives at each size, in processes that have joined.

    Every process must call it, because a collective waits for all processes. Every process gets the same timings.

    Args:
        sizes: the sizes of the tensors [bytes]. A size that does not divide evenly among the processes is rounded down.
        device: ``"cpu"`` to measure gloo, ``"cuda"`` to measure NCCL.
    """
    processes = dist.get_world_size()
    found = []
    for size in sizes:
        elements = max(size // 4 // processes, 1)  # fp32 elements, of 4 bytes, in the piece of each process
        whole = torch.zeros(elements * processes, device=device)
        piece = torch.zeros(elements, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, piece),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, piece, whole),
        }
        seconds = timed(list(calls.values()), device)
        for kind, taken in zip(calls, seconds, strict=True):
            found.append(Timing(kind, whole.nbytes, processes, taken))
    return found


def timed(calls: Sequence[Callable[[], Any]], device: str = "cpu") -> list[float]:
    """Return the time of each call [s]: the median over its repetitions, averaged over all processes.

    All processes must make the same calls. In each round every call is made once, so that a machine that slows down
    for a while slows down all calls, and not only one.
    """

    def seconds(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for call in calls:
        seconds(call)  # warm-up: the first call connects the processes and allocates buffers
    slowest = torch.tensor([seconds(call) for call in calls], dtype=torch.float64)
    # The maximum over all processes, so that every process computes the same number of rounds. This tensor is on the
    # CPU also when NCCL is measured, because processes/world.py joins processes by gloo for such tensors in any case.
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rounds = int(SECONDS * len(calls) / slowest.sum().item())
    rounds = min(max(rounds, FEWEST_CALLS), MOST_CALLS)
    spent: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for own, call in zip(spent, calls, strict=True):
            own.append(seconds(call))
    medians = torch.tensor([statistics.median(own) for own in spent], dtype=torch.float64)
    dist.all_reduce(medians)
    return (medians / dist.get_world_size()).tolist()


def examine(processes: int | None = None, sizes: Sequence[int] = SIZES) -> dict[str, Any] | None:
    """Start processes and measure between them; under a launcher, measure between the processes that it has started.

    Args:
        processes: how many processes to start; when left out, one per GPU, and at least two. Under a launcher it must
            be left out, or be the launcher's number.
        sizes: the sizes of the tensors [bytes].

    Returns:
        The dictionary of :func:`report`. Under a launcher only rank 0 gets it, and all other processes get ``None``.

    Raises:
        BadInput: for fewer than two processes, or for another number than the launcher's.
        Lost: if a process dies.
    """
    launched = numbers.processes()
    if launched > 1:
        if processes not in (None, launched):
            raise BadInput(f"--nproc {processes}: a launcher has started {launched} processes; leave --nproc out")
        # Both are read before the processes join: the device must be chosen first, and while they are joined, the
        # launcher's variables are hidden.
        rank = numbers.rank()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", launched))
        found = _in_each(_device_for(here), sizes)
        return found if rank == 0 else None
    if processes is None:
        processes = max(torch.cuda.device_count(), 2)
    if processes < 2:
        raise BadInput(f"--nproc {processes}: one process has nobody to talk to; give 2 or more")
    return _start(processes, _device_for(processes), sizes)


def _device_for(processes: int) -> str:
    """Choose ``"cuda"`` if this machine has a GPU for each of these processes, else ``"cpu"``."""
    return "cuda" if torch.cuda.device_count() >= processes else "cpu"


def _start(processes: int, device: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Start processes with torchrun's own launcher, and return the result of rank 0."""
    # Imported here, because the launcher takes a while to import, and only this way of measuring needs it.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    # Silence the launcher's reports of many lines, because Lost says it in one. The second logger has its own level.
    for each in ("", ".agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic{each}").setLevel(logging.CRITICAL)
    # As torchrun --standalone does: port 0 means any free port.
    meet: dict[str, Any] = {"run_id": "collectives", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, processes, **meet, max_restarts=0, monitor_interval=0.1)
    try:
        return elastic_launch(config, _in_each)(device, sizes)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        why = failure.message
        if isinstance(why, dict):  # the process could still write its error to a file, as record does
            why = why["message"]
        raise Lost(f"process {rank} of {processes} died while collectives were measured: {why}") from None
    except SignalException:  # torch's launcher turns Ctrl-C and SIGTERM into this
        raise KeyboardInterrupt from None


@record  # writes an exception to a file, so that the launcher learns why a process has died
def _in_each(device: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Join the other processes, measure, and return the report; every process runs this."""
    torch.set_num_threads(1)  # the processes share the cores of this machine
    # torch 2.13 has new names for two of the collectives, and warns about the old ones.
    warnings.filterwarnings("ignore", category=FutureWarning)
    with world.joined(timeout=PATIENCE):
        timings = measure(sizes, device)
        return report(timings, "nccl" if device == "cuda" else "gloo")


def report(timings: Sequence[Timing], backend: str) -> dict[str, Any]:
    """Return timings, and the lines fitted to them, as plain data.

    Returns:
        - ``backend`` and ``processes``, the number of processes;
        - ``collectives``: each :class:`Timing`, with its two bandwidths;
        - ``lines``: by kind of collective, the fitted ``latency`` [s], ``rate`` [bytes/s], largest relative ``error``;
        - ``notes``: what a reader must know to understand the numbers.
    """
    lines: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(timing.kind for timing in timings):
        own = [timing for timing in timings if timing.kind == kind]
        line = fit_line(own)
        error = max(abs(line.seconds(timing.sent) / timing.seconds - 1) for timing in own)
        lines[kind] = {**line._asdict(), "error": error}
    return {
        "backend": backend,
        "processes": timings[0].processes,
        "collectives": [asdict(timing) | timing.rates for timing in timings],
        "lines": lines,
        "notes": [EMULATED] if backend == "gloo" else [],
    }
