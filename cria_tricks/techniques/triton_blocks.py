"""Three elementwise parts of a Llama block as Triton kernels, each with a backward pass written by hand.

``tricks.fused_blocks=triton`` runs them. They need Triton, so no other file imports this one unasked. Why one kernel is
faster: such an operation computes little, so its time goes into moving numbers between memory and chip, and into
launches. Each kernel of PyTorch's chain reads its inputs from memory and writes its result back. One kernel keeps
intermediate results in registers. In 16 bits, for each element of x, gate or q: bytes moved, launches, bytes stored:

               forward: PyTorch    here     backward: PyTorch   here     saved: PyTorch   here
    rms_norm   36 bytes, 8         4, 1     88 bytes, 14        6, 1     4: x in fp32     2: x as it is
    swiglu     10 bytes, 2         6, 1     18 bytes, 3         10, 1    6: + silu(gate)  4: gate and up
    rotate     20 bytes, 10        4, 1     28 bytes, 14        4, 1     0                0

A test counts PyTorch's part. Of the 8 kernels of LlamaRMSNorm (to fp32, square, mean, + eps, root, product, to 16 bits,
product with the weight) 6 move every number, 2 one a row. rotate's launches are those of q and k together. Small, and
left out: 1 / root mean square of each row in fp32, which rms_norm saves; cos and sin, which rotate saves; the weight.
The forward pass rounds where transformers' Llama rounds. The backward passes of rms_norm and swiglu compute in fp32 and
round once; rotate's rounds like PyTorch's. So all are exact within rounding. float64, for proofs, stays float64.

Sources: Zhang and Sennrich 2019, arXiv:1910.07467 (RMSNorm); Shazeer 2020, arXiv:2002.05202 (SwiGLU); Su et al. 2021,
arXiv:2104.09864 (RoPE). Liger Kernel and Unsloth have such kernels, too; nothing here is copied from them.

Shapes: N rows of D numbers; M numbers; B batch, H query heads, K key heads, T tokens. Kernels get pointers: x_ND points
at the first number of that shape. A name in capitals is a number of the shape, or a constant that is compiled in.
"""

import torch
from torch.autograd.function import once_differentiable

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.switches.fused_blocks import refuse_without_triton


class NoTriton(BadInput, ImportError):
    """Triton is not installed: a failed import for Python, and wrong input in one line for a command."""


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":  # Triton is there and lacks something itself
        raise
    raise NoTriton(
        "Triton kernels: the package triton is missing; pip install triton, or set tricks.fused_blocks=true for plain "
        "PyTorch"
    ) from None


def refuse_unfit(device: Device) -> None:
    """Refuse a device on which these kernels do not run. (Without Triton the import of this file is refused.)

    Raises:
        BadInput: see :func:`refuse_without_triton`; or if the version of Triton is broken for the device.
    """
    refuse_without_triton(device)
    if device.capability == (7, 5) and triton.__version__.startswith("3.3."):
        raise BadInput(
            f"Triton kernels on {device.name}: Triton {triton.__version__} is broken for compute capability 7.5; "
            "install a torch that brings 3.4, or set tricks.fused_blocks=true for plain PyTorch"
        )


