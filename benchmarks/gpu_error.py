"""How wrong both counts are on a card: the estimate by hand and the dry run beside what CUDA's allocator gave out.

    python -m benchmarks.gpu_error                          # under a T4's rules: 22 toggle sets at 512 and 2,048 tokens
    python -m benchmarks.gpu_error --only 3 --only 14       # some of the sets, by their number
    python -m benchmarks.gpu_error --shape tiny             # anywhere: does it run?

Llama-3.2-1B's shape with random weights: bytes do not depend on what is in them. ``CUBLAS_WORKSPACE_CONFIG`` is pinned
to what a T4's default is, and the workspaces are billed, as torch takes them from the allocator that is read here. A
set that does not fit must run out of memory. A case that is in the result file already is not run again, so the run
may be stopped and begun again. Writes ``benchmarks/results/DEVICE/gpu_error.json``.
"""

import argparse
import contextlib
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.common import lengths_of_a_batch, path_of, train_two_steps, write
from cria_tricks import models
from cria_tricks.bench.case import settings_of, stamp
from cria_tricks.bill.bill import WORKSPACE_CONFIG
from cria_tricks.common.errors import OutOfMemory, is_out_of_memory
from cria_tricks.common.units import human
from cria_tricks.hardware import profile, this_device
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.tricks.folds import estimate

SETS = """
peft=lora
peft=lora gradient_checkpointing=true
peft=lora precision=fp16
peft=lora precision=fp16 attention=sdpa
peft=lora precision=fp16 attention=sdpa expand_kv=true
peft=lora precision=fp16 attention=sdpa gradient_checkpointing=true
peft=lora precision=fp16 attention=sdpa gradient_checkpointing=true activation_offload=true
peft=lora precision=fp16 attention=sdpa gradient_checkpointing=true lora.dora=true
peft=lora precision=fp16 attention=sdpa expand_kv=true chunked_loss=true
peft=lora precision=fp16 attention=sdpa packing=true gradient_checkpointing=true chunked_loss=true
peft=lora precision=fp16 attention=sdpa quantization=int8
peft=lora precision=fp16 attention=sdpa quantization=int8 gradient_checkpointing=true chunked_loss=true
peft=lora precision=fp16 attention=sdpa quantization=nf4
peft=lora precision=fp16 attention=sdpa quantization=nf4 expand_kv=true optimizer=adamw_8bit paged_optimizer=true
peft=lora precision=fp16 attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true
peft=lora precision=fp16 attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true \
chunked_loss=true lean_preparation=true expand_kv=true
peft=lora precision=fp16 attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true \
chunked_loss=true lean_preparation=true optimizer=adamw_8bit gradient_accumulation=2 train.batch_size=2
peft=head precision=fp16 attention=sdpa
peft=prompt_tuning precision=fp16 attention=sdpa quantization=nf4 gradient_checkpointing=true
peft=side_network precision=fp16 attention=sdpa gradient_checkpointing=true
precision=fp16 attention=sdpa gradient_checkpointing=true optimizer=adamw_8bit
precision=fp16 attention=sdpa gradient_checkpointing=true optimizer=adamw_8bit paged_optimizer=true
""".strip().split("\n")
"""A set a line, as on the command line, without ``tricks.``."""
TOKENS = (512, 2048)


