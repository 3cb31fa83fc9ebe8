"""How wrong the dry run is: its peak bytes beside those of real CPU steps of SmolLM2, one switch set after another.

    python -m benchmarks.dry_run_error                 # 24 sets at 128 tokens: 20 minutes on one core
    python -m benchmarks.dry_run_error --tokens 512

A real step is two optimizer steps of the trainer, all storages counted from the first on. Every set has freshly loaded
weights. fp16 is left to the tests, on a smaller vocabulary: a CPU emulates it, a hundred times slower.
"""

import argparse
import gc
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.common import train_two_steps, write
from cria_tricks import models
from cria_tricks.bench.case import settings_of, stamp
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve

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


def compare(words: str, tokens: int) -> dict[str, Any]:
    """Train two steps on nothing and two for real."""
    settings = settings_of(words)
    recipe = with_settings(Recipe(model="smollm2"), [*settings, f"data.max_length={tokens}"])
    plan, weights = resolve(recipe), models.find(recipe.model)
    real = train_two_steps(recipe, plan, weights)
    config = AutoConfig.from_pretrained(weights.path)
    dry = dry_run(plan, config, recipe.train.batch_size, tokens, real.trained_tokens).peak_bytes
    gc.collect()
    return {"settings": settings, "dry_run": dry, "real": real.peak_bytes, "error": dry / real.peak_bytes - 1}


def table(result: dict[str, Any]) -> Table:
    """Every set, the worst of them and the median."""
    drawn = Table("set", "dry run, bytes", "real step, bytes", "error", caption_justify="left")
    drawn.caption = f"worst {result['worst']:.5%}, median {result['median']:.5%}"
    for case in result["cases"]:
        name = " ".join(setting.removeprefix("tricks.") for setting in case["settings"]) or "all off"
        drawn.add_row(name, f"{case['dry_run']:,}", f"{case['real']:,}", f"{case['error']:+.5%}")
    return drawn


def main() -> None:
    """Measure, write the result file, print the table."""
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
    console.print(table(summary))
    console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