def _sizes(numbers: int, dtype: torch.dtype, rows: int = 1) -> dict:
    """Return a kernel's block, a power of two; its warps, another, eight numbers a thread; its inner dtype."""
    block = triton.next_power_of_2(numbers)
    wide = tl.float64 if dtype == torch.float64 else tl.float32
    return {"BLOCK": block, "WIDE": wide, "num_warps": min(max(triton.next_power_of_2(rows) * block // 256, 1), 16)}


@triton.jit
def _norm_forward(x_ND, w_D, y_ND, r_N, D, EPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)  # one program a row; row * D may exceed 32 bits
    x = tl.load(x_ND + row * D + at, mask=at < D, other=0.0).to(WIDE)  # a block is longer than a row; zeros add nothing
    w = tl.load(w_D + at, mask=at < D, other=0.0).to(WIDE)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
    n = (x * r).to(x_ND.dtype.element_ty).to(WIDE)  # rounded before the weight, as LlamaRMSNorm does
    tl.store(y_ND + row * D + at, n * w, mask=at < D)  # a store rounds to the dtype of its pointer
    tl.store(r_N + row, r)


@triton.jit
def _norm_backward(dy_ND, x_ND, w_D, r_N, dx_ND, D, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    # n = x r with r = (mean(x^2) + eps)^(-1/2), so dr/dx = -r^3 x / D = -r^2 n / D. With g = dy w, the gradient of n:
    # dx = r g + dr/dx sum(g x) = r (g - n mean(g n)).
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    r = tl.load(r_N + row)
    n = tl.load(x_ND + row * D + at, mask=at < D, other=0.0).to(WIDE) * r
    g = tl.load(dy_ND + row * D + at, mask=at < D, other=0.0).to(WIDE)
    g *= tl.load(w_D + at, mask=at < D, other=0.0).to(WIDE)
    tl.store(dx_ND + row * D + at, r * (g - n * (tl.sum(g * n, axis=0) / D)), mask=at < D)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_D, eps):
        D = x.shape[-1]
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, w_D.dtype))
        r_N = torch.empty(x.numel() // D, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        _norm_forward[(len(r_N),)](x, w_D, y, r_N, D, EPS=eps, **_sizes(D, x.dtype))
        ctx.save_for_backward(x, w_D, r_N)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w_D, r_N = ctx.saved_tensors
        dx, D = torch.empty_like(x), x.shape[-1]
        _norm_backward[(len(r_N),)](dy.contiguous(), x, w_D, r_N, dx, D, **_sizes(D, x.dtype))
        return dx, None, None


@triton.jit
def _swiglu_forward(e_M, g_M, h_M, M, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(e_M + at, mask=at < M).to(WIDE)
    g = tl.load(g_M + at, mask=at < M).to(WIDE)
    a = (e / (1 + tl.exp(-e))).to(e_M.dtype.element_ty).to(WIDE)  # rounded before the product, as torch's silu is
    tl.store(h_M + at, a * g, mask=at < M)


@triton.jit
def _swiglu_backward(dh_M, e_M, g_M, de_M, dg_M, M, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    # a = e s with s = 1 / (1 + exp(-e)) and ds/de = s (1 - s), so da/de = s (1 + e (1 - s)).
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dh = tl.load(dh_M + at, mask=at < M).to(WIDE)
    e = tl.load(e_M + at, mask=at < M).to(WIDE)
    g = tl.load(g_M + at, mask=at < M).to(WIDE)
    s = 1 / (1 + tl.exp(-e))
    tl.store(de_M + at, dh * g * s * (1 + e * (1 - s)), mask=at < M)
    tl.store(dg_M + at, dh * e * s, mask=at < M)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, g):
        h = torch.empty_like(e)
        _swiglu_forward[(triton.cdiv(e.numel(), 1024),)](e, g, h, e.numel(), **_sizes(1024, e.dtype))
        ctx.save_for_backward(e, g)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        e, g = ctx.saved_tensors
        de, dg, M = torch.empty_like(e), torch.empty_like(g), e.numel()
        _swiglu_backward[(triton.cdiv(M, 1024),)](dh.contiguous(), e, g, de, dg, M, **_sizes(1024, e.dtype))
        return de, dg


@triton.jit
def _rotation(
    xs, ys, x_steps, y_steps, heads, cos_BTD, sin_BTD, cos_steps, sin_steps, T, D,
    SIGN: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Two numbers of a head, D / 2 apart, turn by one angle: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin. The two halves
    # of cos are equal in all models of this package, and those of sin; the first is read. The gradient turns back:
    # dx1 = dy1 cos + dy2 sin, dx2 = dy2 cos - dy1 sin, the same with -sin. (With unequal halves it would not be.)
    b, t = tl.program_id(0).to(tl.int64) // T, tl.program_id(0).to(tl.int64) % T  # one program a token
    at = tl.arange(0, BLOCK)[None, :]
    cos = tl.load(cos_BTD + b * cos_steps[0] + t * cos_steps[1] + at * cos_steps[2], mask=at < D // 2).to(WIDE)
    sin = tl.load(sin_BTD + b * sin_steps[0] + t * sin_steps[1] + at * sin_steps[2], mask=at < D // 2).to(WIDE) * SIGN
    for i in tl.static_range(2):  # q, then k; each product is rounded before the sum, as torch does
        head = tl.arange(0, HEADS[i])[:, None]
        inside = (head < heads[i]) & (at < D // 2)
        x = xs[i] + b * x_steps[i][0] + head * x_steps[i][1] + t * x_steps[i][2] + at * x_steps[i][3]
        y = ys[i] + b * y_steps[i][0] + head * y_steps[i][1] + t * y_steps[i][2] + at * y_steps[i][3]
        x1 = tl.load(x, mask=inside).to(WIDE)
        x2 = tl.load(x + D // 2 * x_steps[i][3], mask=inside).to(WIDE)
        y1 = (x1 * cos).to(y.dtype.element_ty).to(WIDE) - (x2 * sin).to(y.dtype.element_ty).to(WIDE)
        y2 = (x2 * cos).to(y.dtype.element_ty).to(WIDE) + (x1 * sin).to(y.dtype.element_ty).to(WIDE)
        tl.store(y, y1, mask=inside)
        tl.store(y + D // 2 * y_steps[i][3], y2, mask=inside)


def _rotated(xs, sign, cos, sin):
    """Turn q and k (sign = 1), or their gradients back (sign = -1)."""
    B, _, T, D = xs[0].shape
    dtype = torch.promote_types(xs[0].dtype, cos.dtype)
    ys = tuple(torch.empty_like(x, dtype=dtype) for x in xs)  # in the order of x in memory, as torch does
    x_steps, y_steps = (tuple(x.stride() for x in each) for each in (xs, ys))
    cos_steps, sin_steps = (x.expand(B, T, D).stride() for x in (cos, sin))  # 0 from row to row if there is one for all
    heads = tuple(x.shape[1] for x in xs)
    constants = {"SIGN": sign, "HEADS": tuple(map(triton.next_power_of_2, heads)), **_sizes(D // 2, dtype, max(heads))}
    _rotation[(B * T,)](xs, ys, x_steps, y_steps, heads, cos, sin, cos_steps, sin_steps, T, D, **constants)
    return ys


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHTD, k_BKTD, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated((q_BHTD, k_BKTD), 1, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return *_rotated(grads, -1, *ctx.saved_tensors), None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row of x by its root mean square and multiply it by the weight, as LlamaRMSNorm does.

    Args:
        x: (..., D), in any float dtype; copied first if it is not contiguous.
        weight: (D,), frozen; the result has the dtype to which torch promotes those of x and the weight.
        eps: what is added to the mean square.

    Raises:
        ValueError: if the weight requires a gradient, or its shape is not (D,).
    """
    if weight.requires_grad or weight.shape != x.shape[-1:]:
        raise ValueError("rms_norm needs a weight of shape (D,) that requires no gradient: it is frozen")
    with torch.cuda.device_of(x):  # Triton starts kernels on the current card, which need not be that of x
        return _RMSNorm.apply(x.contiguous(), weight.contiguous(), eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up``, as LlamaMLP does.

    Raises:
        ValueError: if gate and up are not contiguous tensors of one shape and one dtype.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError("swiglu needs a gate and an up that are contiguous and of one shape and one dtype")
    with torch.cuda.device_of(gate):
        return _SwiGLU.apply(gate, up)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys by their positions, as transformers' ``apply_rotary_pos_emb`` does.

    Args:
        q: queries, (B, H, T, D) with any strides; D is even.
        k: keys, (B, K, T, D) with any strides, in the dtype of the queries.
        cos: (B, T, D), or (1, T, D) for all rows of a batch; its two halves over D are equal.
        sin: the same of the sines.

    Raises:
        ValueError: if shapes or dtypes do not fit, or cos or sin requires a gradient.
    """
    B, _, T, D = q.shape
    fits = k.shape == (B, k.shape[1], T, D) and k.dtype == q.dtype and D % 2 == 0 and cos.dtype == sin.dtype
    if not fits or any(x.shape not in ((B, T, D), (1, T, D)) or x.requires_grad for x in (cos, sin)):
        raise ValueError("rotate needs q (B, H, T, D), k (B, K, T, D), frozen cos and sin (B or 1, T, D), an even D")
    with torch.cuda.device_of(q):
        return _Rotation.apply(q, k, cos, sin)