def run(shape: str, words: str, tokens: int) -> dict[str, Any]:
    """Count one case twice, then run it."""
    recipe = with_settings(Recipe(model=f"random:{shape}"), [*settings_of(words), f"data.max_length={tokens}"])
    plan, weights = resolve(recipe), models.find(recipe.model)
    lengths = lengths_of_a_batch(recipe, plan)
    trained, rows = sum(lengths) - len(lengths), recipe.train.batch_size
    by_hand = estimate(recipe, find_shape(weights.path), plan.device, trained_tokens=trained)
    dry = dry_run(plan, AutoConfig.from_pretrained(weights.path), rows, tokens, trained)
    workspaces = by_hand.workspaces.bytes
    case: dict[str, Any] = {
        "set": words,
        "tokens": tokens,
        "by_hand_bytes": by_hand.allocated_bytes,
        "dry_run_bytes": dry.peak_bytes + workspaces,
        "moment": by_hand.peak.name,
        "rows": {line.name: line.bytes for line in by_hand.lines},
        "dry_run_moments": dry.moments,
    }
    try:
        steps = train_two_steps(recipe, plan, weights)
    except (OutOfMemory, RuntimeError) as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        return case | {"out_of_memory": str(error)}
    return case | {
        "allocated_bytes": steps.peak_bytes,
        "reserved_bytes": steps.reserved_bytes,
        "attention_kernel": steps.attention_kernel,
        "by_hand_error": by_hand.allocated_bytes / steps.peak_bytes - 1,
        "dry_run_error": case["dry_run_bytes"] / steps.peak_bytes - 1,
    }


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all that fitted: the worst error of both counts, the median of their sizes, the worst that is too small."""
    found: dict[str, Any] = {"cases": len(cases), "fitted": sum("allocated_bytes" in case for case in cases)}
    for way in ("by_hand", "dry_run"):
        errors = [case[f"{way}_error"] for case in cases if f"{way}_error" in case]
        if errors:
            found[f"{way}_worst"] = max(errors, key=abs)
            found[f"{way}_median_size"] = statistics.median(map(abs, errors))
            found[f"{way}_worst_under"] = min(0.0, *errors)
    return found


def show(cases: list[dict[str, Any]], console: Console) -> None:
    """One row a case, then what is promised."""
    drawn = Table(title="estimate by hand and dry run beside what was allocated, GiB")
    drawn.add_column("set")
    for column in ("tokens", "by hand", "dry run", "allocated", "reserved", "by hand", "dry run"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for case in cases:
        measured = ["out of memory", "", "", ""]
        if "allocated_bytes" in case:
            errors = [f"{case[f'{way}_error']:+.2%}" for way in ("by_hand", "dry_run")]
            measured = [human(case["allocated_bytes"]), human(case["reserved_bytes"] or 0), *errors]
        drawn.add_row(
            case["set"], str(case["tokens"]), human(case["by_hand_bytes"]), human(case["dry_run_bytes"]), *measured
        )
    console.print(drawn)
    for name, value in summary(cases).items():
        said = f"{value:.2%}" if isinstance(value, float) else value
        console.print(f"{name.replace('_', ' ')}: {said}", highlight=False)


def main() -> None:
    """Run what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.2-1b", choices=CONFIGS)
    parser.add_argument("--only", action="append", type=int, metavar="NUMBER", help=f"sets, 1 to {len(SETS)}")
    parser.add_argument("--tokens", action="append", type=int, help=f"of a row; {TOKENS} when left out")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE_CONFIG  # read once, at the process's first product
    on_card = torch.cuda.is_available()
    if chosen.shape != "tiny" and not on_card:
        parser.error("a CUDA GPU is needed for this shape; --shape tiny runs anywhere")
    with profile("t4") if on_card else contextlib.nullcontext():
        name = "gpu_error" if chosen.shape == "llama-3.2-1b" else f"gpu_error_{chosen.shape}"
        path, console = path_of(name, chosen.results), Console()
        console.width = max(console.width, 130)  # a table with broken cells cannot be read
        console.print(f"on {this_device().name}", highlight=False)
        cases = json.loads(path.read_text())["runs"] if path.is_file() else []
        done = {(case["set"], case["tokens"]) for case in cases}
        for words in [SETS[number - 1] for number in chosen.only] if chosen.only else SETS:
            for tokens in chosen.tokens or TOKENS:
                if (words, tokens) in done:
                    continue
                cases.append(run(chosen.shape, words, tokens))
                extra = {"shape": chosen.shape, "cublas_workspace_config": WORKSPACE_CONFIG, **summary(cases)}
                write(name, stamp() | extra | {"runs": cases}, chosen.results)
                said = {way: f"{cases[-1].get(f'{way}_error', float('nan')):+.2%}" for way in ("by_hand", "dry_run")}
                console.print(f"{tokens} tokens, {words}: {said}", highlight=False)
        show(cases, console)


if __name__ == "__main__":
    main()
