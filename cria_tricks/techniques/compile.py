r"""Compile: a block's many small operations become a few kernels.

Saves    activations between fused operations, which the backward kernel recomputes [bytes]; memory traffic and kernel
         launches, because a chain of operations is one kernel                                           [seconds]
Costs    compile time before the first step: of one block, because all blocks share its code, and once more for each
         other way of running a block (rows without a mask, a batch of one, the evaluation)
Claim    exact within rounding: fused kernels sum in another order
Needs    a C++ compiler on a CPU; compute capability 7.0 on CUDA, where Triton comes with torch
Breaks   the same run twice, compiled and not: dropout draws other random numbers, from the same distribution
Sources  Ansel et al. 2024, doi:10.1145/3620665.3640366, sec. 4 (TorchInductor), sec. 5 (dynamic shapes); what to
         recompute: Chen et al. 2016, arXiv:1604.06174, sec. 4
Ours     capture, one loop over tiles and recomputation, for pointwise operations only. The switch compiles each block
         by torch.compile, which also takes products and reductions, and chooses what to keep

Shapes: N elements of every input and of the output, tiles of at most I of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from cria_tricks.common.errors import BadInput
from cria_tricks.step_plan import Plan

REFERENCE = ("_Fused",)
PLAIN = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
for block in model.model.layers:
    block.compile(dynamic=True)
"""
BACKEND = "inductor"
"""torch's name for what turns a captured graph into kernels."""
POINTWISE = ("add", "sub", "mul", "truediv", "neg", "exp", "tanh", "sigmoid", "silu", "relu", "gelu", "rsqrt", "pow")
"""Operations whose result at a place depends only on the elements of the inputs at the same place."""


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, tile, *inputs):
        ctx.graph = graph
        ctx.tile = tile
        ctx.save_for_backward(*inputs)  # and no result between them and the output
        out = torch.empty_like(inputs[0])
        for out_I, *pieces in zip(*(x.view(-1).split(tile) for x in (out, *inputs)), strict=True):
            out_I.copy_(graph(*pieces))  # all operations on this tile, while it is in the cache; then the next tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grads = [torch.empty_like(x) for x in ctx.saved_tensors]
        # contiguous(), because the gradient of a sum is one number, expanded to the shape.
        whole = (grad.contiguous(), *ctx.saved_tensors, *grads)
        for grad_I, *rest in zip(*(x.view(-1).split(ctx.tile) for x in whole), strict=True):
            # rest: for each input its tile, then for each input the tile of its gradient, which is filled here
            pieces = [x.detach().requires_grad_() for x in rest[: len(grads)]]
            with torch.enable_grad():
                again = ctx.graph(*pieces)  # recompute: cheaper than saving and reading it back
            for found, piece in zip(rest[len(grads) :], torch.autograd.grad(again, pieces, grad_I), strict=True):
                found.copy_(piece)
        return None, None, *grads


def fused(function: Callable[..., torch.Tensor], tile: int = 1024) -> Callable[..., torch.Tensor]:
    """Compile a function of pointwise operations into one loop.

    Args:
        function: of tensors, made of :data:`POINTWISE` operations, numbers and nothing else.
        tile: I, elements that go through all operations together.

    Returns:
        The same function, for contiguous inputs of one shape. Its results and gradients equal the plain ones within
        rounding, and bit for bit when a tile is a whole number of the processor's vectors.

    Raises:
        ValueError: if the function does anything else, naming it; when called, if an input has another shape.
    """
    graph = fx.symbolic_trace(function)  # runs it once, on proxies that record the operations
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        if node.op in ("call_function", "call_method") and name not in POINTWISE:
            raise ValueError(f"{name} is not pointwise; fused takes {', '.join(POINTWISE)}")

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        if any(x.shape != inputs[0].shape or not x.is_contiguous() for x in inputs):
            raise ValueError(f"inputs must be contiguous and of one shape, not {[tuple(x.shape) for x in inputs]}")
        return _Fused.apply(graph, tile, *inputs)

    return run


def compile_blocks(model: Any, plan: Plan) -> Any:
    """Compile a transformers model block by block, in place, and return it.

    The graph of one block serves all blocks. With ``dynamic=True`` it also serves rows of every length, whichever came
    first. So a resumed run gets the kernels of an uninterrupted one.

    Raises:
        BadInput: if the model is not built of blocks.
    """
    from cria_tricks.models.pretrained import blocks_of  # here, because only the switch needs transformers

    blocks = blocks_of(model)
    if not blocks:
        raise BadInput(
            f"tricks.compile=true: {type(model).__name__} is not built of blocks that can be compiled one by one; set "
            "tricks.compile=false"
        )
    # All blocks share one code, but it needs a graph for each case: rows with a mask or without, one row or several,
    # training or evaluation, and the first block, whose input needs no gradient. These are more than 8, after which
    # torch by default gives up and compiles no more.
    torch._dynamo.config.recompile_limit = 32
    for block in blocks:
        block.compile(dynamic=True, backend=BACKEND)
    return model
