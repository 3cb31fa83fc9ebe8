"""How the peak of a micro-batch grows with the length of its row, by the switches of ``long_8b_small``, for real.

``python -m benchmarks.long_rows`` measures 1,024 to 8,192 tokens, and with ``--longest 16384`` that length, too.

SmolLM2's shape on a CPU, one row of one document, forward and backward. Beside each peak stand the bill by hand and the
line that fits the peaks best. Writes ``benchmarks/results/cpu/long_rows.json``.
"""

import argparse
import functools
import gc
import statistics
import time
from typing import Any

import torch
from rich.console import Console

from benchmarks import common
from cria_tricks import models, recipes
from cria_tricks.bench.case import stamp
from cria_tricks.common.units import human
from cria_tricks.load import losses
from cria_tricks.load.model import load, quiet_libraries
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches.folds import estimate
from cria_tricks.trainer import forward

LENGTHS = (1024, 2048, 4096, 8192, 16384)


def recipe_of(tokens: int) -> Recipe:
    """The recipe, for one document that fills the row."""
    sets = ["model=random:smollm2", f"data.max_length={tokens}", "tricks.packing=false"]
    return with_settings(recipes.get("long_8b_small"), sets)


def measured(tokens: int) -> dict[str, Any]:
    """The peak bytes of one micro-batch, its seconds, and the bill by hand."""
    recipe = recipe_of(tokens)
    plan = resolve(recipe)
    model = load(plan, models.find(recipe.model)).model.train()
    ids = torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    began = time.perf_counter()
    with LiveBytes() as live:
        live.track_all([*every_tensor(model), *batch.values()])
        losses.find(plan, functools.partial(forward.autocast, plan, "cpu"))(model, batch).backward()
    seconds = time.perf_counter() - began
    by_hand = estimate(recipe, find_shape(recipe.model), plan.device)
    # The step of the bill has optimizer states, which one micro-batch has not.
    states = sum(line.bytes for line in by_hand.peak.lines if line.name == "optimizer states")
    del model
    gc.collect()
    return {"peak_bytes": live.peak, "estimated_bytes": by_hand.peak_bytes - states, "seconds": seconds}


def line_through(peaks: dict[int, int]) -> dict[str, float]:
    """The least-squares line through the peaks, and how far the farthest of them is from it, as a share."""
    slope, intercept = statistics.linear_regression(list(peaks), list(peaks.values()))
    off = max(abs(peak / (intercept + slope * tokens) - 1) for tokens, peak in peaks.items())
    return {"bytes_per_token": slope, "bytes_without_tokens": intercept, "farthest": off}


def main() -> None:
    """Measure every length, and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=8192)
    chosen = parser.parse_args()
    quiet_libraries()
    console = Console(highlight=False, soft_wrap=True)
    cases: dict[str, Any] = {}
    for tokens in (length for length in LENGTHS if length <= chosen.longest):
        found = cases[str(tokens)] = measured(tokens)
        console.print(
            f"{tokens:,} tokens: {human(found['peak_bytes'])}, by hand {human(found['estimated_bytes'])}, "
            f"{found['seconds']:.0f} s"
        )
    line = line_through({int(tokens): case["peak_bytes"] for tokens, case in cases.items()})
    console.print(f"{line['bytes_per_token']:,.0f} bytes a token, off by at most {line['farthest']:.2%}")
    common.write("long_rows", stamp(recipe_of(LENGTHS[0])) | {"line": line, "cases": cases})


if __name__ == "__main__":
    main()
