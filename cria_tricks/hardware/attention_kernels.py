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
    # The math kernel is not one operation but a handful of plain ones. In torch, only it calls this softmax.
    "_safe_softmax": "math",
}
"""The operations with which torch's ``scaled_dot_product_attention`` computes, and the kernel that each stands for."""

_COMPOSITE = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
"""Operations that consist of others; which kernel runs is visible only inside them."""


class WatchAttention(TorchDispatchMode):
    """Record which attention kernel runs inside this context, in a single operation or in a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    @property
    def kernel(self) -> str:
        """The kernel that ran: ``"flash"``, ``"memory-efficient"``, ``"cudnn"``, ``"vendor"`` or ``"math"``.

        If several kernels ran, their names are joined by ``+``. It is ``"none"`` if no such kernel ran, as in the
        attention that transformers calls eager.
        """
        return "+".join(sorted(self._seen)) or "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for every operation inside the context.
        name = func.overloadpacket.__name__
        if name in _COMPOSITE:  # in inference mode these arrive in one piece, and the kernel is inside
            with self:  # torch switches the mode off while this method runs, so switch it on for the pieces
                return func.decompose(*args, **(kwargs or {}))
        if name in KERNELS:
            self._seen.add(KERNELS[name])
        elif func.namespace.startswith("flash_attn"):  # the package's own operations
            self._seen.add("flash")
        return func(*args, **(kwargs or {}))


def attention_kernel(call: Callable[[], Any]) -> str:
    """Run a call, and return the name of its attention kernel; see :attr:`WatchAttention.kernel`."""
    with WatchAttention() as watch:
        call()
    return watch.kernel


def kernel_for(device: Device, dtype: torch.dtype, *, masked: bool, grouped: bool) -> str:
    """Predict which kernel torch's ``scaled_dot_product_attention`` picks on a CUDA GPU.

    The rules are those of torch 2.13, in sdp_utils.cpp.

    Args:
        device: the GPU.
        dtype: dtype of queries, keys and values.
        masked: whether the call has a mask.
        grouped: whether torch gets fewer key heads than query heads, so that several query heads share one.

    Returns:
        ``"flash"``, ``"memory-efficient"`` or ``"math"``. cuDNN's kernel, which newer GPUs may run, is not told apart,
        because it saves the same activations as flash.
    """
    if device.capability >= (8, 0) and dtype in (torch.float16, torch.bfloat16) and not masked:
        return "flash"
    # The memory-efficient kernel takes neither grouped heads nor bf16 that the GPU only emulates.
    emulated = dtype == torch.bfloat16 and device.capability < (8, 0)
    if grouped or emulated:
        return "math"
    return "memory-efficient"
