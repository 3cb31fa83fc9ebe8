r"""Data x pipeline: several pipelines side by side, each with its share of the micro-batches.

Saves    time: each pipeline takes k / N of a step's micro-batches. n processes in N pipelines idle n - N slots
         for k slots of work, so more and shorter pipelines idle less; in bytes what one pipeline saves    [seconds]
Costs    the weights N times; once a step an all-reduce of each stage's gradients over the N pipelines
Claim    exact within rounding: losses, gradients and the adapter are those of one process
Needs    k divisible by N, and k / N >= S; processes: N x S
Breaks   only what one pipeline breaks: the sum comes after the last backward pass, and before the clipping
Sources  Narayanan et al. 2021, arXiv:2104.04473, sec. 3.3.1 (data beside pipeline parallelism: the bubble)
Ours     the place of each process in the grid, and one all-reduce of a flat copy of the gradients: this reference is
         also what runs. The rest is the pipeline's. DistributedDataParallel around a stage of torch's (2.13) gives the
         right sum once, and fails in the second step by an assertion inside torch

Shapes: N pipelines of S stages; k micro-batches a step, k / N a pipeline.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cria_tricks.bill.calls import Call
from cria_tricks.hardware import T4
from cria_tricks.models.shape import Shape
from cria_tricks.parallel import pipeline
from cria_tricks.recipe import Recipe
from cria_tricks.switches import folds
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="hybrid", switches=("strategy=pipeline", "pipelines=2"))
REFERENCE = ("place", "partners", "add_up")
PLAIN = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "stage"))
stage = PipelineStage(
    my_blocks, stage_index=mesh.get_local_rank("stage"), num_stages=2, device=device, group=mesh.get_group("stage")
)
Schedule1F1B(stage, n_microbatches=4, loss_fn=summed_loss, scale_grads=False).step(...)
for parameter in my_blocks.parameters():
    torch.distributed.all_reduce(parameter.grad, group=mesh.get_group("data"))
"""


def place(rank: int, stages: int) -> tuple[int, int]:
    """Return the pipeline and the stage of a process. Neighbouring stages of a pipeline have neighbouring ranks.

    Examples:
        >>> [place(rank, stages=2) for rank in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return divmod(rank, stages)


def partners(rank: int, stages: int, processes: int) -> list[int]:
    """Return the processes that have the same stage as this one, so that their gradients must be summed.

    Examples:
        >>> partners(1, stages=2, processes=4)
        [1, 3]
    """
    return list(range(rank % stages, processes, stages))


def add_up(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over a group, in one all-reduce, because each call has a latency.

    Each loss was divided by the trained tokens of all pipelines, so the gradients are added and not averaged.

    Args:
        tensors: tensors of one dtype, with the same shapes in every process of the group.
        group: the process group of :func:`partners`.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def bubble(processes: int, data: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage is idle, for ``data`` pipelines with ``micro_batches`` in all.

    Examples:
        >>> [round(bubble(4, data, 8), 3) for data in (1, 2)]
        [0.273, 0.2]
    """
    return pipeline.bubble(processes // data, micro_batches // data)


def traffic(
    recipe: Recipe, shape: Shape, processes: int, data: int = 2, stage: int = 0, tokens: int | None = None
) -> list[Call]:
    """Return what a process of one stage sends in an optimizer step.

    Args:
        recipe: what is trained, with LoRA on the blocks.
        shape: the shape of the model; its stages have the same number of blocks.
        processes: the number of processes of all pipelines together.
        data: the number of pipelines.
        stage: the stage of the process.
        tokens: the tokens of a row; ``data.max_length`` if left out.
    """
    stages = processes // data
    trained = folds.step_of(recipe, shape, T4).trained_weights // stages
    gradients = Call("all_reduce", 4 * trained + 4, 1, data, "fp32 gradients of the stage, and the loss")
    return [*pipeline.traffic(recipe, shape, stages, stage, tokens, shares=data), gradients]
