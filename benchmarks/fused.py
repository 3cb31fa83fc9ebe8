"""Steps with fused adapters and blocks beside those of peft and transformers, in pairs, on rows of the real lengths.

    python -m benchmarks.fused                                       # SmolLM2's shape, 12 pairs: some minutes
    python -m benchmarks.fused --model random:tiny --pairs 2         # does it run?

Both models are in memory, with the same random weights. A pair is one micro-batch, forward and backward, through each
of them: the same row of random tokens, as long as a real one, in turn A B, B A. The ratio of a pair compares equal work
at nearly the same moment, so other work on the machine disturbs it least. Writes
``benchmarks/results/DEVICE/fused.json``.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import real_rows, write
from cria_tricks import models
from cria_tricks.bench.case import stamp
from cria_tricks.hardware import this_device
from cria_tricks.load import losses
from cria_tricks.load.model import load, quiet_libraries
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import best_precision
from cria_tricks.resolve import resolve
from cria_tricks.run.allocator import keep_freed_memory

BASE = ("tricks.peft=lora", "tricks.attention=sdpa", "tricks.chunked_loss=true")
ON_CUDA = ("tricks.quantization=nf4", "tricks.lean_preparation=true", "tricks.expand_kv=true")
WAYS = {
    "peft": (),
    "fused_lora": ("tricks.fused_lora=true",),
    "fused": ("tricks.fused_lora=true", "tricks.fused_blocks=true"),
}
VOCABULARY = 4_096
"""Of the random token ids."""


class Side:
    """A loaded model that runs micro-batches.

    Args:
        recipe: its settings.
    """

    def __init__(self, recipe: Recipe):
        plan = resolve(recipe)
        torch.manual_seed(0)
        self.model = load(plan, models.find(recipe.model)).model.train()
        self.device = next(self.model.parameters()).device
        names = {"fp16": torch.float16, "bf16": torch.bfloat16}
        self.dtype = next((names[name] for name in names if plan.training.get(name)), None)
        self.loss = losses.find(plan, self._autocast)

    def _autocast(self) -> Any:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def forward(self, row: dict[str, list[int]]) -> torch.Tensor:
        """Return the loss of a row."""
        batch = {name: torch.tensor([values], device=self.device) for name, values in row.items()}
        with self._autocast():
            return self.loss(self.model, batch)

    def seconds(self, row: dict[str, list[int]]) -> float:
        """Time a micro-batch, forward and backward [s]."""
        self._wait()
        began = time.perf_counter()
        self.forward(row).backward()
        self._wait()
        return time.perf_counter() - began

    def saved_bytes(self, row: dict[str, list[int]]) -> int:
        """Count what the forward pass saves for the backward pass [bytes]."""
        with SavedBytes(besides=self.model.parameters()) as saved:
            loss = self.forward(row)
        loss.backward()
        return saved.peak

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(recipe: Recipe, way: str, rows: list[dict[str, list[int]]], pairs: int) -> dict[str, Any]:
    """Time pairs of micro-batches, the first of each side not counted."""
    sides = [Side(with_settings(recipe, settings)) for settings in (WAYS["peft"], WAYS[way])]
    saved = [side.saved_bytes(rows[0]) for side in sides]
    ratios, tokens = [], []
    for number in range(pairs):
        row = rows[number % len(rows)]
        order = sides if number % 2 else sides[::-1]
        took = {id(side): side.seconds(row) for side in order}
        plain, fused = (took[id(side)] for side in sides)
        ratios.append(plain / fused)
        tokens.append(sum(label >= 0 for label in row["labels"]) / fused)
    return {
        "times_as_fast": statistics.median(ratios),
        "pairs": ratios,
        "trained_tokens_per_second": statistics.median(tokens),
        "saved_bytes": {"peft": saved[0], way: saved[1]},
        "saved_bytes_of_a_row_of": len(rows[0]["input_ids"]),
    }


def main() -> None:
    """Measure, write the result file, print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:smollm2")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    console, device = Console(), this_device()
    quiet_libraries()
    settings = [f"model={chosen.model}", *BASE, f"tricks.precision={best_precision(device)}", *chosen.settings]
    if device.kind == "cuda":
        settings += ON_CUDA
    recipe = with_settings(Recipe(), settings)
    rows = real_rows(VOCABULARY)
    result: dict[str, Any] = {**stamp(), "settings": settings}
    with keep_freed_memory(device):
        for way in ("fused_lora", "fused"):
            found = result[way] = compare(recipe, way, rows, chosen.pairs)
            low, high = min(found["pairs"]), max(found["pairs"])
            saved = [f"{size / 2**20:,.0f} MiB" for size in found["saved_bytes"].values()]
            times = (
                f"{found['times_as_fast']:.3f} times as fast (median of {chosen.pairs} pairs, {low:.2f} to {high:.2f})"
            )
            console.print(f"{way}: {times}; a row saves {saved[0]} with peft, {saved[1]} here", highlight=False)
    console.print(f"-> {write('fused', result, chosen.results)}", highlight=False)


if __name__ == "__main__":
    main()
