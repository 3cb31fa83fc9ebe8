"""The capstone's cost, with no download: Llama-3.2-1B's shape, random weights, rows of the real lengths.

    python -m benchmarks.kwanzaa_shape                           # on a CUDA GPU: 42 optimizer steps
    python -m benchmarks.kwanzaa_shape --shape tiny --steps 2    # anywhere, in a minute: does it run?

Writes ``benchmarks/results/DEVICE/kwanzaa.json``. Random weights cost what trained ones cost; their losses mean
nothing, and are kept only to show that every step was finite.
"""

import argparse
import datetime
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import rows_of_the_real_lengths, write
from cria_tricks import models, recipes
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.recipe import with_settings
from cria_tricks.report import summary
from cria_tricks.resolve import resolve
from cria_tricks.run.steps import count_parameters
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit


def measure(shape: str, settings: list[str]) -> dict[str, Any]:
    """Run the kwanzaa recipe on a shape and give its report back."""
    recipe = with_settings(
        recipes.kwanzaa(), [f"model=random:{shape}", "train.save_steps=1000", "train.save_minutes=0", *settings]
    )
    plan = resolve(recipe)
    weights = models.find(recipe.model)
    rows = {part: rows_of_the_real_lengths(part, CONFIGS[shape]["vocab_size"]) for part in ("train", "eval")}
    meter = Meter(plan.device.kind, compiled=plan.compiled)
    with meter.phase("load"):
        loaded = load(plan, weights)
        meter.track(every_tensor(loaded.model))
    with tempfile.TemporaryDirectory() as checkpoints:
        run = fit(
            loaded,
            plan,
            recipe.train,
            rows["train"].rows,
            rows["eval"].rows,
            Checkpoints(Path(checkpoints)),
            pad_id=0,
            meter=meter,
        )
    described = dict.fromkeys(("train", "eval"), "random tokens, the lengths of the Kwanzaa rows in SmolLM2's tokens")
    parameters = count_parameters(loaded.model)
    return summary.summarise(recipe, plan, run, meter, rows, described, parameters) | {"model": weights.name}


def main() -> None:
    """Measure, write the result file, print the line that matters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.2-1b", choices=CONFIGS)
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: three epochs, 42 of them")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--results", type=Path)
    chosen = parser.parse_args()
    if chosen.shape != "tiny" and not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed for this shape; --shape tiny --steps 2 runs anywhere")
    result = measure(chosen.shape, [f"train.max_steps={chosen.steps}", *chosen.settings])
    result["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = write("kwanzaa" if chosen.shape == "llama-3.2-1b" else f"kwanzaa_{chosen.shape}", result, chosen.results)
    in_steps = sum(entry["step_seconds"] for entry in result["history"] if "loss" in entry)
    memory = {name: dict(phase) for name, phase in result["memory"].items()}
    print(f"{result['steps']} steps in {in_steps:.1f} s, {result['tokens_per_second']:,.0f} tokens/s, {memory}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
