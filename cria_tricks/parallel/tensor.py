r"""Tensor parallelism: every process computes a part of each block's matrices, for the same rows.

Saves    weights of the blocks' matrices, and the wide activations inside a block (heads, MLP): 1 / N of each in a
         process  [bytes]
Costs    all-reduces of (B, T, D) in every block, forward and backward, and all processes wait for each of them: little
         is gained over PCIe, much is lost over a network. Embedding, norms, head and residual stream are whole in all
Claim    exact within rounding: the sums over a matrix's inputs are added up in another order
Needs    heads, key heads and the MLP's width divisible by N; dropout 0 for the same losses as one process
Breaks   int8 and 4-bit weights, whose packed bytes are no rows and columns (refused); models whose heads do not divide
Sources  Shoeybi et al. 2019, arXiv:1909.08053, sec. 3 (columns, then rows; the operators f and g)
Ours     30 lines: f and g, and an MLP of one column and one row matrix. The switch calls torch's parallelize_module
         with a plan that knows peft's LoRA. Our plan cuts matrix by matrix, so gradients of inputs are summed 5 times a
         block: for q, k, v, gate and up. With f there are 2 sums, as q, k, v share an input, and gate and up another

Shapes: activations (B, T, D); a column matrix (F / N, D), a row matrix (D, F / N); LoRA A (r, D_in), B (D_out, r).
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.rules import refuse, several
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.folds import facts, work
from cria_tricks.tricks.gradient_checkpointing import kept_blocks

SWITCHES = ("strategy=tensor",)
CLAIM = "exact"
IN_PIECES = True
LESSON = "22_tensor_parallel"
REFERENCE = ("Copied", "Summed", "mlp")
PLAIN = """
# torchrun --nproc-per-node 2 train.py
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (2,))
for block in model.model.layers:
    parts = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    parallelize_module(block.self_attn, mesh, parts)
    parts = {name: ColwiseParallel() for name in ("gate_proj", "up_proj")} | {"down_proj": RowwiseParallel()}
    parallelize_module(block.mlp, mesh, parts)
"""
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Column-parallel matrices: their outputs are divided, so a process has some heads and a part of the MLP's inside."""
ROWS = ("o_proj", "down_proj")
"""Row-parallel matrices: their inputs are divided, so the outputs of all processes are summed."""


class Copied(torch.autograd.Function):
    """Megatron's f: the identity forward; a sum over the processes backward, because they all used the same input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return x, of shape (..., D), which is the same in all processes."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of all processes, of shape (..., D)."""
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Summed(torch.autograd.Function):
    """Megatron's g: a sum over the processes forward; the identity backward, as each part has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        """Sum the parts of all processes, of shape (..., D)."""
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the sum, of shape (..., D)."""
        return gradients[0]


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
    return plan.with_("parallel", strategy="tensor", data=1)


def refuse_unsplittable(recipe: Recipe) -> None:
    """Refuse tricks that do not work with matrices that are cut by their inputs or outputs.

    Raises:
        BadInput: names the trick, and what to use instead.
    """
    use = "use parallel.strategy=ddp, or fsdp, which shards the bytes as they are"
    refuse(recipe, "quantization", ("nf4", "fp4", "int8"), f"packed weights have no rows and columns to share; {use}")
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

    Beside a column-parallel matrix LoRA's B is cut and A is whole, because every process has the whole input. Beside a
    row-parallel matrix A is cut and B is whole.

    Args:
        total: holds the model, and maps a micro-batch to the sum of its losses.
        plan: not used here.
        world: the processes.
    """
    assert world.mesh is not None
    split(total, world.mesh["tensor"])
    return total


def window(total: torch.nn.Module, world: World, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return an empty context: every process trains on all rows, so no gradients are averaged."""
    return contextlib.nullcontext()


def split(model: torch.nn.Module, mesh: Any) -> None:
    """Cut the matrices of a model's blocks in place, peft's LoRA matrices with them.

    Args:
        model: a transformers model, with or without peft; its parameters must be the same in all processes.
        mesh: the dimension of a ``DeviceMesh`` along which to cut.
    """
    # DTensor takes half a second to import, and only a run over several cards needs it.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in COLUMNS + ROWS:
            continue
        style: Any
        style, adapter = (ColwiseParallel, "lora_B") if kind in COLUMNS else (RowwiseParallel, "lora_A")
        # peft keeps the original matrix of a wrapped linear as its base_layer.
        parts: Any = {"base_layer": style(), f"{adapter}.default": style()}
        parallelize_module(module, mesh, parts if hasattr(module, "base_layer") else style())


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return the all-reduces of an optimizer step, for rows of full length; they are the same for every N."""
    tricks = recipe.tricks
    # n: tokens of a micro-batch. repeated: blocks that run forward twice. wide: sums behind o and down, in all blocks.
    n = recipe.train.batch_size * recipe.data.max_length
    memory = facts(recipe, shape, T4)  # any card would do: these item sizes are the same on all
    adapted = work(recipe, shape, T4).adapted
    thin_rows, thin_columns = (sum(name in adapted for name in names) for names in (ROWS, COLUMNS))
    repeated = shape.layers - kept_blocks(recipe, shape) if tricks.gradient_checkpointing else 0
    passes = shape.layers + repeated
    # Recomputing a block stops at its last saved tensor. That is before the sum behind down_proj, unless an adapter
    # beside it comes later.
    wide = 2 * passes - repeated * ("down_proj" not in adapted)
    back = len(COLUMNS) * shape.layers
    if adapted and not tricks.gradient_checkpointing:
        back -= 3  # the first block's q, k and v have the frozen embedding as input, which needs no gradient
    steps = tricks.gradient_accumulation
    r = recipe.lora.r
    product = memory.product_itemsize
    stream = memory.hidden_itemsize
    width = shape.width
    calls = (
        (n * width * product, wide, "what o and down make, summed"),
        (n * r * product, passes * thin_rows, "what LoRA's A beside them make"),
        (n * width * stream, back, "the gradient of the input of q, k, v, gate and up"),
        (n * r * product, thin_columns * shape.layers, "the gradient of what LoRA's A beside them made"),
    )
    return [Call("all_reduce", size, steps * times, processes, why) for size, times, why in calls if times]
