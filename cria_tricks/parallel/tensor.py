r"""Tensor parallelism: every process computes a part of each block's matrices, for the same rows.

Saves    weights of the blocks' matrices, and the wide activations inside a block (heads, MLP): a process has 1 / N of
         each  [bytes]
Costs    two all-reduces of (B, T, D) in every block forward and two backward, and all processes wait for each of them:
         little is gained over PCIe, much is lost over a network. Checkpointing repeats one of those forward. LoRA adds
         one all-reduce a step, of the gradients of its matrices that are not cut. Embedding, norms, head and residual
         stream are whole in all processes; parallel.sequence=true divides the tokens of norms and residual stream, too,
         for as many bytes: an all-gather and a reduce-scatter in place of each all-reduce (parallel/sequence.py). With
         checkpointing it is more, because a repeated block gathers its inputs again
Claim    exact within rounding: the sums over a matrix's inputs are added up in another order
Needs    heads, key heads and the MLP's width divisible by N; dropout 0 for the same losses as one process
Breaks   int8 and 4-bit weights: they are packed while the model loads, and packed bytes have no rows and columns
         (refused); models whose heads do not divide (refused)
Sources  Shoeybi et al. 2019, arXiv:1909.08053, sec. 3 (columns, then rows; the operators f and g); Korthikanti et al.
         2022, arXiv:2205.05198, sec. 4.2.2 (the tokens of norms and residual stream)
Ours     30 lines: f and g, and an MLP of one column and one row matrix. The switch runs the same f and g around
         attention and around the MLP of transformers' models, with peft's LoRA inside, plain or fused. torch's
         parallelize_module has no rule for LoRA's two matrices

Shapes: activations (B, T, D); a column matrix (F / N, D), a row matrix (D, F / N); LoRA A (r, D_in), B (D_out, r).
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cria_tricks.common.errors import BadInput
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.rules import refuse, several
from cria_tricks.parallel.sequence import Stream, hold_in_pieces
from cria_tricks.parallel.tensor_calls import ATTENTION, COLUMNS, ROWS, partial_weights, traffic  # noqa: F401
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="tensor_parallel", switches=("strategy=tensor",))
IN_PIECES = True
REFERENCE = ("Copied", "Summed", "mlp")
PLAIN = """
# torchrun --nproc-per-node 2 train.py
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

mesh = init_device_mesh("cuda", (2,))
column, row, whole = ColwiseParallel(), RowwiseParallel(), (Replicate(),)
named = {"hidden_states": Replicate()}
# PrepareModuleInput is f. The matrices of one input share it, so each sum is made once.
plan = {
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts=named, desired_input_kwarg_layouts=named
    ),
    "self_attn.q_proj": column,
    "self_attn.k_proj": column,
    "self_attn.v_proj": column,
    "self_attn.o_proj": row,
    "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
    "mlp.gate_proj": column,
    "mlp.up_proj": column,
    "mlp.down_proj": row,
}
for block in model.model.layers:
    parallelize_module(block, mesh, plan)
"""


class Copied(torch.autograd.Function):
    """Megatron's f: the identity forward; a sum over the processes backward, because they all used the same input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return x, of shape (..., D), which is the same in all processes of the group."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradients of all processes, of shape (..., D)."""
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """Megatron's g: a sum over the processes forward; the identity backward: each part gets the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum the parts of all processes of the group, of shape (..., D)."""
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the sum, of shape (..., D)."""
        return gradients[0], None


def mlp(x_BTD: torch.Tensor, up_FD: torch.Tensor, down_DF: torch.Tensor) -> torch.Tensor:
    """Compute an MLP of two matrices, down(gelu(up(x))), of which each process computes 1 / N, with one sum at the end.

    Sec. 3: the first matrix is cut by its outputs, so each process can apply the nonlinearity to its own outputs. The
    second is cut by its inputs, so the processes need to exchange only one sum.

    Args:
        x_BTD: the input, the same in all processes.
        up_FD: the whole first matrix; this process uses F / N of its outputs (dimension 0).
        down_DF: the whole second matrix; this process uses F / N of its inputs (dimension 1).
    """
    size = dist.get_world_size()
    rank = dist.get_rank()
    mine_up = up_FD.chunk(size, 0)[rank]
    mine_down = down_DF.chunk(size, 1)[rank]
    inside = torch.nn.functional.gelu(Copied.apply(x_BTD) @ mine_up.T)
    return Summed.apply(inside @ mine_down.T)


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Divide the blocks' matrices among the processes; every process trains on all rows."""
    several(recipe.parallel.strategy, processes)
    refuse_unsplittable(recipe)
    return in_pieces(plan.with_("parallel", strategy="tensor", data=1), recipe)


