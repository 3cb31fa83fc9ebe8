"""The cube of ``parallel/hybrid.py`` on the tiny model: its losses beside those of one process.

``torchrun --nproc-per-node 8 -m cria_tricks.course.hybrid_demo`` runs it.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.model import load
from cria_tricks.models import shape
from cria_tricks.parallel import tensor
from cria_tricks.parallel.hybrid import AXES
from cria_tricks.processes import numbers
from cria_tricks.processes import world as processes
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.pipeline import find_blocks, refuse
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer import pipeline_fit
from cria_tricks.trainer.fit import Run, fit
from cria_tricks.trainer.pipeline_loop import CubeLoop, Loop

TINY = (
    "model=random:tiny", "tricks.peft=lora", "lora.r=4", "tricks.gradient_accumulation=4", "train.learning_rate=0.005",
)  # fmt: skip


def refuse_cube(recipe: Recipe, size: int, sizes: Mapping[str, int]) -> None:
    """Hold a recipe and a number of processes against a cube.

    Raises:
        BadInput: with the reason and what to use.
    """
    needed = sizes["data"] * sizes["stage"] * sizes["tensor"]
    if size != needed:
        grid = " x ".join(f"{size} ({axis})" for axis, size in sizes.items())
        raise BadInput(f"{size} process{'es' * (size > 1)} for a cube of {grid}: start {needed}")
    refuse(recipe, sizes["data"] * sizes["stage"], sizes["data"])
    tensor.refuse_unsplittable(recipe)


def over_the_cube(recipe: Recipe, rows: Sequence[dict[str, list[int]]], sizes: Mapping[str, int]) -> tuple[Loop, Run]:
    """Train on rows in all processes; each returns its part and the same losses."""
    plan, loaded = _loaded(recipe)
    config = loaded.model.config
    mesh = processes.grid(plan.device.kind, **sizes)
    widths = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    shape.refuse_undivided(recipe.model, *widths, sizes["tensor"])
    tensor.split(loaded.model, mesh["tensor"])
    parts = find_blocks("", config.num_hidden_layers, sizes["stage"], config.model_type)
    here = World(numbers.rank(), numbers.processes(), sizes["data"])
    data = {"train": rows, "eval": rows[:1]}
    return pipeline_fit.fit(loaded.model, plan, recipe, data, parts, here, pad_id=0, mesh=mesh, kind=CubeLoop)


def alone(recipe: Recipe, rows: Sequence[dict[str, list[int]]]) -> Run:
    """Train on the same rows in this process, by the shared trainer."""
    plan, loaded = _loaded(recipe)
    with tempfile.TemporaryDirectory() as folder:
        return fit(loaded, plan, recipe.train, rows, (), Checkpoints(Path(folder)), pad_id=0)


def _loaded(recipe: Recipe) -> tuple[Plan, Any]:
    plan = resolve(recipe)
    torch.manual_seed(recipe.train.seed)
    return plan, load(plan, models.find(recipe.model))


def random_rows(many: int = 11, longest: int = 24) -> list[dict[str, list[int]]]:
    """Rows of random words, of ragged lengths; eleven leave the last window of four one row short."""
    draw = random.Random(0)
    rows = []
    for _ in range(many):
        ids = [draw.randrange(3, 500) for _ in range(draw.randint(6, longest))]
        rows.append({"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]})
    return rows


def command(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 5,
    data: Annotated[int, typer.Option(min=1, help="Groups that share the rows.")] = 2,
    stages: Annotated[int, typer.Option(min=1, help="Stages of a pipeline.")] = 2,
    size: Annotated[int, typer.Option("--tensor", min=1, help="Processes that share a stage's matrices.")] = 2,
) -> None:
    """Train the tiny model over a cube of processes, and lay its losses beside those of one process."""
    recipe = with_settings(Recipe(), [*TINY, f"train.max_steps={steps}"])
    sizes = dict(zip(AXES, (data, stages, size), strict=True))
    refuse_cube(recipe, numbers.processes(), sizes)
    with processes.joined(recipe.parallel.timeout):
        here = World(numbers.rank(), numbers.processes())
        rows = random_rows()
        expected = here.first(lambda: alone(recipe, rows)).training
        _, found = over_the_cube(recipe, rows, sizes)
        if here.is_first:
            print(f"step  one process  {data} x {stages} x {size:<8}  difference")
            for one, cube in zip(expected, found.training, strict=True):
                difference = cube["loss"] - one["loss"]
                print(f"{one['step']:4}  {one['loss']:11.6f}  {cube['loss']:13.6f}  {difference:10.1e}")


if __name__ == "__main__":
    from cria_tricks.processes import script

    script.run(command)
