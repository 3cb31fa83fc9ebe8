"""What watching costs: steps with the monitor beside steps without it, in turn.

    python -m benchmarks.monitor                                     # SmolLM2, 60 pairs of each rate
    python -m benchmarks.monitor --model random:tiny --pairs 10      # does it run?

One pair is two neighbouring optimizer steps of one run, on rows of one length: one watched, one not, in the order
A B, B A, A B, ... Compared are seconds, and the CPU's seconds of the whole process, the monitor's thread included,
which other work on the machine disturbs less. Done once with a sample a second, as by default, and once with a hundred
a second, where whatever it costs is a hundred times as much and stands out of what two equal steps differ by. What a
sample takes by itself is measured as well.

Writes ``benchmarks/results/DEVICE/monitor.json``.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from benchmarks.common import real_rows, write
from cria_tricks import models
from cria_tricks.bench.case import stamp
from cria_tricks.load.model import load, quiet_libraries
from cria_tricks.measure.memory import Meter
from cria_tricks.measure.monitor import Monitor, read
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training

BASE = ("tricks.peft=lora", "tricks.attention=sdpa", "tricks.chunked_loss=true", "train.save_minutes=0")
VOCABULARY = 4_096
"""Of the random token ids."""


class InTurn(TrainerCallback):
    """Watches the second of every first two steps and the first of every second two, and times all of them.

    Args:
        folder: for the samples.
        seconds: between two of them.
        cuda: whether there is a card.

    Attributes:
        pairs: of each two steps the seconds, and the CPU's, of the one that was watched and of the other one.
    """

    def __init__(self, folder: Path, seconds: float, *, cuda: bool):
        self.folder, self.seconds, self.cuda = folder, seconds, cuda
        self.pairs: list[dict[bool, tuple[float, float]]] = []
        self.watching = contextlib.ExitStack()

    def on_step_begin(self, args, state, control, **kwargs):
        if self._watches(state.global_step):
            self.watching.enter_context(Monitor(self.folder / "monitor.jsonl", self.seconds, cuda=self.cuda))
        self.began = self._now()  # a run starts its monitor once

    def on_step_end(self, args, state, control, **kwargs):
        now, step = self._now(), state.global_step - 1
        self.watching.close()
        if step % 2 == 0:
            self.pairs.append({})
        self.pairs[-1][self._watches(step)] = now[0] - self.began[0], now[1] - self.began[1]

    def _watches(self, step: int) -> bool:
        return step % 4 in (1, 2)

    def _now(self) -> tuple[float, float]:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


def rows_of(tokens: int, number: int = 8) -> list[dict[str, list[int]]]:
    """Rows of one length; an epoch of them has whole pairs."""
    long = [row for row in real_rows(VOCABULARY) if len(row["input_ids"]) >= tokens]
    return [{name: values[-tokens:] for name, values in row.items()} for row in long[:number]]


def train(recipe: Recipe, callback: TrainerCallback) -> None:
    """A run; nothing but the callback looks on."""
    plan = resolve(recipe)
    loaded = load(plan, models.find(recipe.model))
    meter = Meter(plan.device.kind, compiled=True)  # uncounted: watching every operation would be timed as well
    with tempfile.TemporaryDirectory() as folder:
        rows, checkpoints = rows_of(recipe.data.max_length), Checkpoints(Path(folder))
        fit(training(loaded, plan, recipe.train, rows, [], checkpoints, pad_id=0, meter=meter, callbacks=[callback]))


def compare(recipe: Recipe, pairs: int, seconds: float, *, cuda: bool) -> dict[str, Any]:
    """Time pairs; the first two steps warm up."""
    steps = f"train.max_steps={2 * pairs + 2}"
    with tempfile.TemporaryDirectory() as folder:
        found = InTurn(Path(folder), seconds, cuda=cuda)
        train(with_settings(recipe, [steps, f"train.save_steps={2 * pairs + 3}"]), found)
        samples = len(read(Path(folder) / "monitor.jsonl"))

    def over(what: int) -> dict[str, Any]:
        ratios = [pair[True][what] / pair[False][what] for pair in found.pairs[1:]]
        return {
            "median": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2],
            "range": [min(ratios), max(ratios)],
            "pairs": ratios,
        }

    return {
        "monitor_seconds": seconds,
        "samples": samples,
        "unwatched_step_seconds": statistics.median(pair[False][0] for pair in found.pairs[1:]),
        "watched_over_unwatched": {"seconds": over(0), "cpu_seconds": over(1)},
    }


def one_sample(cuda: bool, times: int = 300) -> dict[str, float]:
    """What a sample takes, taken in this thread: seconds of the clock, and seconds of a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "monitor.jsonl"
        with Monitor(path, 1e-6, cuda=cuda) as watch:  # opens the cards, and takes some samples of its own
            time.sleep(0.2)
        with path.open("a") as file:
            wall, busy = time.perf_counter(), time.thread_time()
            for _ in range(times):
                file.write(json.dumps(watch.sample()) + "\n")
                file.flush()
            return {
                "seconds": (time.perf_counter() - wall) / times,
                "cpu_seconds": (time.thread_time() - busy) / times,
            }


def main() -> None:
    """Measure, write the result file, print the lines that matter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=60, help="of either rate")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    console, cuda = Console(), torch.cuda.is_available()
    quiet_libraries()
    settings = [f"model={chosen.model}", *BASE, "data.max_length=256", *chosen.settings]
    recipe = with_settings(Recipe(), settings)
    result = stamp(recipe) | {"one_sample": one_sample(cuda)}
    for name, seconds in (("each_second", 1.0), ("each_hundredth", 0.01)):
        result[name] = compare(recipe, chosen.pairs, seconds, cuda=cuda)
        for what, found in result[name]["watched_over_unwatched"].items():
            low, high = found["quartiles"]
            said = f"a sample every {seconds:g} s: watched over unwatched {what} {found['median']:.4f}"
            console.print(f"{said} (median; quartiles {low:.3f} and {high:.3f})", highlight=False)
    path = write("monitor", result, chosen.results)
    took = {name: f"{1e6 * value:.0f} us" for name, value in result["one_sample"].items()}
    console.print(f"one sample: {took['seconds']}, of which a CPU {took['cpu_seconds']}", highlight=False)
    console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
