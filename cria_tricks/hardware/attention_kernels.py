"""Find out which attention kernel really runs, as opposed to what a flag asked for."""

from collections.abc import Callable
from typing import Any

import torch
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
    emulated = dtype == torch.bfloat16 and device.capability < (8, 0)
    if grouped or emulated:
        return "math"
    return "memory-efficient"
