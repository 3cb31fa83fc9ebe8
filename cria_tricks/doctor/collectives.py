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
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput, Lost
from cria_tricks.predict.links import Timing, fit, measured_link, step_seconds
from cria_tricks.processes import numbers, world

SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))
"""Bytes of the tensors: 1 KiB to 64 MiB."""
SECONDS = 0.2
"""What the calls of one size may take together, and at least and at most how many they are."""
CALLS = (5, 100)
PATIENCE = 60.0
"""Seconds that a process waits for another."""
EMULATED = "reduce_scatter: gloo has none; torch makes it of an all-reduce, which sends twice what is counted here"


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


def predicted_and_measured(sizes: Sequence[int] = (3 * 2**20, 12 * 2**20, 48 * 2**20)) -> list[dict[str, float]]:
    """Hold the model against steps as data parallelism has them: products, then an all-reduce. In joined processes.

    The line is fitted to all-reduces of other sizes. The computing is timed with the smallest of them behind it, less
    its latency, as all wait for the slowest process. Everything is timed by turns.

    Args:
        sizes: bytes of the all-reduces.

    Returns:
        For each ``bytes``, ``compute``, ``predicted`` and ``measured`` seconds; the same in every process.
    """
    processes, matrix = dist.get_world_size(), torch.ones(512, 512)

    def work(products: int, size: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)
        dist.all_reduce(gradients[: size // 4])

    gradients, alone = torch.zeros(max(*sizes, *SIZES) // 4), [(0, size) for size in SIZES]
    turns = [*alone, *((4, size) for size in (4, *sizes))]
    seconds = iter(timed([partial(work, *turn) for turn in turns]))
    link = measured_link([Timing("all_reduce", size, processes, next(seconds)) for size in SIZES])
    compute, found = max(next(seconds) - link.start, 0.0), []
    for size, measured in zip(sizes, seconds, strict=True):
        step = step_seconds(compute, [Call("all_reduce", size, 1, processes, "gradients")], link)
        found.append({"bytes": size, "compute": compute, "predicted": step.seconds, "measured": measured})
    return found
