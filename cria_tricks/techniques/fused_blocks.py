r"""Fused blocks: norm, rotary positions and gated activation store fewer activations, and make few tensors on the way.

Saves    activations in 16 bits: a norm keeps its input as it is and not an fp32 copy, 2 D bytes a token and norm less;
         an MLP computes its activated gate again, F numbers less where fused_lora does not do it; kernels and memory
         traffic, because intermediate results are written in place or not at all
Costs    one activation for each MLP is computed a second time
Claim    exact within rounding: the same formulas, with fewer roundings to 16 bits on the way
Needs    frozen norms, so peft = lora or prompt_tuning; one of the kinds of model in KINDS, whose formulas these are.
         triton: Triton 3.4 and a CUDA card of compute capability 7.5 or more
Breaks   compile, which does the same and more, and other kinds of model (Gemma, OLMo 2, Phi-3): both are refused
Sources  Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4 (RMSNorm); Shazeer 2020, arXiv:2002.05202, eq. 6 (SwiGLU);
         Su et al. 2021, arXiv:2104.09864, eq. 34 (rotary positions). Liger and Unsloth have them as Triton kernels
Ours     three autograd functions in plain torch, which the switch itself runs in transformers' modules
         (``load/fused.py``). triton: the same three as kernels (``triton_blocks.py``), which an H200 has run

Shapes: x (..., D); gate and up (..., F); queries and keys (B, H, T, W), cosines and sines (B, T, W).
"""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from cria_tricks.bill.fused_operations import NORM_AT_ONCE

REFERENCE = ("_RMSNorm", "_Gated", "_Rotate")
PLAIN = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from cria_tricks.load.fused import fuse_blocks  # transformers has it as kernels only

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
model = fuse_blocks(
    get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    )
)
"""


# The derivations. With r = 1 / sqrt(mean(x^2) + eps), a norm is y = w x r. With g = w dy, dx = r (g - x r^2 mean(g x)).
# A rotation by an angle is undone by the rotation by its negative, and so is its gradient: swap the sign of the sines.


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        # The length of each row in fp32, without an fp32 copy of the row.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_at_least_fp32(x))
        root = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, root, weight)
        y = torch.mul(x, root, out=torch.empty_like(x))  # in fp32, and rounded when it is written
        return y.mul_(weight) if y.dtype == weight.dtype else y * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, root, weight = ctx.saved_tensors
        if x.numel() <= NORM_AT_ONCE:
            return _of_input(dy, x, root, weight), None, None
        # Of long rows some tokens at a time, because the tensors on the way are in fp32. Each token is a row by itself,
        # so the bits are the same.
        dx = torch.empty_like(x)
        along = min(1, x.dim() - 2)
        at_once = max(NORM_AT_ONCE * x.shape[along] // x.numel(), 1)
        pieces = (one.split(at_once, along) for one in (dx, dy, x, root))
        for dx_piece, dy_piece, x_piece, root_piece in zip(*pieces, strict=True):
            dx_piece.copy_(_of_input(dy_piece, x_piece, root_piece, weight))
        return dx, None, None


def _of_input(dy: torch.Tensor, x: torch.Tensor, root: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a norm's input."""
    grad = (dy * weight).to(_at_least_fp32(x))
    inner = (grad * x).mean(-1, keepdim=True)
    return grad.addcmul_(x, inner.mul_(root).mul_(root), value=-1).mul_(root).to(x.dtype)


def _at_least_fp32(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.activation = activation
        ctx.save_for_backward(gate, up)  # and not the activated gate
        return activation(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.activation(gate)
        (of_gate,) = torch.autograd.grad(activated, gate, dy * up)
        return of_gate, activated.detach() * dy, None


class _Rotate(torch.autograd.Function):
    # The angles are constants, so nothing of x is saved.
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.dtype = x.dtype
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, sin, -1).to(ctx.dtype), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate the numbers of a head in pairs: number i of its first half with number i of its second half."""
    found = x * cos
    half = x.shape[-1] // 2
    first, second = x.split(half, dim=-1)
    found[..., :half].addcmul_(second, sin[..., :half], value=-sign)
    found[..., half:].addcmul_(first, sin[..., half:], value=sign)
    return found


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row of x by its root mean square, and multiply it by a frozen weight.

    Args:
        x: shape (..., D).
        weight: shape (D,); it gets no gradient.
        eps: is added to the mean square.
    """
    return _RMSNorm.apply(x, weight, eps)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute ``activation(gate) * up``, SwiGLU if the activation is SiLU; all shapes are alike."""
    return _Gated.apply(gate, up, activation)


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their positions; arguments as transformers gives them.

    Args:
        queries: shape (B, H, T, W), if the heads' dimension is 1.
        keys: the same, with the number of their heads.
        cos: shape (B, T, W): the cosines of the angles, those of the first half of a head twice.
        sin: the sines.
        unsqueeze_dim: the heads' dimension.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotate.apply(queries, cos, sin), _Rotate.apply(keys, cos, sin)
