r"""Fused LoRA: a matrix, its adapter and the MLP's activation have one hand-written backward pass.

Saves    activations: an MLP keeps its input, gate and up, and computes the activated gate and the gated product again,
         so 2 F instead of 4 F numbers a token and block; kernels and memory traffic between the products, because
         adapters write into the result of the frozen product and into one gradient of the shared input
Costs    one thin product for each adapter (A x) and one activation for each MLP are computed a second time
Claim    exact within rounding: the adapter's part is rounded fewer times; in 16 bits the gradients of the fp32
         adapters are not rounded to 16 bits on their way
Needs    peft = lora, without dropout and without dora; its MLP part needs the MLP of Llama, down(act(gate(x)) * up(x))
Breaks   compile, which is refused. With dropout or dora it has no effect
Sources  Hu et al. 2021, arXiv:2106.09685, sec. 4.1 (the product); the derivation below is the chain rule. Unsloth
         does the same since 2023: github.com/unslothai/unsloth, unsloth/kernels/fast_lora.py
Ours     two autograd functions in plain torch, which the switch itself runs on peft's modules (``load/fused.py``)

Shapes: x (N, I), W (O, I), A (R, I), B (O, R), y (N, O), for N tokens and rank R; an MLP goes from D to F and back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

REFERENCE = ("_Products", "_Down", "gated_mlp")
PLAIN = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from cria_tricks.load.fused import fuse  # neither peft nor transformers has it

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
model = fuse(
    get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    )
)
"""


# The derivation. Forward, y = x W^T + s (x A^T) B^T. With dy, the gradient of y, and u = s dy B, shape (N, R):
#
#     dB = dy^T (s x A^T)        dA = u^T x        dx = dy W + u A
#
# Nothing but x is needed, because x A^T is cheap to compute again. Matrices that share x add into one dx. The MLP is
# y = down(h) with h = a(e) * g, e = gate(x) and g = up(x). From dh, which is down's dx, follow dg = dh * a(e) and
# de = dh * g * a'(e). So x, e and g are enough.


@dataclass(frozen=True)
class Matrix:
    """A frozen matrix W (O, I), however it is stored, and its adapter.

    Attributes:
        times: x (N, I) -> x W^T (N, O), a new tensor.
        unpacked: a dtype -> W in this dtype.
        A: the first thin matrix of the adapter, (R, I).
        B: the second one, (O, R).
        scale: s, by which B A is multiplied.
    """

    times: Callable[[torch.Tensor], torch.Tensor]
    unpacked: Callable[[torch.dtype], torch.Tensor]
    A: torch.Tensor
    B: torch.Tensor
    scale: float


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which products multiply: autocast's, or that of x where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def adds_up_in_fp32(x: torch.Tensor) -> bool:
    """Tell whether a product of 16-bit matrices can return its fp32 sums: on a GPU, not on a CPU."""
    return x.is_cuda


