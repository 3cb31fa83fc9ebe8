r"""Data x tensor x pipeline: processes as a cube. Each axis divides something else: rows, matrices, blocks.

Saves    of L blocks' weights, gradients and optimizer states L / S blocks a process, and 1 / M of each matrix in them;
         time: the N groups of S M processes share a step's micro-batches                             [bytes, seconds]
Costs    tensor parallelism's sums in every block, a pipeline's idle slots, one sum of each process's own gradients; a
         pipeline's hidden states travel M times, once for each process of a stage
Claim    exact within rounding: losses and gradients are those of one process
Needs    N x S x M processes, and what each axis needs: k divisible by N, k / N >= S, heads divisible by M, LoRA
Breaks   what breaks one of the axes: packed weights, heads that do not divide, fewer micro-batches than stages
Sources  Narayanan et al. 2021, arXiv:2104.04473, sec. 3 (which axis how long: tensor within a machine, stages across)
Ours     who shares what with whom, and a script on the tiny model that lays the cube's losses beside those of one
         process. The loop is the pipeline's, the matrices are cut as by parallel.strategy=tensor

Shapes: a cube of (N, S, M) processes: N pipelines of S stages of M processes; k micro-batches a step.

``torchrun --nproc-per-node 8 -m cria_tricks.parallel.hybrid`` runs it.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cria_tricks.data.tokens import IGNORED
from cria_tricks.errors import BadInput
from cria_tricks.memory.shape import Shape
from cria_tricks.parallel import ddp_tensor, numbers, pipeline, script, sharded, tensor
from cria_tricks.parallel import world as processes
from cria_tricks.parallel.pipeline_loop import Loop
from cria_tricks.parallel.pipeline_run import find_blocks, refuse
from cria_tricks.parallel.traffic import Call
from cria_tricks.parallel.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.trainer import Run

CLAIM = "exact within rounding"
LESSON = "24_hybrid"
REFERENCE = ("lines",)
PLAIN = """
# torchrun --nproc-per-node 8 train.py
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("data", "stage", "tensor"))
# parallelize_module(block, mesh["tensor"], ...) for each block of this stage;
# PipelineStage(..., group=mesh.get_group("stage")); and after the schedule's step, for each parameter:
# torch.distributed.all_reduce(parameter.grad.to_local(), group=mesh.get_group("data"))
"""
AXES = ("data", "stage", "tensor")
"""From the outermost, whose processes may be far from each other, to the innermost: it sends most, and most often."""
TINY = (
    "model=random:tiny", "tricks.peft=lora", "lora.r=4", "tricks.gradient_accumulation=4", "train.learning_rate=0.005",
)  # fmt: skip


def lines(rank: int, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """The lines of the cube that a process stands in: with whom it shares rows, stages and matrices.

    Args:
        rank: the process.
        sizes: of the axes, from the outermost to the innermost.

    Returns:
        For each axis the processes that differ in nothing else.

    Examples:
        >>> lines(5, {"data": 2, "stage": 2, "tensor": 2})
        {'data': [1, 5], 'stage': [5, 7], 'tensor': [4, 5]}
    """
    found, step = dict[str, list[int]](), 1
    for axis, size in reversed(list(sizes.items())):
        first = rank - rank // step % size * step
        found[axis] = [first + place * step for place in range(size)]
        step *= size
    return {axis: found[axis] for axis in sizes}


class CubeLoop(Loop):
    """The pipeline's loop over matrices of which each process holds a piece."""

    def gradients(self) -> list[torch.Tensor]:
        """This process's own pieces, and the gradients of what is whole."""
        return [sharded.own(gradient) for gradient in super().gradients()]

    def square(self) -> float:
        """Of a stage: what is whole counts once, pieces are added up over the processes that share a matrix."""
        return sharded.square(super().gradients()).item()


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
    from cria_tricks.parallel.pipeline_fit import fit

    plan, loaded = _loaded(recipe)
    config = loaded.model.config
    mesh = processes.grid(plan.device.kind, **sizes)
    widths = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    tensor.refuse_undivided(recipe.model, *widths, sizes["tensor"])
    tensor.split(loaded.model, mesh["tensor"])
    parts = find_blocks("", config.num_hidden_layers, sizes["stage"], config.model_type)
    here = World(numbers.rank(), numbers.processes(), sizes["data"])
    data = {"train": rows, "eval": rows[:1]}
    return fit(loaded.model, plan, recipe, data, parts, here, pad_id=0, mesh=mesh, kind=CubeLoop)


def alone(recipe: Recipe, rows: Sequence[dict[str, list[int]]]) -> Run:
    """Train on the same rows in this process, by the shared trainer."""
    from cria_tricks.checkpoints import Checkpoints
    from cria_tricks.trainer import fit

    plan, loaded = _loaded(recipe)
    with tempfile.TemporaryDirectory() as folder:
        return fit(loaded, plan, recipe.train, rows, (), Checkpoints(Path(folder)), pad_id=0)


def _loaded(recipe: Recipe) -> tuple[Plan, Any]:
    from cria_tricks import models
    from cria_tricks.load import load

    plan = resolve(recipe)
    torch.manual_seed(recipe.train.seed)
    return plan, load(plan, models.find(recipe.model))


def random_rows(many: int = 11, longest: int = 24) -> list[dict[str, list[int]]]:
    """Rows of random words, of ragged lengths; eleven leave the last window of four one row short."""
    draw = random.Random(0)
    rows = [[draw.randrange(3, 500) for _ in range(draw.randint(6, longest))] for _ in range(many)]
    return [{"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]} for ids in rows]


def traffic(
    recipe: Recipe, shape: Shape, sizes: Mapping[str, int], stage: int = 0, tokens: int | None = None
) -> list[Call]:
    """What a process of one stage sends in an optimizer step: along each axis its own.

    Args:
        recipe: what is trained, with LoRA on the blocks.
        shape: the model's, whose blocks the stages share evenly.
        sizes: of the cube's axes.
        stage: which one.
        tokens: of a row; ``data.max_length`` when left out.
    """
    k, tokens = recipe.tricks.gradient_accumulation // sizes["data"], tokens or recipe.data.max_length
    here = with_settings(recipe, [f"tricks.gradient_accumulation={k}", f"data.max_length={tokens}"])
    part, group = replace(shape, layers=shape.layers // sizes["stage"]), sizes["tensor"]
    calls = [*tensor.traffic(here, part, group), *pipeline.traffic(here, shape, sizes["stage"], stage)]
    if stage > 0 and not recipe.tricks.gradient_checkpointing:
        why = "the gradient of the first q, k and v's input, for the stage before"
        calls.append(Call("all_reduce", pipeline.hidden_bytes(here, shape, tokens), 3 * k, group, why))
    calls.append(Call("all_reduce", 8, 1, group, "the square of the norm of its pieces"))
    own = ddp_tensor.own_weights(recipe, part, group)
    if sizes["data"] > 1:
        calls.append(Call("all_reduce", 4 * own + 4, 1, sizes["data"], "fp32 gradients of its pieces, and the loss"))
    return calls


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
        here, rows = World(numbers.rank(), numbers.processes()), random_rows()
        expected = here.first(lambda: alone(recipe, rows)).training
        _, found = over_the_cube(recipe, rows, sizes)
        if here.is_first:
            print(f"step  one process  {data} x {stages} x {size:<8}  difference")
            for one, cube in zip(expected, found.training, strict=True):
                difference = cube["loss"] - one["loss"]
                print(f"{one['step']:4}  {one['loss']:11.6f}  {cube['loss']:13.6f}  {difference:10.1e}")


if __name__ == "__main__":
    script.run(command)
