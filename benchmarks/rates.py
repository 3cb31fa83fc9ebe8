"""Learning rates of LoRA at four ranks and of full fine-tuning: the same short run at each rate.

    python -m benchmarks.rates              # took 54 minutes with one thread, next to other work
    python -m benchmarks.rates --show       # the table of what is there

SmolLM2-135M on the package's own rows, each cut at 192 tokens, one epoch of 32 steps, in fp32. Only the rank and
the learning rate change; alpha stays at 32. A run that is in the result file already is not run again, so the
benchmark may be stopped and begun again. Writes ``benchmarks/results/DEVICE/rates.json``.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import path_of, write
from cria_tricks.bench import tables
from cria_tricks.bench.case import stamp
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.train import train

BASE = (
    "name=rates",
    "model=smollm2",
    "data.max_length=192",
    "tricks.attention=sdpa",
    "train.epochs=1",
    "train.eval_steps=1000",
    "train.save_steps=1000",
    "train.save_minutes=0",
)
RANKS = (0, 1, 4, 16, 64)
"""0 stands for full fine-tuning."""
LORA_RATES = (1e-3, 2e-3, 5e-4, 5e-3)
FULL_RATES = (1e-4, 2e-4, 5e-5, 5e-4)
"""The likeliest first, so that a benchmark that was stopped says something."""


def run(rank: int, rate: float) -> dict[str, Any]:
    """Train with a rank and a rate; what the run reached."""
    trained = ["tricks.peft=lora", f"lora.r={rank}"] if rank else []
    recipe = with_settings(Recipe(), [*BASE, *trained, f"train.learning_rate={rate}"])
    with tempfile.TemporaryDirectory() as folder:
        report = train(recipe, Path(folder) / "run")
    gc.collect()
    kept = {key: report[key] for key in ("eval_loss_before", "eval_loss_after", "steps", "device")}
    return {"rank": rank, "rate": rate, "trainable": report["parameters"]["trainable"]} | kept


def main() -> None:
    """Run what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    path, console = path_of("rates", chosen.results), Console()
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    done = {(made["rank"], made["rate"]) for made in runs}
    for place in range(len(LORA_RATES)):
        for rank in () if chosen.show else RANKS:
            rate = (LORA_RATES if rank else FULL_RATES)[place]
            if (rank, rate) not in done:
                found = run(rank, rate)
                runs.append(found)
                runs.sort(key=lambda made: (made["rank"], made["rate"]))
                write("rates", stamp(with_settings(Recipe(), BASE)) | {"runs": runs}, chosen.results)
                console.print(f"rank {rank}, rate {rate}: {found['eval_loss_after']:.4f}", highlight=False)
    console.print(tables.rates(runs), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
