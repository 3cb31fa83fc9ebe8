r"""Data x pipeline: several pipelines side by side, each with its share of the micro-batches.

Saves    time: each pipeline takes k / N of a step's micro-batches. In bytes a process is one of a pipeline. Of n
         processes, N pipelines idle n - N slots for k slots of work: more and shorter ones idle less      [seconds]
Costs    the weights N times; the gradients of equal stages are added up over the N pipelines, once a step
Claim    exact within rounding: losses, gradients and the adapter are those of one process
Needs    k divisible by N, and k / N >= S; processes: N x S
Breaks   nothing that one pipeline does not: the sum comes after the last backward pass, and before the clipping
Sources  Narayanan et al. 2021, arXiv:2104.04473, sec. 3.3.1 (data beside pipeline parallelism: the bubble)
Ours     where each process stands, and one all-reduce of a flat copy of the gradients: the reference and what runs, in
         one. The rest is the pipeline's. DistributedDataParallel around a stage of torch's (2.13) gives the right sum
         once, and fails in the second step by an assertion inside torch

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
from cria_tricks.tricks import folds

SWITCHES = ("strategy=pipeline", "pipelines=2")
CLAIM = "exact"
LESSON = "24_hybrid"
REFERENCE = ("place", "partners", "add_up")
PLAIN = """
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
    """Where a process stands: its pipeline and its stage. Neighbours in a pipeline have neighbouring numbers.

    Examples:
        >>> [place(rank, stages=2) for rank in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return divmod(rank, stages)


def partners(rank: int, stages: int, processes: int) -> list[int]:
    """The processes that have the same stage: their gradients belong together.

    Examples:
        >>> partners(1, stages=2, processes=4)
        [1, 3]
    """
    return list(range(rank % stages, processes, stages))


def add_up(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over a group, in one call: hundreds of thin matrices would wait hundreds of times.

    Losses are divided by the trained tokens of all pipelines, so the gradients are added and not averaged.

    Args:
        tensors: of the same shapes in every process of the group, and of one dtype.
        group: of :func:`partners`.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def bubble(processes: int, data: int, micro_batches: int) -> float:
    """The share of its step that a stage has nothing to do, of ``micro_batches`` over all pipelines.

    Examples:
        >>> [round(bubble(4, data, 8), 3) for data in (1, 2)]
        [0.273, 0.2]
    """
    return pipeline.bubble(processes // data, micro_batches // data)


def traffic(
    recipe: Recipe, shape: Shape, processes: int, data: int = 2, stage: int = 0, tokens: int | None = None
) -> list[Call]:
    """What a process of one stage sends in an optimizer step.

    Args:
        recipe: what is trained, with LoRA on the blocks.
        shape: the model's, whose blocks the stages share evenly.
        processes: of all pipelines.
        data: pipelines.
        stage: which one.
        tokens: of a row; ``data.max_length`` when left out.
    """
    stages = processes // data
    trained = folds.work(recipe, shape, T4).trained_weights // stages
    gradients = Call("all_reduce", 4 * trained + 4, 1, data, "fp32 gradients of the stage, and the loss")
    return [*pipeline.traffic(recipe, shape, stages, stage, tokens, shares=data), gradients]
