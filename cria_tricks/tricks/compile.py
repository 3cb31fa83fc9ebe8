r"""Compile: a block's many small operations become a few kernels.

Saves    what fused operations would keep between each other: it is recomputed in the backward kernel    [bytes]; and
         their way through memory and their launches, one kernel for a chain of them                     [seconds]
Costs    a compilation before the first step: one block's, for the same code serves them all, and once more where a
         block is run otherwise (rows without a mask, a batch of one, the evaluation)
Claim    exact within rounding: fused kernels sum in another order
Needs    a C++ compiler on a CPU; compute capability 7.0 on CUDA, where Triton comes with torch
Breaks   dropout draws other random numbers than without: the same distribution, not the same run
Sources  Ansel et al. 2024, doi:10.1145/3620665.3640366, sec. 4 (TorchInductor), sec. 5 (dynamic shapes); what to
         recompute: Chen et al. 2016, arXiv:1604.06174, sec. 4
Ours     capture, one loop over tiles and recomputation, for pointwise operations; torch.compile for each block does
         products, reductions and the choice of what to keep as well

Shapes: N elements of every input and of the output, tiles of at most I of them.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from cria_tricks.bill import moved_bytes
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.work import Work
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("compile=true",)
CLAIM = "exact within rounding"
LESSON = "16_together"
REFERENCE = ("_Fused",)
PLAIN = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
for block in model.model.layers:
    block.compile(dynamic=True)
"""
BACKEND = "inductor"
"""What makes kernels of a captured graph, by torch's name for it."""
POINTWISE = ("add", "sub", "mul", "truediv", "neg", "exp", "tanh", "sigmoid", "silu", "relu", "gelu", "rsqrt", "pow")
"""Operations whose every result depends on the elements in its own place alone."""


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, tile, *inputs):
        ctx.graph = graph
        ctx.tile = tile
        ctx.save_for_backward(*inputs)  # and nothing of what lies between them and the output
        out = torch.empty_like(inputs[0])
        for out_I, *pieces in zip(*(x.view(-1).split(tile) for x in (out, *inputs)), strict=True):
            out_I.copy_(graph(*pieces))  # all operations on one tile, while it is near, before the next tile's first
        return out

    @staticmethod
    def backward(ctx, grad):
        grads = [torch.empty_like(x) for x in ctx.saved_tensors]
        # contiguous(): a sum hands back one number, expanded
        whole = (grad.contiguous(), *ctx.saved_tensors, *grads)
        for grad_I, *rest in zip(*(x.view(-1).split(ctx.tile) for x in whole), strict=True):
            pieces = [x.detach().requires_grad_() for x in rest[: len(grads)]]
            with torch.enable_grad():
                again = ctx.graph(*pieces)  # recomputed: cheaper than to have kept it and to read it back
            for found, piece in zip(rest[len(grads) :], torch.autograd.grad(again, pieces, grad_I), strict=True):
                found.copy_(piece)
        return None, None, *grads


def fused(function: Callable[..., torch.Tensor], tile: int = 1024) -> Callable[..., torch.Tensor]:
    """Compile a function of pointwise operations into one loop.

    Args:
        function: of tensors, made of :data:`POINTWISE` operations, numbers and nothing else.
        tile: I, elements that go through all operations together.

    Returns:
        The same function, for contiguous inputs of one shape. Its results and gradients are the plain ones within
        rounding, and bit for bit when a tile is a whole number of the processor's vectors.

    Raises:
        ValueError: if the function does anything else, naming it; when called, if an input has another shape.
    """
    graph = fx.symbolic_trace(function)  # it runs once, on stand-ins that write down what is done to them
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        if node.op in ("call_function", "call_method") and name not in POINTWISE:
            raise ValueError(f"{name} is not pointwise; fused takes {', '.join(POINTWISE)}")

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        if any(x.shape != inputs[0].shape or not x.is_contiguous() for x in inputs):
            raise ValueError(f"inputs must be contiguous and of one shape, not {[tuple(x.shape) for x in inputs]}")
        return _Fused.apply(graph, tile, *inputs)

    return run


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Compile the blocks last of all, adapters included."""
    if not recipe.tricks.compile:
        return plan
    device = plan.device
    if device.kind == "cuda" and device.capability < (7, 0):
        major, minor = device.capability
        raise BadInput(
            f"tricks.compile=true: Triton needs compute capability 7.0, and {device.name} has {major}.{minor}; set "
            "tricks.compile=false"
        )
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.kind == "cpu" and not shutil.which(compiler):
        raise BadInput(f"tricks.compile=true: no C++ compiler {compiler} here; install it, or set tricks.compile=false")
    plan = plan.then("compile_blocks")
    if device.kind == "cpu":
        return plan.warn(
            "compile: on a CPU the bytes of compiled kernels cannot be counted, so every peak is the whole process's"
        )
    return plan


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """Unchanged: which results a fused kernel no longer writes is the compiler's choice, so this is an upper bound."""
    return memory


FUSED: moved_bytes.Each = ((16, 32), (6, 10), (4, 4))
"""Bytes moved between products. A chain of operations reads its inputs once and writes its result once: reasoned from
this, not counted."""


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """Between two products little is moved; the products stay."""
    if not recipe.tricks.compile:
        return work
    return replace(work, between=in_few_kernels)


def in_few_kernels(work: Work) -> tuple[int, int]:
    """Bytes moved between a block's products, for one position: forward, backward; an adapter's casts are fused too."""
    return moved_bytes.over_widths(work.shape, FUSED)
