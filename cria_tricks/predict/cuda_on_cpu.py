"""Run the kernels of a CUDA card on fake tensors, which pretend to be on a CPU, so that a dry run counts their bytes.

A count of live bytes then sees every tensor that these kernels allocate, but not the workspace inside a kernel.
"""

import contextlib
import functools
import unittest.mock
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from transformers.integrations import moe

from cria_tricks.hardware import Device
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.load import overlapped_offload
from cria_tricks.techniques import fused_lora
from cria_tricks.techniques.activation_offload import Offloaded


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Patch the libraries so that fake tensors on "cpu" take the kernels that real tensors take on a CUDA card.

    Attention takes the kernel that the card would choose, and 8-bit products take bitsandbytes' kernels for CUDA. A
    tensor that offload or paging would put outside the card's memory becomes a meta tensor, which is not counted.

    Args:
        device: the card. For a CPU only two kernels are patched that ask for values: of experts, and of int8 codes.
    """
    patch = unittest.mock.patch.object
    # torch's grouped product, one call for all experts, works on fake tensors only in bf16. A T4 does not have it, and
    # takes transformers' fallback.
    at_once = patch(moe, "_can_use_grouped_mm", functools.partial(_experts_at_once, device))
    # A CPU multiplies int8 codes only in eval mode. bitsandbytes first looks for outliers, and fake tensors have none.
    quantises = patch(bnb.functional, "int8_vectorwise_quant", _int8_vectorwise_quant)
    multiplies = patch(torch.ops.bitsandbytes, "int8_mixed_scaled_mm", _int8_mixed_scaled_mm)
    if device.kind != "cuda":
        with at_once, quantises, multiplies:
            yield
        return
    with (
        at_once,
        quantises,
        multiplies,
        # Not a TorchFunctionMode: it is inactive in the backward pass, in which checkpointed blocks run once more.
        patch(F, "scaled_dot_product_attention", functools.partial(_attend, device)),
        # bitsandbytes would choose its kernels for CPUs, because that is where fake tensors say they are.
        patch(bnb.autograd._functions, "MatMul8bitFp", bnb.autograd._functions.MatMul8bitLt),
        patch(F, "dropout", _dropout),
        patch(bnb.optim.optimizer.Optimizer8bit, "get_state_buffer", _state_buffer),
        patch(bnb.optim.optimizer.Optimizer8bit, "prefetch_state", lambda optimizer, weight: None),
        patch(Offloaded, "HOST", "meta"),
        patch(overlapped_offload, "copy_stream", lambda kind: overlapped_offload.CopyStream(torch.cpu)),
        patch(fused_lora, "adds_up_in_fp32", lambda x: True),
    ):
        yield


def _state_buffer(optimizer: Any, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make an optimizer state; a paged one is a meta tensor, because it does not take the card's memory."""
    paged = optimizer.is_paged and weight.numel() >= 1e5  # bitsandbytes does not page smaller states
    where = "meta" if paged else weight.device
    state: Any = torch.zeros_like(weight, dtype=dtype, device=where)
    state.is_paged = paged  # otherwise bitsandbytes refuses a state on another device than its weight
    return state


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
    """Stand in for torch's ``scaled_dot_product_attention``: run the kernel that the card would choose."""
    if torch.is_autocast_enabled("cpu"):  # as autocast does: cast the inputs of attention, and nothing inside it
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    kernel = kernel_for(device, str(query.dtype).removeprefix("torch."), masked=attn_mask is not None, grouped=grouped)
    with torch.autocast("cpu", enabled=False):
        return _RUN[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]


def _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    # Only for a backward pass the kernel also returns the log-sum-exp of each line of scores.
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    bias = _added(attn_mask, query)
    if bias is not None:
        bias = bias.expand(-1, query.shape[1], -1, -1)
    return efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]


def _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    # decompose: without gradients it would be one operation, whose scores nobody could count
    math = torch.ops.aten._scaled_dot_product_attention_math.default.decompose
    bias = _added(attn_mask, query)
    return math(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Turn a boolean mask into numbers that a kernel adds to the scores, 0 or -inf, in the dtype of the queries."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))


_RUN = {"flash": _flash, "memory-efficient": _efficient, "math": _math}
"""Name of a kernel, as ``kernel_for`` returns it -> the function that runs it."""


def _experts_at_once(device: Device, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    """Tell whether one grouped product computes all experts; transformers asks this for each of its products."""
    return weight.dtype == torch.bfloat16 and (device.kind == "cpu" or device.capability >= (8, 0))


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop elements as CUDA does, with a mask of one byte each; on a CPU the mask has the dtype of the input."""
    if not training or p == 0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


def _int8_vectorwise_quant(x: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Quantise to one byte an element, with a scale for each vector.

    Fake tensors have no values, so no column is taken as one with outliers.
    """
    if threshold:  # the real kernel makes these tensors to find the outliers
        (x.abs() >= threshold).any()
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32), x.new_empty(0).long()


def _int8_mixed_scaled_mm(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply in 8 bits as on CUDA: sums in int32, dequantised to fp16, then cast; without outliers."""
    sums = torch.ops.bitsandbytes.int8_linear_matmul(codes, weight)  # int32
    out = torch.ops.bitsandbytes.int8_mm_dequant(sums, scales, weight_scales, dtype=torch.float16, bias=bias)
    return out.to(x.dtype), x.new_empty(0)
