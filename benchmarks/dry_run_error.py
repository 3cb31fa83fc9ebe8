"""How wrong the dry run is: its peak bytes beside those of real CPU steps of SmolLM2, one switch set after another.

    python -m benchmarks.dry_run_error                 # 24 sets at 128 tokens: 20 minutes on one core
    python -m benchmarks.dry_run_error --tokens 512

A real step is two optimizer steps of the trainer, all storages counted from the first on. Every set has freshly loaded
weights. fp16 is left to the tests, on a smaller vocabulary: a CPU emulates it, a hundred times slower.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

from benchmarks.common import write
from cria_tricks import models
from cria_tricks.bench.case import free_memory, settings_of, stamp
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter
from cria_tricks.models import Weights
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training

SETS = """

precision=bf16 optimizer=adamw_8bit gradient_checkpointing=true
peft=lora
peft=lora gradient_accumulation=2
peft=lora lora.dora=true lora.rslora=true lora.dropout=0.1
peft=lora gradient_checkpointing=true precision=bf16
peft=lora activation_offload=true gradient_checkpointing=true
peft=lora attention=sdpa
peft=lora attention=sdpa expand_kv=true precision=bf16
peft=lora packing=true
peft=lora packing=true attention=sdpa
peft=lora chunked_loss=true
peft=lora optimizer=adamw_8bit
peft=lora paged_optimizer=true
peft=lora quantization=int8
peft=lora quantization=int8 precision=bf16
peft=lora quantization=nf4
peft=lora quantization=nf4 double_quantization=true precision=bf16
peft=lora quantization=fp4 double_quantization=true precision=bf16 lean_preparation=true
peft=head
peft=prompt_tuning quantization=nf4 precision=bf16
peft=side_network
train.batch_size=2 peft=lora attention=sdpa precision=bf16
train.batch_size=2 peft=lora quantization=nf4 precision=bf16 lean_preparation=true double_quantization=true \
gradient_checkpointing=true chunked_loss=true optimizer=adamw_8bit attention=sdpa gradient_accumulation=2
"""[1:-1].split("\n")
"""A set a line, as on the command line, without ``tricks.``."""


def two_steps(recipe: Recipe, plan: Plan, weights: Weights) -> tuple[int, int]:
    """Train two optimizer steps on freshly loaded weights; from the second on the optimizer's states live.

    A batch takes what one of ``data.max_length`` in all rows takes: packed rows are of two documents, and of several
    rows all but the first are shorter, so that there is a mask.

    Returns:
        The most that was alive [bytes], and the trained tokens of a micro-batch.
    """
    count, tokens = recipe.train.batch_size, recipe.data.max_length
    lengths = [tokens, *[tokens * 3 // 4] * (count - 1)]
    if plan.collator:
        lengths = [tokens // 2] * 2 * count
    batch = [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in lengths]
    rows = batch * 2 * plan.training["gradient_accumulation_steps"]
    settings = recipe.train.model_copy(update={"max_steps": 2, "save_steps": 1000, "save_minutes": 0})
    torch.manual_seed(0)
    meter = Meter(plan.device.kind)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = fit(
                training(
                    load(plan, weights), plan, settings, rows, [], Checkpoints(Path(folder)), pad_id=2, meter=meter
                )
            )
    finally:
        free_memory()
    peak = max(entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry)
    return peak, sum(lengths) - len(lengths)


def compare(words: str, tokens: int) -> dict[str, Any]:
    """Train two steps on nothing and two for real."""
    settings = settings_of(words)
    recipe = with_settings(Recipe(model="smollm2"), [*settings, f"data.max_length={tokens}"])
    plan, weights = resolve(recipe), models.find(recipe.model)
    real, trained_tokens = two_steps(recipe, plan, weights)
    config = AutoConfig.from_pretrained(weights.path)
    dry = dry_run(plan, config, recipe.train.batch_size, tokens, trained_tokens).peak_bytes
    return {"settings": settings, "dry_run": dry, "real": real, "error": dry / real - 1}


def main() -> None:
    """Measure, print each set and the worst, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    console, cases = Console(), []
    for line in SETS:
        cases.append(compare(line, chosen.tokens))
        console.print(f"{cases[-1]['error']:+.5%}  {line or 'all off'}", highlight=False)
    errors = [abs(case["error"]) for case in cases]
    recipe = with_settings(Recipe(model="smollm2"), [f"data.max_length={chosen.tokens}"])
    summary = {"tokens": chosen.tokens, "worst": max(errors), "median": statistics.median(errors), "cases": cases}
    path = write("dry_run_error", stamp(recipe) | summary, chosen.results)
    console.print(f"worst {summary['worst']:.5%}, median {summary['median']:.5%}", highlight=False)
    console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
