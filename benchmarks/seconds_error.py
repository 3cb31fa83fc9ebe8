"""How wrong the predicted seconds are on this machine: 20 toggle sets of SmolLM2's shape, after ``--calibrate``.

    cria doctor --calibrate
    python -m benchmarks.seconds_error                     # 256 and 1,024 tokens: half an hour on two quiet cores
    python -m benchmarks.seconds_error --only 1 --only 9 --tokens 256

A measured step is the median of some steps of the trainer, on random weights, after a warm-up. The prediction is that
of ``cria plan`` for the same rows. Nothing else should run on the machine. What is in the result file already is not
run again; delete the file after a new calibration. Writes ``benchmarks/results/DEVICE/seconds_error.json``.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import path_of, write
from cria_tricks.bench.case import TRAINED_SHARE, Setup, measure, settings_of, stamp
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import calibration, this_device
from cria_tricks.hardware.cards import Card
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import folds

SHAPE = "smollm2"
TOKENS = (256, 1024)
ROUNDS = 3
SETS = """

precision=bf16
attention=sdpa gradient_checkpointing=true
optimizer=adamw_8bit attention=sdpa precision=bf16
peft=lora
peft=lora attention=sdpa
peft=lora attention=sdpa lora.r=64
peft=lora attention=sdpa lora.target_modules=q_proj,v_proj
peft=lora attention=sdpa gradient_checkpointing=true
peft=lora attention=sdpa chunked_loss=true
peft=lora attention=sdpa precision=bf16
peft=lora attention=sdpa precision=bf16 lean_preparation=true
peft=lora attention=sdpa precision=bf16 gradient_checkpointing=true chunked_loss=true
peft=lora attention=sdpa quantization=nf4
peft=lora attention=sdpa quantization=nf4 double_quantization=true precision=bf16
peft=lora attention=sdpa quantization=nf4 double_quantization=true precision=bf16 gradient_checkpointing=true
peft=lora attention=sdpa quantization=nf4 double_quantization=true precision=bf16 gradient_checkpointing=true \
chunked_loss=true lean_preparation=true optimizer=adamw_8bit
peft=lora attention=sdpa precision=bf16 gradient_accumulation=2
peft=head attention=sdpa
peft=prompt_tuning attention=sdpa
"""[1:-1].split("\n")
"""A set a line, as on the command line, without ``tricks.``."""
TARGETS = {"median": 0.15, "worst": 0.35}
"""The errors that are aimed at: the median of their sizes, and the largest."""


def compare(words: str, tokens: int, card: Card) -> dict[str, Any]:
    """Predict the step of a toggle set, and measure it."""
    recipe = with_settings(Recipe(), [f"model=random:{SHAPE}", f"data.max_length={tokens}", *settings_of(words)])
    found = folds.step(recipe, find_shape(SHAPE), card, tokens, TRAINED_SHARE)
    lengths = [tokens] * recipe.rows_per_step
    case = measure("seconds_error", "step", words, Setup(SHAPE, tokens, ROUNDS), lengths=lengths)
    if case.status != "ok":
        raise BadInput(f"{words}: {case.status}, {case.why}")
    seconds = statistics.median(case.seconds)
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


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Say how far off the predictions are, and how many measured times are inside their range."""
    sizes = [abs(run["error"]) for run in runs]
    return {
        "sets": len(runs),
        "median": statistics.median(sizes),
        "worst": max(sizes),
        "inside": sum(run["low"] <= run["measured"] <= run["high"] for run in runs),
    }


def table(runs: list[dict[str, Any]]) -> Table:
    """Draw every set with its prediction."""
    drawn = Table(title="seconds of a step, predicted after calibration and measured")
    drawn.add_column("set")
    for column in ("tokens", "predicted", "range", "measured", "error"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        span = f"{run['low']:.2f} to {run['high']:.2f}"
        numbers = (f"{run['predicted']:.2f}", span, f"{run['measured']:.2f}", f"{run['error']:+.0%}")
        drawn.add_row(run["set"] or "everything off", str(run["tokens"]), *numbers)
    return drawn


def main() -> None:
    """Run what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", type=int, metavar="NUMBER", help=f"sets, 1 to {len(SETS)}")
    parser.add_argument("--tokens", action="append", type=int, help=f"of a row; {TOKENS} when left out")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    device, console = this_device(), Console()
    card = calibration.card_of(device)
    if card is None:
        parser.error(calibration.stale(device) or "this machine is not calibrated: run cria doctor --calibrate")
    console.width = max(console.width, 120)
    path = path_of("seconds_error", chosen.results)
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    done = {(run["set"], run["tokens"]) for run in runs}
    for words in [SETS[number - 1] for number in chosen.only] if chosen.only else SETS:
        for tokens in chosen.tokens or TOKENS:
            if (words, tokens) in done:
                continue
            runs.append(compare(words, tokens, card))
            about = {"shape": SHAPE, "rates_from": card.source, "threads": calibration.threads(), **summary(runs)}
            write("seconds_error", stamp() | about | {"runs": runs}, chosen.results)
            run = runs[-1]
            said = f"predicted {run['predicted']:.2f}, measured {run['measured']:.2f}, {run['error']:+.0%}"
            console.print(f"{tokens} tokens, {words or 'everything off'}: {said}", highlight=False)
    console.print(table(runs))
    for name, value in summary(runs).items():
        aim = f", aim {TARGETS[name]:.0%}" if name in TARGETS else ""
        console.print(f"{name}: {value:.1%}{aim}" if aim else f"{name}: {value}", highlight=False)


if __name__ == "__main__":
    main()
