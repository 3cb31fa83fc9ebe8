"""How wrong the predicted seconds are on this machine: 20 switch sets of SmolLM2's shape, after ``--calibrate``.

    cria doctor --calibrate
    python -m benchmarks.seconds_error                     # 256 and 1,024 tokens: half an hour on two quiet cores
    python -m benchmarks.seconds_error --only 1 --only 9 --tokens 256

A measured step is the median of some steps of the trainer, on random weights, after a warm-up. The prediction is that
of ``cria plan`` for the same rows, by the calibration that is stored now. Nothing else should run on the machine. What
was measured already is not run again. Writes ``benchmarks/results/DEVICE/seconds_error.json``.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import path_of, write
from cria_tricks.bench.case import TRAINED_SHARE, Setup, measure, settings_of, stamp
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import calibration, this_device
from cria_tricks.hardware.cards import Card
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds
from tools import tables

SHAPE = "smollm2"
TOKENS = (256, 1024)
ROUNDS = 3
SETS = """

attention=sdpa
attention=sdpa gradient_checkpointing=true
optimizer=adamw_8bit attention=sdpa
peft=lora
peft=lora attention=sdpa
peft=lora attention=sdpa lora.r=64
peft=lora attention=sdpa lora.target_modules=q_proj,v_proj
peft=lora attention=sdpa chunked_loss=true
peft=lora attention=sdpa gradient_checkpointing=true
peft=lora attention=sdpa gradient_checkpointing=15
peft=lora attention=sdpa gradient_checkpointing=true keep_attention=true
peft=lora attention=sdpa gradient_checkpointing=true chunked_loss=true
peft=lora attention=sdpa quantization=nf4
peft=lora attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true
peft=lora attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true chunked_loss=true \
optimizer=adamw_8bit
peft=lora attention=sdpa quantization=int8
peft=lora attention=sdpa gradient_accumulation=2
peft=head attention=sdpa
peft=prompt_tuning attention=sdpa
"""[1:-1].split("\n")
"""A set a line, as on the command line, without ``tricks.``. All are in fp32, which every processor computes in."""
BF16 = """
optimizer=adamw_8bit attention=sdpa precision=bf16
peft=lora attention=sdpa precision=bf16
peft=lora attention=sdpa precision=bf16 lean_preparation=true
peft=lora attention=sdpa precision=bf16 gradient_checkpointing=true chunked_loss=true
peft=lora attention=sdpa quantization=nf4 double_quantization=true precision=bf16
peft=lora attention=sdpa quantization=nf4 double_quantization=true precision=bf16 gradient_checkpointing=true \
chunked_loss=true lean_preparation=true optimizer=adamw_8bit
"""[1:-1].split("\n")
"""More sets, for processors that compute in bf16."""
TARGETS = {"median": 0.15, "worst": 0.35}
"""The errors that are aimed at: the median of their sizes, and the largest."""


def measured(words: str, tokens: int) -> float:
    """Measure the step of a switch set [s]."""
    lengths = [tokens] * recipe_of(words, tokens).rows_per_step
    case = measure("seconds_error", "step", words, Setup(SHAPE, tokens, ROUNDS), lengths=lengths)
    if case.status != "ok":
        raise BadInput(f"{words}: {case.status}, {case.why}")
    return statistics.median(case.seconds)


def compare(words: str, tokens: int, seconds: float, card: Card) -> dict[str, Any]:
    """Predict the step of a switch set, and set the measured time [s] beside it."""
    found = folds.time_of(recipe_of(words, tokens), find_shape(SHAPE), card, tokens, TRAINED_SHARE)
    return {
        "set": words,
        "tokens": tokens,
        "predicted": found.seconds,
        "low": found.low,
        "high": found.high,
        "measured": seconds,
        "error": found.seconds / seconds - 1,
        "parts": {part.name: part.seconds for part in found.parts},
    }


def recipe_of(words: str, tokens: int) -> Recipe:
    """Make the recipe of a switch set."""
    return with_settings(Recipe(), [f"model=random:{SHAPE}", f"data.max_length={tokens}", *settings_of(words)])


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Say how far off the predictions are, and how many measured times are inside their range."""
    sizes = [abs(run["error"]) for run in runs]
    return {
        "sets": len(runs),
        "median": statistics.median(sizes),
        "worst": max(sizes),
        "inside": sum(run["low"] <= run["measured"] <= run["high"] for run in runs),
    }


def main() -> None:
    """Run what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = SETS + BF16
    numbers = range(1, len(every) + 1)
    parser.add_argument(
        "--only", action="append", type=int, choices=numbers, metavar="NUMBER", help=f"sets, 1 to {len(every)}"
    )
    parser.add_argument("--tokens", action="append", type=int, help=f"of a row; {TOKENS} when left out")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    device, console = this_device(), Console()
    card = calibration.card_of(device)
    if card is None:
        parser.error(calibration.stale(device) or "this machine is not calibrated: run cria doctor --calibrate")
    path = path_of("seconds_error", chosen.results)
    stored = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    seconds = {(run["set"], run["tokens"]): run["measured"] for run in stored}
    sets = every if device.real_bf16 else SETS
    if chosen.only:
        sets = [every[number - 1] for number in chosen.only]
    for words, tokens in itertools.product(sets, chosen.tokens or TOKENS):
        if (words, tokens) not in seconds:
            seconds[words, tokens] = measured(words, tokens)
        runs = [compare(*case, taken, card) for case, taken in seconds.items()]
        about = {"shape": SHAPE, "rates_from": card.source, "threads": calibration.threads(), **summary(runs)}
        write("seconds_error", stamp() | about | {"runs": runs}, chosen.results)
        run = next(run for run in runs if (run["set"], run["tokens"]) == (words, tokens))
        said = f"predicted {run['predicted']:.2f}, measured {run['measured']:.2f}, {run['error']:+.0%}"
        console.print(f"{tokens} tokens, {words or 'everything off'}: {said}", highlight=False, soft_wrap=True)
    console.print(tables.seconds_error({"runs": runs}), markup=False, highlight=False, soft_wrap=True)
    for name, value in summary(runs).items():
        aim = f", aim {TARGETS[name]:.0%}" if name in TARGETS else ""
        console.print(f"{name}: {value:.1%}{aim}" if aim else f"{name}: {value}", highlight=False)


if __name__ == "__main__":
    main()
