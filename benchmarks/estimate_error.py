"""How far the estimate by hand is off: against the dry run, on whole models, over batches, lengths and toggle sets.

    python -m benchmarks.estimate_error                             # all 204 cases: 40 minutes on one core
    python -m benchmarks.estimate_error --only llama-3.2-1b         # one model's
    python -m benchmarks.estimate_error --show                      # the table of what is there

Nothing is trained and nothing is allocated, so a card is not needed: the T4's kernels are followed, in every fourth
case an A100's. What the dry run counted is kept in the result file, so the run may be stopped and begun again; the
estimate by hand takes a millisecond a case and is made anew every time. After a change that moves the dry run's bytes
delete the file. Writes ``benchmarks/results/DEVICE/estimate_error.json``.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common import path_of, write
from cria_tricks.cases import stamp
from cria_tricks.hardware.cards import find_card
from cria_tricks.memory.estimate import estimate
from cria_tricks.memory.shape import find_config, find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import resolve
from cria_tricks.units import human

MODELS = {
    "smollm2": 24,
    "qwen2.5-0.5b": 32,
    "tinyllama-1.1b": 28,
    "llama-3.2-1b": 52,
    "qwen2.5-1.5b": 24,
    "llama-3.2-3b": 20,
    "llama-2-7b": 12,
    "llama-3.1-8b": 12,
}
"""Cases of each: fewer of a model with many blocks, whose dry run takes longer."""
HALF, LORA = "precision=fp16", "peft=lora"
SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("attention=sdpa",),
    (HALF, "attention=sdpa", "gradient_checkpointing=true"),
    ("attention=sdpa", "optimizer=adamw_8bit", "gradient_accumulation=4"),
    (LORA, "attention=sdpa"),
    (LORA, HALF),
    (LORA, HALF, "attention=sdpa", "gradient_checkpointing=true"),
    (LORA, HALF, "attention=sdpa", "expand_kv=true", "chunked_loss=true"),
    (LORA, HALF, "attention=sdpa", "packing=true", "gradient_checkpointing=true", "chunked_loss=true"),
    (LORA, HALF, "attention=sdpa", "quantization=nf4"),
    (LORA, HALF, "attention=sdpa", "quantization=nf4", "gradient_checkpointing=true", "chunked_loss=true"),
    (LORA, HALF, "attention=sdpa", "quantization=nf4", "expand_kv=true", "lean_preparation=true", "chunked_loss=true"),
    (LORA, "attention=sdpa", "quantization=nf4", "double_quantization=true", "gradient_checkpointing=true"),
    (LORA, HALF, "attention=sdpa", "quantization=int8", "gradient_checkpointing=true", "chunked_loss=true"),
    (
        *(LORA, HALF, "attention=sdpa", "expand_kv=true", "quantization=nf4", "double_quantization=true"),
        *("lean_preparation=true", "gradient_checkpointing=true", "chunked_loss=true", "optimizer=adamw_8bit"),
    ),
    ("peft=head", HALF, "attention=sdpa"),
    ("peft=prompt_tuning", HALF, "attention=sdpa", "quantization=int8"),
    ("peft=side_network", HALF, "attention=sdpa"),
    ("peft=side_network", "attention=sdpa", "gradient_checkpointing=true", "chunked_loss=true"),
)
"""19 of them, so that a walk over them and over the 24 places below meets all combinations before it repeats one."""
PLACES = [(batch, tokens) for tokens in (256, 512, 1024, 2048, 4096, 8192) for batch in (1, 2, 3, 4)]


class Case(NamedTuple):
    """One recipe on one card."""

    model: str
    card: str
    batch: int
    tokens: int
    tricks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.model} {self.card} {self.batch}x{self.tokens} {' '.join(self.tricks)}".rstrip()


def cases() -> Iterator[Case]:
    """All of them, in the same order every time."""
    place = 0
    for first, (model, many) in enumerate(MODELS.items()):
        for number in range(many):
            place += 5  # every one of the 24 before any again
            card = "a100" if number % 4 == 3 else "t4"
            tricks = SETS[(first * 7 + number) % len(SETS)]
            if card == "a100":
                tricks = tuple(trick.replace("fp16", "bf16") for trick in tricks)
            yield Case(model, card, *PLACES[place % len(PLACES)], tricks)


def recipe_of(case: Case) -> Recipe:
    """What would be trained."""
    sets = (f"train.batch_size={case.batch}", f"data.max_length={case.tokens}", *(f"tricks.{t}" for t in case.tricks))
    return with_settings(Recipe(), sets)


def count(case: Case) -> dict[str, Any]:
    """The dry run of one case."""
    from transformers import AutoConfig

    from cria_tricks.memory.dry_run import dry_run

    begun = time.perf_counter()
    config = AutoConfig.for_model(**find_config(case.model))
    counted = dry_run(resolve(recipe_of(case), find_card(case.card).device), config, case.batch, case.tokens)
    gc.collect()
    return {"dry_run_bytes": counted.peak_bytes, "dry_run_seconds": round(time.perf_counter() - begun, 1)}


def compare(case: Case, counted: dict[str, Any]) -> dict[str, Any]:
    """The estimate by hand of one case, beside its dry run."""
    peak = estimate(recipe_of(case), find_shape(case.model), find_card(case.card).device).peak
    error = peak.bytes / counted["dry_run_bytes"] - 1
    return {"case": str(case), **counted, "moment": peak.name, "by_hand_bytes": peak.bytes, "error": error}


def show(runs: list[dict[str, Any]], console: Console) -> None:
    """One row a case, and what is promised: the worst, the median, the worst that is too small."""
    drawn = Table(title="estimate by hand against dry run")
    for column in ("case", "by hand", "dry run", "error", "peak in"):
        drawn.add_column(column, justify="left" if column in ("case", "peak in") else "right", no_wrap=column != "case")
    for one in runs:
        drawn.add_row(
            one["case"],
            human(one["by_hand_bytes"]),
            human(one["dry_run_bytes"]),
            f"{one['error']:+.2%}",
            one["moment"],
        )
    console.print(drawn)
    if runs:
        for name, value in summary(runs).items():
            console.print(f"{name.replace('_', ' ')}: {value if name == 'cases' else f'{value:.2%}'}", highlight=False)


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of all cases: how many, the worst error, the median of their sizes, the largest that is too small."""
    errors = [one["error"] for one in runs]
    return {
        "cases": len(errors),
        "worst": max(errors, key=abs),
        "median_size": statistics.median(map(abs, errors)),
        "worst_under": min(0.0, *errors),
    }


def main() -> None:
    """Count what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=MODELS, help="models; all when left out")
    parser.add_argument("--most", type=int, help="stop after so many new cases")
    parser.add_argument("--show", action="store_true", help="count nothing")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    path, console = path_of("estimate_error", chosen.results), Console()
    console.width = max(console.width, 110)  # a table with broken cells cannot be read
    kept = {one["case"]: one for one in json.loads(path.read_text())["runs"]} if path.is_file() else {}
    keys = ("dry_run_bytes", "dry_run_seconds")
    runs = [compare(case, {key: kept[str(case)][key] for key in keys}) for case in cases() if str(case) in kept]
    missing = [case for case in cases() if str(case) not in kept and case.model in (chosen.only or MODELS)]
    for case in [] if chosen.show else missing[: chosen.most]:
        runs.append(compare(case, count(case)))
        write("estimate_error", stamp() | summary(runs) | {"runs": runs}, chosen.results)
        console.print(f"{case}: {runs[-1]['error']:+.2%}, {runs[-1]['dry_run_seconds']} s", highlight=False)
    if runs and not chosen.show:
        write("estimate_error", stamp() | summary(runs) | {"runs": runs}, chosen.results)
    show(runs, console)


if __name__ == "__main__":
    main()
