"""What the benchmarks share: rows of the real lengths, and result files that say where they come from."""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cria_tricks.bench.case import Rows, free_memory
from cria_tricks.bench.results import folder_of
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import this_device
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit

HERE = Path(__file__).parent


GROWTH = {
    "kept": "peft=lora precision=best attention=best",
    "checkpointed": "peft=lora precision=best attention=best gradient_checkpointing=true",
    "lean": "peft=lora precision=best attention=best gradient_checkpointing=true chunked_loss=true quantization=nf4 "
    "double_quantization=true lean_preparation=true optimizer=adamw_8bit",
}
"""Switches whose growth is counted and measured: everything kept, blocks computed again, and nearly all."""


def real_lengths(rows: int, tokens: int) -> list[int]:
    """Lengths of the first real rows, which have at most 2,048 tokens, brought to ``tokens``."""
    return [max(2, length * tokens // 2048) for length, _ in row_lengths("train")[:rows]]


def real_rows(vocabulary: int) -> Rows:
    """Draw random tokens for rows of the real lengths, with the same share of them trained.

    Args:
        vocabulary: the number of different tokens.
    """
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length, trained in row_lengths("train"):
        ids = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (length - trained) + ids[length - trained :]})
    return rows


class Steps(NamedTuple):
    """What real steps held.

    Attributes:
        peak_bytes: the most that was alive.
        reserved_bytes: the most that CUDA's allocator had taken for it; none on a CPU.
        trained_tokens: of a micro-batch.
        attention_kernel: the one that ran.
    """

    peak_bytes: int
    reserved_bytes: int | None
    trained_tokens: int
    attention_kernel: str


def lengths_of_a_batch(recipe: Recipe, plan: Plan) -> list[int]:
    """Of its documents: packed rows are of two; of several rows all but the first are shorter, so that there is a mask.

    What it takes is that of a batch of ``data.max_length`` in all rows.
    """
    rows, tokens = recipe.train.batch_size, recipe.data.max_length
    return [tokens // 2] * 2 * rows if plan.collator else [tokens, *[tokens * 3 // 4] * (rows - 1)]


def train_two_steps(recipe: Recipe, plan: Plan, weights: Weights) -> Steps:
    """Two optimizer steps of the trainer on freshly loaded weights; from the second on the optimizer's states live."""
    lengths = lengths_of_a_batch(recipe, plan)
    batch = [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in lengths]
    rows = batch * 2 * plan.training["gradient_accumulation_steps"]
    settings = recipe.train.model_copy(update={"max_steps": 2, "save_steps": 1000, "save_minutes": 0})
    torch.manual_seed(0)
    meter = Meter(plan.device.kind)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = fit(load(plan, weights), plan, settings, rows, [], Checkpoints(Path(folder)), pad_id=2, meter=meter)
    finally:
        free_memory()
    peak = max(entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry)
    reserved = meter.phases["train"].get("reserved_bytes")
    return Steps(peak, reserved, sum(lengths) - len(lengths), run.attention_kernel)


def path_of(case: str, results: Path | None = None) -> Path:
    """Name ``results/DEVICE/CASE.json``, where DEVICE is ``cpu`` or the card's name."""
    device = this_device()
    return (results or HERE / "results") / folder_of(device.kind, device.name) / f"{case}.json"


def write(case: str, result: dict[str, Any], results: Path | None = None) -> Path:
    """Write a result file, and say where."""
    path = path_of(case, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
