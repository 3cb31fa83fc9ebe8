"""Name the kernels of torch's attention, and say which one it picks; ``measure/counting.py`` sees which one ran."""

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


def kernel_for(device: Device, dtype: str, *, masked: bool, grouped: bool) -> str:
    """Predict which kernel torch's ``scaled_dot_product_attention`` picks on a CUDA GPU.

    The rules are those of torch 2.13, in sdp_utils.cpp.

    Args:
        device: the GPU.
        dtype: the name of the dtype of queries, keys and values, such as ``float16``.
        masked: whether the call has a mask.
        grouped: whether torch gets fewer key heads than query heads, so that several query heads share one.

    Returns:
        ``"flash"``, ``"memory-efficient"`` or ``"math"``. cuDNN's kernel, which newer GPUs may run, is not told apart,
        because it saves the same activations as flash.
    """
    if device.capability >= (8, 0) and dtype in ("float16", "bfloat16") and not masked:
        return "flash"
    # The memory-efficient kernel takes neither grouped heads nor bf16 that the GPU only emulates.
    emulated = dtype == "bfloat16" and device.capability < (8, 0)
    if grouped or emulated:
        return "math"
    return "memory-efficient"
