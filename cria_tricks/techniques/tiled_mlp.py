r"""Tiled MLP: a block's MLP takes a tile (a few tokens) at a time, forward and backward, to hold less at once.

Saves    activations: the MLP's inner tensors exist for the t tokens of a tile, and not for all n = B T. In 16 bits that
         is 8 F n -> 8 F t bytes (four tensors of F numbers a token), and their gradients shrink likewise. With gradient
         checkpointing it saves this in the one block that is being recomputed. Without, it saves this in every block,
         because a tiled MLP keeps nothing but its input
Costs    with gradient checkpointing the product with down, where checkpointing would skip it (no adapter on down, or
         fused_lora). Without checkpointing, or with a norm behind the MLP (Gemma 2 and 3, OLMo 2), the whole MLP runs
         forward once more. Each tile reads the weights again, and unpacks 4-bit and int8 weights again, so small tiles
         are slow
Claim    exact within rounding: a token's result is the same sum of products; the gradients of weights are summed over
         tiles, so in another order. With dropout the tiles draw other masks than the whole MLP would
Needs    more tokens in a micro-batch than a tile has; otherwise the MLP runs as usual. true (or auto) takes tiles of D
         tokens, because then the gate of a tile is as large as one weight matrix of the MLP
Breaks   compile, the tensor-parallel strategies and mixtures of experts: all are refused. It does not help where the
         logits, attention or the block inputs are the peak
Sources  Bekman et al. 2025, arXiv:2506.13996 (Arctic Long Sequence Training), sec. 3.1.1, "TiledMLP"; Liger and Unsloth
         have it, too
Ours     two autograd functions. The first one only saves the input, in front of the tiles. So when checkpointing
         recomputes the block, it stops before the tiles. Otherwise each tile would run forward three times: in the
         forward pass, in the recomputation, and in its own backward pass

Shapes: x (B, T, D), n = B T tokens in tiles of t; gate and up (F, D), down (D, F).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cria_tricks.step_plan import Plan
from cria_tricks.switches.tiled_mlp import tokens_of
from cria_tricks.techniques.gradient_checkpointing import generators_of, restore, states_of

REFERENCE = ("_Keep", "_Tiles", "tiled")
PLAIN = """
from transformers import AutoModelForCausalLM
from cria_tricks.techniques.tiled_mlp import tile_mlps  # neither peft nor transformers has it

# 16 tokens a tile here; take 4096 for a model of 8B.
model = tile_mlps(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), 16)
"""

Mlp = Callable[[torch.Tensor], torch.Tensor]


class _Keep(torch.autograd.Function):
    # It saves x and does nothing else. This is a function of its own, because a function saves its tensors only when it
    # has run. Checkpointing repeats a block until all saved tensors are there again, so it stops before the tiles.
    # Their backward pass reads x here.
    @staticmethod
    def forward(ctx, x_1ND, *trained):
        ctx.save_for_backward(x_1ND)
        ctx.set_materialize_grads(False)  # no zeros where nobody needs the gradient of x
        return x_1ND.view_as(x_1ND)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_1ND):
        return dx_1ND, *(None for _ in ctx.needs_input_grad[1:])


class _Tiles(torch.autograd.Function):
    # It saves nothing. The weights are arguments, because autograd gives gradients only to a function's arguments. So
    # each weight gets one gradient, the sum over all tiles, and hooks on it (DDP, FSDP) run once.
    @staticmethod
    def forward(ctx, kept_1ND, mlp, tile, input_learns, *weights):
        ctx.kept_by, ctx.mlp, ctx.tile, ctx.weights = kept_1ND.grad_fn, mlp, tile, weights
        ctx.input_learns = input_learns
        ctx.autocast = _autocast_of(kept_1ND)
        ctx.generators = generators_of(kept_1ND)
        ctx.random_states = states_of(ctx.generators)  # before the first tile draws its dropout mask
        y_1ND = None
        with ctx.autocast():
            for start, x_1tD in _tiles(kept_1ND, tile):
                made = mlp(x_1tD)
                if y_1ND is None:  # only now its dtype is known
                    y_1ND = made.new_empty(*kept_1ND.shape[:-1], made.shape[-1])
                y_1ND[:, start : start + tile] = made
        return y_1ND

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_1ND):
        (x_1ND,) = ctx.kept_by.saved_tensors
        dx_1ND = torch.empty_like(x_1ND) if ctx.input_learns else None
        totals = [None for _ in ctx.weights]
        now = states_of(ctx.generators)
        restore(ctx.generators, ctx.random_states)  # the same masks again
        for start, x_1tD in _tiles(x_1ND, ctx.tile):
            place = slice(start, start + ctx.tile)
            dx_1tD = None if dx_1ND is None else dx_1ND[:, place]
            _through_a_tile(ctx, x_1tD, dy_1ND[:, place], dx_1tD, totals)
        restore(ctx.generators, now)
        return dx_1ND, None, None, None, *totals


def _through_a_tile(ctx, x_1tD, dy_1tD, dx_1tD, totals):
    """Run the MLP on a tile again, forward and backward: write dx, and add the weights' gradients to the totals."""
    x_1tD.requires_grad_(ctx.input_learns)
    with torch.enable_grad(), ctx.autocast():
        y_1tD = ctx.mlp(x_1tD.view_as(x_1tD))  # a view, because FlopCounterMode cannot watch a leaf here
    wanted = ctx.weights if dx_1tD is None else (x_1tD, *ctx.weights)
    found = list(torch.autograd.grad(y_1tD, wanted, dy_1tD, allow_unused=True))
    if dx_1tD is not None:
        dx_1tD.copy_(found.pop(0))
    for number, gradient in enumerate(found):
        if totals[number] is None:
            totals[number] = gradient
        elif gradient is not None:
            totals[number] += gradient


