"""Attention functions that transformers does not have, under names its models can be asked for.

A model calls two functions by the name in its config: one makes the mask, once a forward pass; the other attends,
in every block, and gets whatever the first has made. A name without a mask function would get no mask at all, not
even for padding, so each name is registered for both. Importing this module registers them.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cria_tricks.tricks import expand_kv, packing


def sdpa_expanded(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    *arguments: Any,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """The sdpa of transformers, on keys and values that are repeated already.

    Returns:
        Shape (B, T, H, D), and no attention weights.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    key = expand_kv.expand_kv(key_BKSD, groups)
    value = expand_kv.expand_kv(value_BKSD, groups)
    # sdpa reads the groups off the module, and would leave them to torch or repeat once more.
    ungrouped: Any = types.SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(ungrouped, query_BHTD, key, value, *arguments, **named)


@torch.compiler.disable  # the lengths are other ones in every batch, and a compiled block would be compiled for each
def sdpa_by_document(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each document of packed rows, and over rows that are not packed as ``sdpa_expanded`` does.

    Args:
        module: the block's attention.
        query_BHTD: shape (B, H, T, D).
        key_BKSD: shape (B, K, S, D).
        value_BKSD: shape (B, K, S, D).
        attention_mask: from :func:`lengths_or_mask`.
        **named: what sdpa takes.

    Returns:
        Shape (B, T, H, D), and no attention weights.
    """
    if attention_mask is None or attention_mask.dim() != 1:
        return sdpa_expanded(module, query_BHTD, key_BKSD, value_BKSD, attention_mask, **named)

    def attend(*q_k_v: torch.Tensor) -> torch.Tensor:
        return sdpa_expanded(module, *q_k_v, None, **named)[0]  # without a mask it is causal

    return packing.by_document(attend, query_BHTD, key_BKSD, value_BKSD, attention_mask.tolist()), None


def lengths_or_mask(
    *,
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **named: Any,
) -> torch.Tensor | None:
    """The lengths of the documents when rows are packed and see all of their own, else the mask of sdpa.

    ``mask_function(row, head, t, s)`` says whether token t may look at token s. It is all that transformers tells: in
    packed rows a token begins a document when it may not look at the one before it.

    Returns:
        Lengths as :func:`cria_tricks.tricks.packing.document_lengths` gives them, shape (N,), int64, on the CPU; or a
        mask, shape (B, 1, T, S), bool, on ``device``; or None when causal is all there is to say.
    """
    packed = attention_mask is None and not allow_is_causal_skip and not use_vmap and local_size is None
    if packed and q_length > 1 and named["kv_length"] == q_length:
        row = torch.arange(batch_size, device=device)[:, None]
        at = torch.arange(q_length, device=device)[None]
        first = at == 0
        begins_BT = first | ~mask_function(row, torch.zeros_like(row), at, (at - 1).clamp(min=0))
        return packing.document_lengths(begins_BT).cpu()
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **named,
    )


ATTENTION: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    expand_kv.IMPLEMENTATION: (sdpa_expanded, sdpa_mask),
    packing.IMPLEMENTATION: (sdpa_by_document, lengths_or_mask),
}
"""Name -> the function that attends, and the one that makes its mask."""

for name, (attend, make_mask) in ATTENTION.items():
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
