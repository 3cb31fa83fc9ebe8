"""Measure the capstone's shape with no download: rows of the real lengths, random weights and random tokens.

Random weights cost what trained ones cost. Their losses mean nothing, so none is kept.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from cria_tricks import models, recipes
from cria_tricks.bench.case import Rows, estimated, free_memory, out_of_memory, stamp
from cria_tricks.bench.results import Case
from cria_tricks.common.errors import BadInput, Interrupted
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import Device, this_device
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.allocator import keep_freed_memory
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import Run, fit

NAME = "kwanzaa"
WARM_UP = 1
"""Steps that are not timed: the first one also makes the optimizer states."""
OFTEN = 10**6
"""Steps between two checkpoints: more than there are."""


def recipe_for(device: Device, shape: str, tokens: int, steps: int) -> Recipe:
    """Return the recipe ``kwanzaa`` for a shape.

    Args:
        device: the device that trains.
        shape: the model's shape.
        tokens: the length to which the longest row is brought; the real one has 2,048 tokens.
        steps: optimizer steps; 0 for the recipe's three epochs.
    """
    fixed = [f"model=random:{shape}", f"data.max_length={tokens}", f"train.max_steps={steps}"]
    return with_settings(recipes.kwanzaa(device), [*fixed, f"train.save_steps={OFTEN}", "train.save_minutes=0"])


def real_rows(vocabulary: int, tokens: int = 2048) -> Rows:
    """Draw random tokens for rows of the real lengths, with the same share of them trained.

    Args:
        vocabulary: the number of different tokens.
        tokens: the length to which the longest row is brought; the real one has 2,048 tokens.
    """
    draw = torch.Generator().manual_seed(0)
    rows = []
    for real, real_trained in row_lengths("train"):
        length = max(2, real * tokens // 2048)
        trained = max(1, real_trained * tokens // 2048)
        ids = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (length - trained) + ids[length - trained :]})
    return rows


def prepared(shape: str, tokens: int, steps: int) -> tuple[Recipe, Plan, Rows]:
    """Return what is trained; the arguments are those of :func:`recipe_for`.

    Raises:
        BadInput: if a switch cannot work here.
    """
    recipe = recipe_for(this_device(), shape, tokens, steps)
    return recipe, resolve(recipe), real_rows(CONFIGS[shape]["vocab_size"], tokens)


def measure(shape: str, tokens: int, steps: int) -> Case:
    """Train the capstone's steps on this machine; running out of memory is a result, too.

    Args:
        shape: as for :func:`recipe_for`.
        tokens: as for :func:`recipe_for`.
        steps: as for :func:`recipe_for`.
    """
    device = this_device()
    recipe = recipe_for(device, shape, tokens, steps)
    about: dict[str, Any] = {
        "bench": "capstone",
        "name": NAME,
        "settings": _changed(recipe),
        "model": recipe.model,
        "rows": recipe.rows_per_step,
        "tokens_per_row": tokens,
        "kind": device.kind,
        **stamp(),
    }
    try:
        job = prepared(shape, tokens, steps)
        about |= {"warnings": job[1].warnings, "estimated_bytes": estimated(*job).allocated_bytes}
        meter = Meter(device.kind, compiled=job[1].compiled)
        with keep_freed_memory(device):
            run = _train(*job, meter)
    except BadInput as refused:
        return Case(**about, status="refused", why=str(refused))
    except (RuntimeError, MemoryError) as error:
        return Case(**about, status="oom", why=out_of_memory(error))
    timed = [entry for entry in run.training[WARM_UP:] if not entry["skipped"]] or run.training
    return Case(
        **about,
        status="ok",
        tokens=round(_mean(timed, "tokens")),
        trained_tokens=round(_mean(timed, "trained_tokens")),
        seconds=tuple(entry["step_seconds"] for entry in timed),
        peak_allocated_bytes=max(entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry),
        peak_reserved_bytes=meter.phases["train"].get("reserved_bytes"),
        attention_kernel=run.attention_kernel,
    )


def _changed(recipe: Recipe) -> list[str]:
    """List the switches that a recipe changes, as ``--set`` takes them."""
    plain = Recipe().tricks.model_dump()
    changed = {field: value for field, value in recipe.tricks.model_dump().items() if value != plain[field]}
    return [f"tricks.{field}={str(value).lower()}" for field, value in changed.items()]


def _train(recipe: Recipe, plan: Plan, rows: Rows, meter: Meter) -> Run:
    free_memory()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            loaded = load(plan, models.find(recipe.model))
            return fit(loaded, plan, recipe.train, rows, [], Checkpoints(Path(folder)), pad_id=0, meter=meter)
        except Interrupted:
            raise KeyboardInterrupt from None  # as in bench/case.py: Ctrl-C ends all cases


def _mean(entries: list[dict[str, Any]], key: str) -> float:
    return sum(entry[key] for entry in entries) / len(entries)