def _tiles(x_1ND: torch.Tensor, tile: int) -> list[tuple[int, torch.Tensor]]:
    """Cut x into tiles that autograd does not follow; the last one may be shorter."""
    return [(number * tile, piece) for number, piece in enumerate(x_1ND.detach().split(tile, dim=1))]


def _autocast_of(x: torch.Tensor) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that makes a context with today's autocast settings, but without the cache of cast weights.

    Inside a function autograd is off, so a weight cast there has no history. From a cache, a later use of that weight
    would get the cast without gradient, and all copies would live until the forward pass ends.
    """
    kind = x.device.type
    on = torch.is_autocast_enabled(kind)
    return functools.partial(torch.autocast, kind, torch.get_autocast_dtype(kind), enabled=on, cache_enabled=False)


def tiled(mlp: Mlp, x_BTD: torch.Tensor, tile: int, weights: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Compute ``mlp(x)`` in tiles of tokens, and keep nothing but ``x`` for the backward pass.

    Args:
        mlp: maps (1, t, D) to (1, t, D'), each token by itself.
        x_BTD: its input, shape (B, T, D), any float dtype.
        tile: tokens of a tile. If x has no more than these, ``mlp(x)`` runs as it is.
        weights: all trained tensors that ``mlp`` uses.

    Returns:
        The result, shape (B, T, D').
    """
    tokens = x_BTD.shape[:-1]
    if tokens.numel() <= tile:
        return mlp(x_BTD)
    learns = x_BTD.requires_grad
    kept_1ND = _Keep.apply(x_BTD.reshape(1, tokens.numel(), -1), *weights[:1])
    return _Tiles.apply(kept_1ND, mlp, tile, learns, *weights).view(*tokens, -1)


def tile_mlps(model: torch.nn.Module, tile: int) -> torch.nn.Module:
    """Replace the forward passes of all blocks' MLPs in place: they run a tile at a time.

    It comes after the edits of ``load/fused.py``, because it takes each MLP's forward pass as it is.

    Args:
        model: a transformers model, whose blocks name their MLP ``mlp``.
        tile: tokens of a tile.
    """
    for path, module in model.named_modules():
        if path.endswith(".mlp"):
            module.forward = _in_tiles(module, tile)
    return model


def _in_tiles(module: Any, tile: int) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        # The parameters are looked up at each pass, because FSDP puts other tensors into the modules.
        return tiled(plain, x, tile, [weight for weight in module.parameters() if weight.requires_grad])

    return forward


def tile_blocks(model: Any, plan: Plan) -> Any:
    """Do as :func:`tile_mlps`, with tiles of as many tokens as a plan says."""
    width = model.config.get_text_config().hidden_size
    return tile_mlps(model, tokens_of(plan.checkpointing["mlp_tile"], width))
