r"""Data x tensor x pipeline: processes as a cube. Each axis divides something else: rows, matrices, blocks.

Saves    of L blocks' weights, gradients and optimizer states L / S blocks a process, and 1 / M of each matrix in them;
         time: the N groups of S M processes share a step's micro-batches                             [bytes, seconds]
Costs    tensor parallelism's sums in every block, a pipeline's idle slots, one sum of each process's own gradients; a
         pipeline's hidden states travel M times, once for each process of a stage
Claim    exact within rounding: losses and gradients are those of one process
Needs    N x S x M processes, and what each axis needs: k divisible by N, k / N >= S, heads divisible by M, LoRA
Breaks   what breaks one of the axes: packed weights, heads that do not divide, fewer micro-batches than stages
Sources  Narayanan et al. 2021, arXiv:2104.04473, sec. 3 (which axis how long: tensor within a machine, stages across)
Ours     which processes share rows, blocks and matrices. Lesson 24 trains the tiny model so, and compares its losses
         with those of one process: the trainer is the pipeline's, the matrices are cut as by parallel.strategy=tensor

Shapes: a cube of (N, S, M) processes: N pipelines of S stages of M processes; k micro-batches a step.
"""

from collections.abc import Mapping
from dataclasses import replace

from cria_tricks.bill.calls import Call
from cria_tricks.models.shape import Shape
from cria_tricks.parallel import ddp_tensor, pipeline, tensor
from cria_tricks.recipe import Recipe, with_settings

COMMAND = "cria_tricks.course.hybrid_demo.over_the_cube"
CLAIM = "exact"
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
    found = dict[str, list[int]]()
    step = 1
    for axis, size in reversed(list(sizes.items())):
        first = rank - rank // step % size * step
        found[axis] = [first + place * step for place in range(size)]
        step *= size
    return {axis: found[axis] for axis in sizes}


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
    k = recipe.tricks.gradient_accumulation // sizes["data"]
    tokens = tokens or recipe.data.max_length
    here = with_settings(recipe, [f"tricks.gradient_accumulation={k}", f"data.max_length={tokens}"])
    part = replace(shape, layers=shape.layers // sizes["stage"])
    group = sizes["tensor"]
    calls = [*tensor.traffic(here, part, group), *pipeline.traffic(here, shape, sizes["stage"], stage)]
    if stage > 0 and not recipe.tricks.gradient_checkpointing:
        why = "the gradient of the first q, k and v's input, for the stage before"
        calls.append(Call("all_reduce", pipeline.hidden_bytes(here, shape, tokens), 3 * k, group, why))
    calls.append(Call("all_reduce", 8, 1, group, "the square of the norm of its pieces"))
    own = ddp_tensor.own_weights(recipe, part, group)
    if sizes["data"] > 1:
        calls.append(Call("all_reduce", 4 * own + 4, 1, sizes["data"], "fp32 gradients of its pieces, and the loss"))
    return calls
