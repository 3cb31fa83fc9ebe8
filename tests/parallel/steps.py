"""What joined processes are asked to do in these tests: one optimizer step's gradients, or a whole training run."""

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import cria_tricks
from cria_tricks import models
from cria_tricks.load import losses
from cria_tricks.load.model import load
from cria_tricks.measure.counting import CountCollectives
from cria_tricks.parallel import dtensor
from cria_tricks.processes import numbers
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.trainer.strategy import Spread

TINY = ("model=random:tiny", "data.max_length=24", "tricks.gradient_accumulation=4", "tricks.peft=lora", "lora.r=4")
"""Two blocks of four heads, and two of keys; a step of four rows."""


def recipe_of(*settings: str) -> Recipe:
    return with_settings(Recipe(name="short"), [*TINY, *settings])


def micro_batches(recipe: Recipe) -> list[dict[str, torch.Tensor]]:
    """A window's, with full rows; in the last one half of the tokens are trained."""
    draw, shape = torch.Generator().manual_seed(3), (recipe.train.batch_size, recipe.data.max_length)
    found = []
    for number in range(recipe.tricks.gradient_accumulation):
        ids = torch.randint(3, 500, shape, generator=draw)
        labels = ids.clone()
        if number == recipe.tricks.gradient_accumulation - 1:
            labels[:, : shape[1] // 2] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def step(recipe: Recipe) -> dict[str, Any]:
    """The gradients of one optimizer step, whole, in the first process; what was sent; what each process holds."""
    torch.manual_seed(0)
    plan = resolve(recipe, processes=numbers.processes())
    here = World.of(plan.parallel["data"], "cpu")
    model = load(plan, models.find(recipe.model)).model
    for name, parameter in model.named_parameters():  # LoRA's B begins at zero, and A would get no gradient
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    half = recipe.tricks.precision == "bf16"
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16) if half else contextlib.nullcontext
    spread = Spread(losses.LossSum(model, losses.find(plan, autocast)), plan, here)
    spread.over_processes()
    window = micro_batches(recipe)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
    mine = window[here.data_rank :: here.data]
    model.train()
    with CountCollectives() as counted:
        for number, batch in enumerate(mine):
            with spread.window(last=number == len(mine) - 1), autocast():
                (spread.total(batch) / tokens * here.data).backward()
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = dtensor.whole({name: p.grad for name, p in learns.items()})
    return {
        "gradients": {name.replace("_fsdp_wrapped_module.", ""): g.float().numpy() for name, g in gradients.items()},
        "bytes": dict(counted.bytes),
        "weights": sum(dtensor.own(p).nbytes for p in model.parameters()),
        "learning": sum(dtensor.own(p).nbytes for p in learns.values()),
        "norm": float(dtensor.clip(learns.values(), 1e9)),
    }


def write_rows(file: Path, many: int) -> Path:
    """Short questions, with an answer of its own length each."""
    with file.open("w") as lines:
        for number in range(many):
            question = {"role": "user", "content": f"Count to {number}."}
            answer = {"role": "assistant", "content": " ".join(map(str, range(1, number + 2)))}
            lines.write(json.dumps({"messages": [question, answer]}) + "\n")
    return file


def train(settings: list[str], out: Path, resume: bool = False) -> dict[str, Any]:
    """A whole run, in as many processes as have joined; its report."""
    from cria_tricks.run.train import train

    return train(with_settings(Recipe(name="short"), settings), out, resume=resume)


def go_on(recipe: str, settings: list[str], out: Path) -> str:
    """Resume a run of a named recipe; what this process said."""
    said = io.StringIO()
    cria_tricks.train(recipe, out, settings=settings, resume=True, console=Console(file=said, width=1000))
    return said.getvalue()
