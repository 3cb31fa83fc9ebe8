r"""Data x tensor parallelism: groups of processes share the matrices, and the groups share the rows.

Saves    as many bytes as tensor parallelism over M processes; time, because N / M groups share the rows of a step
         [bytes, seconds]
Costs    tensor parallelism's sums inside each group; once a step each process all-reduces its gradients with the
         processes that hold the same pieces in the other groups
Claim    exact within rounding
Needs    processes = groups x parallel.tensor_size; as many micro-batches a step as groups, or a multiple; dropout 0 for
         the same losses as one process
Breaks   what tensor parallelism breaks; a group that spans two machines: its sums then cross the slow network
Sources  Shoeybi et al. 2019, arXiv:1909.08053, sec. 5.1; Narayanan et al. 2021, arXiv:2104.04473, sec. 3.2
Ours     15 lines: gradients are averaged over one dimension of the grid. torch's DistributedDataParallel by itself
         takes no DTensor, so the switch does the same after the last backward pass, in one all-reduce

Shapes: a grid of (N / M, M) processes: N / M groups of parallel.tensor_size = M; a window of k micro-batches, k M / N
for each group.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.models.shape import Shape
from cria_tricks.parallel import tensor
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.rules import several, share_window
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.step_plan import Plan
from cria_tricks.switches import folds
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="hybrid", switches=("strategy=ddp_tensor",))
IN_PIECES = True  # a process holds only pieces of the matrices, so the trainer clips by the norm over all pieces
REFERENCE = ("average_gradients", "add_up")
PLAIN = """
# torchrun --nproc-per-node 4 train.py
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
# tensor parallelism over mesh["tensor"], then after the backward pass, for each parameter:
# torch.distributed.all_reduce(parameter.grad.to_local(), group=mesh["data"].get_group())
"""


def average_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over the processes that hold the same pieces of the same matrices, in place.

    Args:
        parameters: plain tensors and ``DTensor``; of a ``DTensor`` the local piece is averaged.
        group: the processes that have the same rank in their tensor group.
    """
    from cria_tricks.parallel.dtensor import own  # DTensor takes half a second to import

    gradients = [own(p.grad) for p in parameters if p.grad is not None]
    add_up(gradients, group)
    # The trainer multiplies each loss by the number of groups, as it does for DDP, which averages, too.
    for gradient in gradients:
        gradient /= dist.get_world_size(group)


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Divide the micro-batches of each window among the groups, and the blocks' matrices among a group's processes."""
    several("ddp_tensor", processes)
    size = recipe.parallel.tensor_size
    # A single group is refused, too: that is parallel.strategy=tensor.
    if processes % size or processes == size:
        raise BadInput(
            f"parallel.strategy=ddp_tensor with {processes} processes: they make no grid of two groups or more of "
            f"parallel.tensor_size={size}; start {2 * size}, or a larger multiple of {size}"
        )
    tensor.refuse_unsplittable(recipe)
    plan = tensor.in_pieces(plan.with_("parallel", strategy="ddp_tensor", data=processes // size), recipe)
    return share_window(plan, recipe, processes // size)


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Cut the blocks' matrices inside each group; ``total`` is a :class:`cria_tricks.load.losses.LossSum`."""
    return tensor.spread(total, plan, world)


@contextlib.contextmanager
def window(total: torch.nn.Module, world: World, last: bool) -> Iterator[None]:
    """Average the gradients over the groups, after the backward pass of the window's last micro-batch.

    A window is the micro-batches of one optimizer step. ``total`` is what :func:`spread` returned.
    """
    with tensor.window(total, world, last):
        yield
    if last:
        assert world.mesh is not None
        average_gradients(total.parameters(), world.mesh["data"].get_group())


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return what one process sends in an optimizer step: its group's sums, then its own gradients over the groups.

    The few numbers that the trainer adds up, such as losses, trained tokens and the gradients' norm, are left out.
    """
    size = recipe.parallel.tensor_size
    groups = processes // size
    # Each group runs only its share of a step's micro-batches. What accumulation is worth is priced with it off, which
    # leaves one micro-batch for all groups: then each is taken to run one.
    each = max(1, recipe.tricks.gradient_accumulation // groups)
    share = with_settings(recipe, [f"tricks.gradient_accumulation={each}"])
    return [
        *tensor.traffic(share, shape, size),
        Call("all_reduce", 4 * own_weights(recipe, shape, size), 1, groups, "fp32 gradients of its pieces"),
    ]


def own_weights(recipe: Recipe, shape: Shape, size: int) -> int:
    """Count the trained weights that one process holds; of LoRA's A and B one is cut, and the other is whole.

    Args:
        recipe: what is trained.
        shape: the model's shape.
        size: M, the number of processes in a tensor group.
    """
    whole = folds.step_of(recipe, shape, T4)  # the same on any card
    if whole.trains_all:
        cut = 0
        for name, (d_in, d_out) in shape.linears.items():
            # In a column-parallel matrix the outputs are cut, and so is the bias. A row-parallel matrix keeps its whole
            # bias, because it is added once, after the sum over the processes.
            cut += d_in * d_out + d_out * (name in shape.biased and name not in tensor.ROWS)
        cut *= shape.layers
        return whole.trained_weights - cut + cut // size
    total = 0
    for name in whole.adapted:
        d_in, d_out = shape.linears[name]
        if name in tensor.ROWS:  # A, of shape (r, D_in), is cut
            total += d_in // size + d_out
        else:  # B, of shape (D_out, r), is cut
            total += d_in + d_out // size
    return shape.layers * recipe.lora.r * total
