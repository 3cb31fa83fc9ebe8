"""Which attention kernel really runs here, as opposed to what a flag asked for."""

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks.hardware.device import Device

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "vendor",
    "_scaled_dot_product_attention_math_for_mps": "math",
    # The math kernel is no operation of its own but a handful of them; of torch's code only it calls this softmax.
    "_safe_softmax": "math",
}
"""Operations that torch's ``scaled_dot_product_attention`` ends in, and the kernel each stands for."""

_COMPOSITE = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math")


class WatchAttention(TorchDispatchMode):
    """See which attention kernel computes inside this context, in a single operation or a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    @property
    def kernel(self) -> str:
        """``"flash"``, ``"memory-efficient"``, ``"cudnn"`` or ``"math"``; several joined by ``+`` when they differ.

        ``"none"`` when no such kernel ran, as in the attention that transformers calls eager.
        """
        return "+".join(sorted(self._seen)) or "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _COMPOSITE:  # in inference mode these arrive whole; the kernel is inside
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if name in KERNELS:
            self._seen.add(KERNELS[name])
        elif func.namespace.startswith("flash_attn"):  # the package's own operations
            self._seen.add("flash")
        return func(*args, **(kwargs or {}))


def attention_kernel(call: Callable[[], Any]) -> str:
    """Run a call and name the attention kernel that computed in it."""
    with WatchAttention() as watch:
        call()
    return watch.kernel


def kernel_for(device: Device, dtype: torch.dtype, *, masked: bool, grouped: bool) -> str:
    """Say which kernel torch's ``scaled_dot_product_attention`` picks on a CUDA card (sdp_utils.cpp of torch 2.13).

    Args:
        device: the card.
        dtype: of queries, keys and values.
        masked: whether a mask comes with them.
        grouped: whether several query heads share a key head.

    Returns:
        ``"flash"``, ``"memory-efficient"`` or ``"math"``. What cuDNN takes on newer cards keeps what flash keeps.
    """
    if device.capability >= (8, 0) and dtype in (torch.float16, torch.bfloat16) and not masked:
        return "flash"
    return "math" if grouped else "memory-efficient"


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Inside, attention on fake tensors goes through the kernel that a CUDA card would pick, as it would be called.

    Args:
        device: the card; on a CPU nothing is changed.
    """
    if device.kind != "cuda":
        yield
        return
    # No TorchFunctionMode: it is off in backward passes, where checkpointed blocks run once more.
    with unittest.mock.patch.object(F, "scaled_dot_product_attention", functools.partial(_attend, device)):
        yield


def _attend(
    device: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):  # attention is on autocast's list of 16-bit operations
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    kernel = kernel_for(device, query.dtype, masked=attn_mask is not None, grouped=grouped)
    if kernel == "flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels add a mask, and want it in their dtype
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if kernel == "memory-efficient":
        if attn_mask is not None:
            attn_mask = attn_mask.expand(-1, query.shape[1], -1, -1)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return efficient(query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale)[0]
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
