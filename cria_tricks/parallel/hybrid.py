r"""Data x tensor x pipeline: the processes form a cube, whose three axes divide the rows, the matrices and the blocks.

Saves    weights, gradients and optimizer states: a process has L / S of the L blocks, and 1 / M of each matrix in them;
         time: the N groups of S M processes share a step's micro-batches                             [bytes, seconds]
Costs    tensor parallelism's sums in every block, a pipeline's idle slots, and once a step an all-reduce of each
         process's own gradients; a pipeline's hidden states are sent M times, once by each process of a stage
Claim    exact within rounding: losses and gradients are those of one process
Needs    N x S x M processes, and what each axis needs: k divisible by N, k / N >= S, heads divisible by M, LoRA
Breaks   what breaks one of the axes: packed weights, heads that do not divide, fewer micro-batches than stages
Sources  Narayanan et al. 2021, arXiv:2104.04473, sec. 3 (how long to make each axis: tensor within a machine, stages
         across machines)
Ours     which processes share rows, blocks and matrices. lessons/hybrid.py trains the tiny model so, and compares its
         losses with those of one process: the trainer is the pipeline's, the matrices are cut as by
         parallel.strategy=tensor

Shapes: a cube of (N, S, M) processes: N pipelines of S stages of M processes; k micro-batches a step.
"""

from collections.abc import Mapping
from dataclasses import replace

from cria_tricks.bill.calls import Call
from cria_tricks.models.shape import Shape
from cria_tricks.parallel import ddp_tensor, pipeline, tensor
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches.gradient_checkpointing import in_stage
from cria_tricks.technique import Technique

TECHNIQUE = Technique(
    claim="exact within rounding", lesson="hybrid", command="cria_tricks.course.hybrid_demo.over_the_cube"
)
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
"""The axes, from the outermost, whose processes may be far apart, to the innermost, which sends most and most often."""


def lines(rank: int, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the three lines of the cube that meet in a process: with whom it divides rows, blocks and matrices.

    Args:
        rank: the rank of the process.
        sizes: the length of each axis, from the outermost to the innermost.

    Returns:
        For each axis the ranks of the processes that have the same place on all other axes, this process included.

    Examples:
        >>> lines(5, {"data": 2, "stage": 2, "tensor": 2})
        {'data': [1, 5], 'stage': [5, 7], 'tensor': [4, 5]}
    """
    found = dict[str, list[int]]()
    step = 1  # the distance between the ranks of two neighbours on this axis
    for axis, size in reversed(list(sizes.items())):
        # rank // step % size is this process's place on the axis, so this goes back to place 0.
        first = rank - rank // step % size * step
        found[axis] = [first + place * step for place in range(size)]
        step *= size
    return {axis: found[axis] for axis in sizes}


def traffic(
    recipe: Recipe, shape: Shape, sizes: Mapping[str, int], stage: int = 0, tokens: int | None = None
) -> list[Call]:
    """Return what a process of one stage sends in an optimizer step, along all axes.

    Args:
        recipe: what is trained, with LoRA on the blocks.
        shape: the shape of the model; its stages have the same number of blocks.
        sizes: the length of each axis.
        stage: the stage of the process.
        tokens: the tokens of a row; ``data.max_length`` if left out.
    """
    k = recipe.tricks.gradient_accumulation // sizes["data"]
    tokens = tokens or recipe.data.max_length
    part = replace(shape, layers=shape.layers // sizes["stage"])
    here = with_settings(recipe, [f"tricks.gradient_accumulation={k}", f"data.max_length={tokens}"])
    here = in_stage(here, stage * part.layers, part.layers)
    group = sizes["tensor"]
    inside = tensor.traffic(here, part, group, first=stage == 0)
    calls = [*inside, *pipeline.traffic(here, shape, sizes["stage"], stage)]
    calls.append(Call("all_reduce", 8, 1, group, "the square of the norm of its pieces"))
    own = ddp_tensor.own_weights(recipe, part, group)
    if sizes["data"] > 1:
        calls.append(Call("all_reduce", 4 * own + 4, 1, sizes["data"], "fp32 gradients of its pieces, and the loss"))
    return calls
