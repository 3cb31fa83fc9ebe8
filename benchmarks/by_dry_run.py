"""What no machine here could hold, counted without a byte of it: Llama-3.2-1B's ladder on a T4, its longest rows
without checkpointing, and how bytes grow.

    python -m benchmarks.by_dry_run                  # all: 14 minutes on one core
    python -m benchmarks.by_dry_run --only ladder

Every number is of a dry run (``predict/dry_run.py``): the real modules, loss and optimizer on tensors without data,
attention through the kernel that a T4 would take. What is in the result file already is not counted again. Beside each
stands the bill by hand, which is made anew every time.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig

from benchmarks.common import GROWTH, HERE
from cria_tricks import recipes
from cria_tricks.bench.case import settings_of, stamp
from cria_tricks.common.units import human
from cria_tricks.hardware import T4
from cria_tricks.models.catalogue import CATALOGUE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches.folds import estimate

MODEL = "llama-3.2-1b"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ROWS = (1, 2, 4, 8)
MODELS = ("smollm2", "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b", "llama-3.2-3b", "llama-3.1-8b")


def count(recipe: Recipe) -> int:
    """Peak bytes of one recipe on a T4, by dry run."""
    config = AutoConfig.for_model(**CATALOGUE[recipe.model].config)
    return dry_run(resolve(recipe, T4), config, recipe.train.batch_size, recipe.data.max_length).peak_bytes


def beside(recipe: Recipe, peak: int) -> dict[str, Any]:
    """What was counted, whether a T4 could hold it, and the bill by hand."""
    by_hand = estimate(recipe, find_shape(recipe.model), T4)
    around = by_hand.needed_bytes - by_hand.peak_bytes  # the context, and cuBLAS' workspaces
    return {
        "peak_bytes": peak,
        "fits": peak + around <= T4.memory_bytes,
        "estimated_bytes": by_hand.peak_bytes,
    }


def ladder_steps() -> dict[str, Recipe]:
    """The capstone's ladder in the order of the lessons, from plain fp32 full fine-tuning at 1 x 2048."""
    capstone = recipes.capstone(T4)
    target = toggles.Target(find_shape(capstone.model), T4)
    return {setting.set[0]: setting.recipe for setting in toggles.ladder(target, capstone)}


def without_checkpointing() -> dict[str, Recipe]:
    """The capstone without checkpointing, with and without fused functions: its rows, and the longest that fits."""
    target = toggles.Target(find_shape(MODEL), T4)
    switches = ("tricks.fused_lora=true", "tricks.fused_blocks=true")
    found = {}
    for many in range(len(switches) + 1):
        chosen = switches[:many]
        recipe = with_settings(recipes.capstone(T4), ["tricks.gradient_checkpointing=false", *chosen])
        name = " ".join(switch.removeprefix("tricks.") for switch in chosen) or "peft and transformers"
        for tokens in (recipe.data.max_length, toggles.longest(target, recipe)):
            found[f"{name}: {tokens}"] = with_settings(recipe, [f"data.max_length={tokens}"])
    return found


def growth() -> dict[str, Recipe]:
    """One thing changed at a time: length, rows, model."""
    found: dict[str, Recipe] = {}
    for name, words in GROWTH.items():
        start = with_settings(Recipe(), [f"model={MODEL}", "data.max_length=2048", *settings_of(words, T4)])
        changes = {f"tokens={n}": f"data.max_length={n}" for n in LENGTHS}
        changes |= {f"rows={n}": f"train.batch_size={n}" for n in ROWS}
        changes |= {f"model={model}": f"model={model}" for model in MODELS}
        found |= {f"{name} {label}": with_settings(start, [setting]) for label, setting in changes.items()}
    return found


def fill(name: str, cases: dict[str, Recipe], results: Path | None, console: Console) -> None:
    """Count what is missing; each case is on the disk as soon as it is there."""
    path = (results or HERE / "results") / "dry-run" / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    for label, recipe in cases.items():
        known = result["cases"].get(label)
        found = result["cases"][label] = beside(recipe, known["peak_bytes"] if known else count(recipe))
        console.print(
            f"{label}: {human(found['peak_bytes'])}, by hand {human(found['estimated_bytes'])}", highlight=False
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        if not known:
            counted_on = stamp()
            result |= {"date": counted_on["date"], "device": T4.name, "versions": counted_on["versions"]}
        path.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Count, write the result files, print the numbers as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    studies = {"ladder": ladder_steps, "without_checkpointing": without_checkpointing, "growth": growth}
    parser.add_argument("--only", choices=studies)
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    for name, cases in studies.items():
        if chosen.only in (None, name):
            fill(name, cases(), chosen.results, Console())


if __name__ == "__main__":
    main()
