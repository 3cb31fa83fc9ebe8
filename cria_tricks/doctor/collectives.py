r"""Measure the collectives all-reduce, all-gather and reduce-scatter between this machine's processes.

Two bandwidths are given, as nccl-tests defines them (its ``doc/PERFORMANCE.md``). The algorithm bandwidth is the bytes
of the whole tensor over the seconds. The bus bandwidth is what each process sends over the seconds, so it can be held
against what a link is sold as: an all-reduce sends 2 (N - 1) / N of the tensor, the two others half of that.

Each collective gets a straight line through its sizes, t = latency + sent / rate (``predict/links.py``): a small call
takes the first term, a large one the second.

The counts of sent bytes are those of a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", J. Parallel Distrib. Comput. 69, sec. 3); ``parallel/ring_collectives.py`` builds it.
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
"""The sizes of the tensors: 1 KiB to 64 MiB [bytes]."""
SECONDS = 0.2
"""The time that the calls of one size may take together [s]."""
FEWEST_CALLS = 5
MOST_CALLS = 100
PATIENCE = 60.0
"""The time that a process waits for another [s]."""
EMULATED = "reduce_scatter: gloo has none; torch makes it of an all-reduce, which sends twice what is counted here"


def measure(sizes: Iterable[int] = SIZES, device: str = "cpu") -> list[Timing]:
    """Time the three collectives, in processes that have joined; all must call it, and all get the same.

    Args:
        sizes: the sizes of the tensors [bytes]; one that N does not divide becomes a little smaller.
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL.
    """
    processes = dist.get_world_size()
    found = []
    for size in sizes:
        elements = max(size // 4 // processes, 1)  # fp32 elements of each process
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
    """Time calls that all processes make together [s]: the median of each process, and the mean of these medians.

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
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that every process makes the same number of calls
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
    """Measure between processes that are started for it, or those that a launcher has started.

    Args:
        processes: how many to start; one a card, or two, when left out. A launcher has its own number.
        sizes: the sizes of the tensors [bytes].

    Returns:
        The dictionary of :func:`report`; ``None`` in all processes of a launcher but rank 0.

    Raises:
        BadInput: for fewer than two processes, or another number than a launcher's.
        Lost: if a process has died.
    """
    launched = numbers.processes()
    if launched > 1:
        if processes not in (None, launched):
            raise BadInput(f"--nproc {processes}: a launcher has started {launched} processes; leave --nproc out")
        rank = numbers.rank()  # asked before the processes part again
        here = int(os.environ.get("LOCAL_WORLD_SIZE", launched))
        found = _in_each(_device_for(here), sizes)
        return found if rank == 0 else None
    if processes is None:
        processes = max(torch.cuda.device_count(), 2)
    if processes < 2:
        raise BadInput(f"--nproc {processes}: one process has nobody to talk to; give 2 or more")
    return _start(processes, _device_for(processes), sizes)


def _device_for(processes: int) -> str:
    """Choose cards if each process of this machine can have one."""
    return "cuda" if torch.cuda.device_count() >= processes else "cpu"


def _start(processes: int, device: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Start processes with torchrun's own launcher, and take the first one's answer."""
    # Only this way of measuring needs a launcher, which takes a while to import.
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
        why = failure.message
        if isinstance(why, dict):  # of a process that could still write its error down
            why = why["message"]
        raise Lost(f"process {rank} of {processes} died while collectives were measured: {why}") from None
    except SignalException:
        raise KeyboardInterrupt from None


@record  # so that the launcher learns why one has died
def _in_each(device: str, sizes: Sequence[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has new names for two of the functions
    with world.joined(timeout=PATIENCE):
        timings = measure(sizes, device)
        return report(timings, "nccl" if device == "cuda" else "gloo")


def report(timings: Sequence[Timing], backend: str) -> dict[str, Any]:
    """Write timings, and the lines through them, as plain data.

    Returns:
        ``backend``, ``processes``, ``collectives`` (each a :class:`Timing` with its rates), ``lines`` (by kind
        ``latency``, ``rate`` and ``error``, the largest relative one), and ``notes``.
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
