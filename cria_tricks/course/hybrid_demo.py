"""Train the tiny model by 3D parallelism (``parallel/hybrid.py``), and in one process on the same rows.

``lessons/hybrid.py`` compares the losses of the two. The processes form a cube with the axes data, stage and tensor.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.model import Loaded, load
from cria_tricks.models.shape import find_shape, refuse_undivided
from cria_tricks.parallel import tensor
from cria_tricks.processes import numbers
from cria_tricks.processes import world as processes
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import Run, fit, training

# LoRA, because the pipeline takes nothing else; four micro-batches in a step, enough for two pipelines of two stages.
TINY = (
    "model=random:tiny", "tricks.peft=lora", "lora.r=4", "tricks.gradient_accumulation=4", "train.learning_rate=0.005",
)  # fmt: skip


def planned(recipe: Recipe, size: int, sizes: Mapping[str, int]) -> Plan:
    """Check that a recipe and a number of processes fit a cube, and make the plan of its pipelines.

    Args:
        recipe: what to train.
        size: the number of processes.
        sizes: the lengths of the cube's axes ``data``, ``stage`` and ``tensor``.

    Raises:
        BadInput: with the reason and what to use.
    """
    needed = sizes["data"] * sizes["stage"] * sizes["tensor"]
    if size != needed:
        grid = " x ".join(f"{size} ({axis})" for axis, size in sizes.items())
        raise BadInput(f"{size} process{'es' * (size > 1)} for a cube of {grid}: start {needed}")
    tensor.refuse_unsplittable(recipe)
    shape = find_shape(recipe.model)
    refuse_undivided(shape.name, shape.heads, shape.kv_heads, shape.inner, sizes["tensor"])
    # The plan leaves the tensor axis out: over_the_cube splits the matrices, so the processes of a stage act as one.
    piped = ["parallel.strategy=pipeline", f"parallel.pipelines={sizes['data']}"]
    return resolve(with_settings(recipe, piped), processes=sizes["data"] * sizes["stage"])


def over_the_cube(recipe: Recipe, rows: Sequence[dict[str, list[int]]], sizes: Mapping[str, int]) -> Run:
    """Train on rows in all processes of a cube. Every process calls this and gets the same losses.

    Args:
        recipe: what to train.
        rows: the tokenised rows.
        sizes: the lengths of the cube's axes ``data``, ``stage`` and ``tensor``. Their order decides which ranks are
            neighbours: those that differ only on the last axis.
    """
    plan = planned(recipe, numbers.processes(), sizes)
    torch.manual_seed(recipe.train.seed)  # so that all processes draw the same weights
    loaded = load(plan, models.find(recipe.model))
    mesh = processes.grid(plan.device.kind, **sizes)
    # Here only the matrices are cut. The trainer removes the blocks of other stages, before it makes the optimizer.
    tensor.split(loaded.model, mesh["tensor"])
    world = World(numbers.rank(), numbers.processes(), sizes["data"], mesh)
    return _fitted(loaded, plan, recipe, rows, world)


def alone(recipe: Recipe, rows: Sequence[dict[str, list[int]]]) -> Run:
    """Train on the same rows in this process."""
    plan = resolve(recipe)
    torch.manual_seed(recipe.train.seed)
    return _fitted(load(plan, models.find(recipe.model)), plan, recipe, rows, World())


def _fitted(loaded: Loaded, plan: Plan, recipe: Recipe, rows: Sequence[dict[str, list[int]]], world: World) -> Run:
    with tempfile.TemporaryDirectory() as folder:  # fit writes checkpoints, and nobody needs them here
        checkpoints = Checkpoints(Path(folder))
        return fit(training(loaded, plan, recipe.train, rows, (), checkpoints, pad_id=0, world=world))


def random_rows(longest: int = 24) -> list[dict[str, list[int]]]:
    """Draw eleven rows of random token ids, with different lengths.

    With four rows in an optimizer step, eleven rows leave the last step one row short. The first three tokens of a row
    are not trained, like the tokens of a prompt.
    """
    draw = random.Random(0)
    # 0 is the padding id, see _fitted; 1 and 2 are the tiny model's ids for the beginning and the end of a text. The
    # model knows 49,152 ids; the first 500 are enough here.
    rows = [[draw.randrange(3, 500) for _ in range(draw.randint(6, longest))] for _ in range(11)]
    return [{"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]} for ids in rows]
