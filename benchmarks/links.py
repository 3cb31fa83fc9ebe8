"""The links' model of a step's time, against steps of two processes that are joined by gloo.

``python -m benchmarks.links`` first measures the collectives between the two processes, and fits a line to each. A
step of a strategy should then take what one process computes, plus
the time of its calls on these lines (``predict/links.py``). What it computes is measured without any communication,
in both processes at once, because they share the memory's bandwidth. The real steps are timed in between, by turns.

Nothing else may run on the machine. Writes ``benchmarks/results/cpu/links.json``.
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks import common
from benchmarks.per_process import SETTINGS, WIDTHS, adamw, made, prepared, saved, shares
from cria_tricks.bench.case import stamp
from cria_tricks.bill.calls import Call, ring_share
from cria_tricks.course.processes import Ranks
from cria_tricks.load import losses
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models.shape import shape_of
from cria_tricks.parallel import STRATEGIES
from cria_tricks.predict.links import ProcessTime
from cria_tricks.recipe import Recipe, with_settings

PROCESSES = 2
TOKENS = 256
ROUNDS = 7
"""Steps of each kind; the median counts."""
SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))
"""The tensors whose collectives are measured: 1 KiB to 64 MiB [bytes]. There are fewer small ones, because there the
latency decides and the size hardly matters."""
CALLS = 20
"""Timed calls of each collective at each size; the median counts."""
SHAPES = {
    "whole": WIDTHS["smollm2"],
    # What one of two processes has of each block under tensor parallelism.
    "halves": WIDTHS["smollm2"]
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 72, "intermediate_size": 768},
}
CASES = tuple(itertools.product(("ddp", "fsdp", "tensor"), ("LoRA", "all weights")))
"""A strategy, and the name of the settings."""


@dataclass(frozen=True)
class Timing:
    """The measured time of one collective of one size.

    Attributes:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        bytes: the size of the whole tensor [bytes]: the input of a reduction, the output of an all-gather.
        processes: the number of processes that took part.
        seconds: the time of one call [s].
    """

    kind: str
    bytes: int
    processes: int
    seconds: float

    @property
    def sent(self) -> float:
        """How much each process sends over a ring [bytes]."""
        return self.bytes * ring_share(self.kind, self.processes)


class FittedLine(NamedTuple):
    """A straight line fitted to timings: the time of a small call [s], and the rate of a large one [bytes/s]."""

    latency: float
    rate: float


def fit_line(timings: Iterable[Timing]) -> FittedLine:
    """Fit a line to timings of a collective, by least squares of the relative errors.

    The errors are relative because the times span three orders of magnitude: with absolute errors the largest size
    alone would decide.
    """
    points = [(timing.sent, timing.seconds) for timing in timings]
    sent, seconds = np.array(points).T
    # Of predicted / measured = (latency + slope * sent) / seconds = 1.
    per_second = np.stack([1 / seconds, sent / seconds], axis=1)
    latency, slope = np.linalg.lstsq(per_second, np.ones(len(points)))[0]
    if len(set(sent)) == 1 or latency < 0 or slope <= 0:
        # No call was small, or the noise was larger than the differences: fit a line through zero, without a latency.
        through_zero = sent / seconds
        return FittedLine(0.0, float(through_zero @ through_zero / through_zero.sum()))
    return FittedLine(float(latency), float(1 / slope))


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds of a step that all processes begin together."""
    dist.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measured_collectives(sizes: Iterable[int] = SIZES) -> list[Timing]:
    """Time three collectives at each size; every process must call it, and every process gets the same timings.

    A size that does not divide evenly among the processes is rounded down.
    """
    processes = dist.get_world_size()
    found = []
    for size in sizes:
        elements = max(size // 4 // processes, 1)  # fp32 elements, of 4 bytes, in the piece of each process
        whole = torch.zeros(elements * processes)
        piece = torch.zeros(elements)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, piece),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, piece, whole),
        }
        spent: dict[str, list[float]] = {kind: [] for kind in calls}
        for _ in range(CALLS + 1):
            # Each round makes every call once, so that a machine that slows down for a while slows down all of them.
            for kind, call in calls.items():
                spent[kind].append(timed(call))
        for kind, seconds in spent.items():
            own = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64)  # the first call connects
            dist.all_reduce(own)
            found.append(Timing(kind, whole.nbytes, processes, own.item() / processes))
    return found