def _add(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add ``left @ right`` to ``total`` in place: in one operation, unless total has a wider dtype."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def _scaled(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``scale * left @ right`` by one kernel; with beta=0 what would be added to it is not read."""
    nothing = torch.empty((), dtype=left.dtype, device=left.device)
    return torch.addmm(nothing, left, right, beta=0, alpha=scale)


def _of_adapter(left_NP: torch.Tensor, right_NQ: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``left^T @ right``, the gradient of an adapter, without rounding it to 16 bits."""
    wide = torch.promote_types(left_NP.dtype, torch.float32)
    if left_NP.dtype != wide and adds_up_in_fp32(left_NP):
        return torch.mm(left_NP.mT, right_NQ, out_dtype=wide).to(dtype)
    return (left_NP.mT.to(wide) @ right_NQ.to(wide)).to(dtype)


def _forward(x_NI: torch.Tensor, narrow_NI: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return y; narrow is x in the dtype in which products multiply."""
    dtype = narrow_NI.dtype
    y_NO = matrix.times(x_NI)
    return _add(y_NO, _scaled(narrow_NI, matrix.A.to(dtype).mT, matrix.scale), matrix.B.to(dtype).mT)


def _backward(dy_NO, x_NI, matrix, A_RI, B_OR, dx_NI, dx_dtype):
    """Return the gradients of x, A and B.

    dx_NI is the gradient of x so far, to which this one is added in place, or None. dx_dtype is its dtype, or None if
    nobody needs it, as in the first block; then W is not even unpacked.
    """
    dtype = x_NI.dtype
    dy_NO, A, B = dy_NO.to(dtype), A_RI.to(dtype), B_OR.to(dtype)
    u_NR = _scaled(dy_NO, B, matrix.scale)
    dA = _of_adapter(u_NR, x_NI, A_RI.dtype)
    dB = _of_adapter(dy_NO, _scaled(x_NI, A.mT, matrix.scale), B_OR.dtype)
    if dx_dtype is not None:
        W = matrix.unpacked(dtype)
        dx_NI = (dy_NO @ W).to(dx_dtype) if dx_NI is None else _add(dx_NI, dy_NO, W)
        _add(dx_NI, u_NR, A)
    return dx_NI, dA, dB


class _Products(torch.autograd.Function):
    # Several matrices that multiply the same x: q, k and v; o alone; gate and up.
    @staticmethod
    def forward(ctx, x, matrices, down, *adapters):
        # adapters: A and B of each matrix, which autograd must see. down: those of down_proj, if these are gate and up.
        # _Down cannot save what it needs itself, see there, so this function also saves its own results for it.
        ctx.matrices, ctx.dtype, ctx.read = matrices, x.dtype, None
        narrow = x.to(_compute_dtype(x))
        results = tuple(_forward(x, narrow, matrix) for matrix in matrices)
        ctx.save_for_backward(narrow, *adapters, *((*results, *down) if down else ()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # Saved tensors may be read once only: checkpointing computes them for this, and offloading fetches them.
        x, *adapters = ctx.read or ctx.saved_tensors
        ctx.read = None
        dx, found = None, []
        dtype = ctx.dtype if ctx.needs_input_grad[0] else None
        for dy, matrix, A, B in zip(grads, ctx.matrices, adapters[::2], adapters[1::2], strict=True):
            dx, dA, dB = _backward(dy, x, matrix, A, B, dx, dtype)
            found += [dA, dB]
        return dx, None, None, *found


class _Down(torch.autograd.Function):
    # It saves nothing: its backward pass reads e and g where _Products has saved them. Checkpointing repeats a block
    # until its last saved tensor is there again, and so it need not repeat the product with down.
    @staticmethod
    def forward(ctx, e, g, activation, down, A, B):
        ctx.saved_by, ctx.activation, ctx.down = e.grad_fn, activation, down
        h = activation(e) * g
        return _forward(h, h.to(_compute_dtype(h)), down)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        *read, e, g, A, B = ctx.saved_by.saved_tensors
        ctx.saved_by.read = read
        with torch.enable_grad():
            e = e.detach().requires_grad_()
            a = ctx.activation(e)
        h = (a.detach() * g).to(read[0].dtype)
        dh, dA, dB = _backward(dy, h, ctx.down, A, B, None, e.dtype)
        del h
        dg = a.detach() * dh
        (de,) = torch.autograd.grad(a, e, dh.mul_(g))
        return de, dg, None, None, dA, dB


def products(x: torch.Tensor, matrices: tuple[Matrix, ...]) -> tuple[torch.Tensor, ...]:
    """Multiply x, of shape (..., I), by adapted matrices; for the backward pass only x is saved.

    Returns:
        One tensor of shape (..., O) for each matrix, in the dtype that its frozen product has.
    """
    rows = x.flatten(0, -2)
    found = _Products.apply(rows, matrices, None, *(each for one in matrices for each in (one.A, one.B)))
    return tuple(y.unflatten(0, x.shape[:-1]) for y in found)


def gated_mlp(
    x: torch.Tensor, gate: Matrix, up: Matrix, down: Matrix, activation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute ``down(activation(gate(x)) * up(x))``; for the backward pass only x, gate(x) and up(x) are saved.

    The result has the shape of x, (..., D); gate and up are (F, D), and down is (D, F). The activation is pointwise.
    """
    rows = x.flatten(0, -2)
    e, g = _Products.apply(rows, (gate, up), (down.A, down.B), gate.A, gate.B, up.A, up.B)
    return _Down.apply(e, g, activation, down, down.A, down.B).unflatten(0, x.shape[:-1])