def in_pieces(plan: Plan, recipe: Recipe) -> Plan:
    """Write sequence parallelism into a plan, if the recipe asks for it."""
    return plan.with_("parallel", sequence=True) if recipe.parallel.sequence else plan


def refuse_unsplittable(recipe: Recipe) -> None:
    """Refuse techniques that do not work with matrices that are cut by their inputs or outputs.

    Raises:
        BadInput: names the technique, and what to use instead.
    """
    use = "use parallel.strategy=ddp, or fsdp, which shards the bytes as they are"
    packed = f"weights are packed while the model loads, and packed bytes cannot be cut; {use}"
    refuse(recipe, "quantization", ("nf4", "fp4", "int8"), packed)
    refuse(recipe, "peft", ("head", "prompt_tuning", "side_network"), "only LoRA's matrices, or all, are cut; use lora")
    refuse(recipe, "optimizer", ("adamw_8bit",), "bitsandbytes' kernels take no sharded tensor; use optimizer=adamw")
    refuse(recipe, "paged_optimizer", (True,), "bitsandbytes' kernels take no sharded tensor; leave it off")
    refuse(
        recipe, "precision", ("fp16",), "the loss scaler takes no mixture of whole and cut gradients; use bf16 or fp32"
    )  # fmt: skip
    refuse(recipe, "compile", (True,), "not supported here; use parallel.strategy=ddp")
    if recipe.lora.dora:
        raise BadInput(
            f"parallel.strategy={recipe.parallel.strategy} with lora.dora=true: DoRA's norms need whole columns; "
            "set lora.dora=false"
        )


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Cut the blocks' matrices in place, and LoRA's matrices with them.

    Args:
        total: holds the model, and maps a micro-batch to the sum of its losses.
        plan: whether the residual stream is in pieces, too.
        world: the processes.
    """
    assert world.mesh is not None
    split(total, world.mesh["tensor"], sequence=plan.parallel.get("sequence", False))
    return total


@contextlib.contextmanager
def window(total: torch.nn.Module, world: World, last: bool) -> Iterator[None]:
    """Add up the gradients of weights between f and g that are not cut, after the last micro-batch's backward pass.

    Nothing is averaged, because every process trains on all rows. ``total`` is what :func:`spread` returned.
    """
    yield
    if last:
        assert world.mesh is not None
        add_up_partial(total.parameters(), world.mesh["tensor"].get_group())


def split(model: torch.nn.Module, mesh: Any, *, sequence: bool = False) -> None:
    """Cut the matrices of a model's blocks in place, peft's LoRA matrices with them.

    Args:
        model: a transformers model, with or without peft; its parameters must be the same in all processes.
        mesh: the dimension of a ``DeviceMesh`` along which to cut.
        sequence: whether each process holds its own tokens of the residual stream only (``parallel/sequence.py``).
    """
    # It imports DTensor, which takes half a second, and only a run over several cards needs it.
    from cria_tricks.parallel.regions import split_regions

    dims = dict.fromkeys(COLUMNS, 0) | dict.fromkeys(ROWS, 1)
    if not sequence:
        split_regions(model, mesh, dims, Copied.apply, Summed.apply)
        return
    stream = Stream(mesh.get_group())
    split_regions(model, mesh, dims, stream.f, stream.g)
    hold_in_pieces(model, stream)


def add_up_partial(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of weights between f and g that are not cut, in place, by one all-reduce.

    These are A beside a column-parallel matrix and B beside a row-parallel one; if all weights train, also the norms of
    queries and keys, of which each process has some heads. If the residual stream is divided, all norms are among them.
    Once a step is enough, because gradients of micro-batches are added up.

    Args:
        parameters: those that :func:`split` has marked as ``partial`` are summed, and all others are left out.
        group: the processes that share the matrices.
    """
    gradients = [p.grad for p in parameters if getattr(p, "partial", False) and p.grad is not None]
    if gradients:
        add_up(gradients, group)