def both(
    folder: Path, of_one: Path, strategy: str, settings: Sequence[str], micro_batches: int
) -> tuple[float, float, float]:
    """Return the seconds of a step, of this process's own passes without communication, and of its own optimizer."""
    model, _, optimizer, micro_batch = made(folder, strategy, shares(strategy, PROCESSES), settings)
    plan, alone = prepared(of_one, *settings)
    total = losses.LossSum(alone, losses.find(plan, contextlib.nullcontext))
    own = adamw(alone)
    ids = torch.arange(TOKENS)[None]

    def shared_step() -> None:
        for number in range(micro_batches):
            micro_batch(TOKENS, number == micro_batches - 1)
        optimizer.step()
        model.zero_grad()

    def passes() -> None:
        for _ in range(micro_batches):
            total({"input_ids": ids, "labels": ids}).backward()

    def update() -> None:
        own.step()
        alone.zero_grad(set_to_none=False)

    kinds = {"shared": shared_step, "passes": passes, "update": update}
    for step in kinds.values():
        step()  # allocates states and buffers
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, step in kinds.items():
            seconds[kind].append(timed(step))
    shared, of_passes, of_update = (statistics.median(of_kind) for of_kind in seconds.values())
    return shared, of_passes, of_update


def time_of(call: Call, lines: dict[str, FittedLine]) -> float:
    """Return the seconds of a call in a step on the line of its kind, with all its repetitions."""
    line = lines[call.kind]
    return call.times * line.latency + call.sent / line.rate


def measured(
    ranks: Ranks, folders: dict[str, Path], lines: dict[str, FittedLine], strategy: str, label: str
) -> dict[str, Any]:
    """Time one strategy, and predict it."""
    settings = SETTINGS[label]
    rows = PROCESSES
    recipe = with_settings(Recipe(), [f"data.max_length={TOKENS}", f"tricks.gradient_accumulation={rows}", *settings])
    of_one = folders["halves" if strategy == "tensor" else "whole"]
    micro_batches = rows // shares(strategy, PROCESSES)
    found = ranks.run(both, folders["whole"], of_one, strategy, settings, micro_batches)
    shared, passes, update = (max(one) for one in zip(*found, strict=True))
    calls = STRATEGIES[strategy].traffic(
        recipe, shape_of({"model_type": "llama", **SHAPES["whole"]}, "whole"), PROCESSES
    )
    # Under fsdp each process updates its own shards only.
    compute = passes + update / (PROCESSES if strategy == "fsdp" else 1)
    predicted = ProcessTime(compute, tuple((call.why, time_of(call, lines)) for call in calls), 0.0)
    return {
        "strategy": strategy, "settings": label, "compute_seconds": compute, "sent_bytes": sum(c.sent for c in calls),
        "calls": sum(call.times for call in calls), "communication_seconds": predicted.communication,
        "predicted_seconds": predicted.seconds, "measured_seconds": shared,
        "error": predicted.seconds / shared - 1,
    }  # fmt: skip


def main() -> None:
    """Measure the lines and every case, and write the result."""
    quiet_libraries()
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as out, Ranks(PROCESSES) as ranks:
        folders = {name: saved(Path(out, name), widths) for name, widths in SHAPES.items()}
        timings: list[Timing] = ranks.run(measured_collectives)[0]
        kinds = dict.fromkeys(timing.kind for timing in timings)
        lines = {kind: fit_line(timing for timing in timings if timing.kind == kind) for kind in kinds}
        for kind, line in lines.items():
            console.print(f"{kind}: {1e3 * line.latency:.2f} ms + sent / {line.rate / 1e9:.2f} GB/s")
        found = []
        for case in CASES:
            one = measured(ranks, folders, lines, *case)
            found.append(one)
            console.print(
                f"{one['strategy']}, {one['settings']}: computes {one['compute_seconds']:.3f} s, communicates "
                f"{one['communication_seconds']:.3f} s, together {one['predicted_seconds']:.3f}; measured "
                f"{one['measured_seconds']:.3f}, off by {one['error']:+.1%}"
            )
    fitted = {kind: line._asdict() for kind, line in lines.items()}
    result = {"processes": PROCESSES, "tokens": TOKENS, "lines": fitted, "timings": [asdict(one) for one in timings]}
    common.write("links", stamp(Recipe()) | result | {"cases": found})


if __name__ == "__main__":
    main()
