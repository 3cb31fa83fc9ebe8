"""The kernels of a CUDA card, for fake tensors, which pretend to be on a CPU.

A count of live bytes sees each allocation of the card's kernels, but for the workspace inside of a single one.
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
from cria_tricks.tricks.activation_offload import Offloaded


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Let fake tensors on "cpu" take the kernels that real tensors take on a CUDA card.

    Attention takes the kernel that the card would pick, 8-bit products those of bitsandbytes for CUDA. What offload and
    paging put outside of the card's memory becomes a meta tensor, which takes no memory.

    Args:
        device: the card; on a CPU nothing is changed.
    """
    patch = unittest.mock.patch.object
    # Fake tensors know torch's product for all experts in bf16 only; a T4 has none, and takes transformers' own.
    at_once = patch(moe, "_can_use_grouped_mm", functools.partial(_experts_at_once, device))
    if device.kind != "cuda":
        with at_once:
            yield
        return
    with (
        at_once,
        # No TorchFunctionMode: it is off in backward passes, where checkpointed blocks run once more.
        patch(F, "scaled_dot_product_attention", functools.partial(_attend, device)),
        patch(bnb.autograd._functions, "MatMul8bitFp", bnb.autograd._functions.MatMul8bitLt),
        patch(bnb.functional, "int8_vectorwise_quant", _int8_vectorwise_quant),
        patch(torch.ops.bitsandbytes, "int8_mixed_scaled_mm", _int8_mixed_scaled_mm),
        patch(F, "dropout", _dropout),
        patch(bnb.optim.optimizer.Optimizer8bit, "get_state_buffer", _state_buffer),
        patch(bnb.optim.optimizer.Optimizer8bit, "prefetch_state", lambda optimizer, weight: None),
        patch(Offloaded, "HOST", "meta"),
    ):
        yield


def _state_buffer(optimizer: Any, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    paged = optimizer.is_paged and weight.numel() >= 1e5  # bitsandbytes' own limit
    where = "meta" if paged else weight.device
    state: Any = torch.zeros_like(weight, dtype=dtype, device=where)
    state.is_paged = paged  # else bitsandbytes wants it beside the weight
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
    if torch.is_autocast_enabled("cpu"):  # attention is on its list: cast to 16 bits, and nothing inside is cast again
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    kernel = kernel_for(device, query.dtype, masked=attn_mask is not None, grouped=grouped)
    with torch.autocast("cpu", enabled=False):
        return _RUN[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]


def _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    bias = _added(attn_mask, query)
    if bias is not None:
        bias = bias.expand(-1, query.shape[1], -1, -1)
    return efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]


def _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    math = torch.ops.aten._scaled_dot_product_attention_math
    bias = _added(attn_mask, query)
    return math(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Turn a mask of booleans into numbers that a kernel adds to the scores, in the dtype of the queries."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))


_RUN = {"flash": _flash, "memory-efficient": _efficient, "math": _math}


def _experts_at_once(device: Device, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and (device.kind == "cpu" or device.capability >= (8, 0))


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop with a mask of one byte an element; a CPU keeps the mask in the dtype of the input."""
    if not training or p == 0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


def _int8_vectorwise_quant(x: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Quantise to a byte an element; no number is known, so no column is taken for one with outliers."""
    if threshold:
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
    sums = torch.ops.bitsandbytes.int8_linear_matmul(codes, weight)  # int32
    out = torch.ops.bitsandbytes.int8_mm_dequant(sums, scales, weight_scales, dtype=torch.float16, bias=bias)
    return out.to(x.dtype), x.new_empty(0)
