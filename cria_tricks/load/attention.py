"""Register attention functions that transformers does not have, so that a model's config can ask for them by name.

A model looks up two functions by the name in its config. One makes the mask, once per forward pass. The other computes
the attention in every block, and gets whatever the first one has returned. If a name had no mask function, its
attention would get no mask at all, not even for padding. So each name is registered for both. Importing this module
registers them.

Shapes: B rows, T query tokens, S key tokens, H query heads, K key and value heads, D the width of a head.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cria_tricks.switches import expand_kv as expand_kv_switch
from cria_tricks.switches import packing as packing_switch
from cria_tricks.techniques import expand_kv, kv_cache, packing


def sdpa_expanded(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    *arguments: Any,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Repeat the shared key and value heads for all query heads, then call the sdpa attention of transformers.

    For one new token nothing is repeated: the queries that share a head become its rows.

    Returns:
        The output, shape (B, T, H, D), and ``None`` in place of the attention weights.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    if query_BHTD.shape[2] == 1 and groups > 1:
        return _one_token(query_BHTD, key_BKSD, value_BKSD, *arguments, **named)
    key = expand_kv.expand_kv(key_BKSD, groups)
    value = expand_kv.expand_kv(value_BKSD, groups)
    # transformers reads from the module how many query heads share a key head. It would leave such groups to torch, or
    # repeat the heads once more. So it gets a stand-in for the module, without groups.
    ungrouped: Any = types.SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(ungrouped, query_BHTD, key, value, *arguments, **named)


def _one_token(
    query_BH1D: torch.Tensor, key_BKSD: torch.Tensor, value_BKSD: torch.Tensor, *arguments: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Attend with the queries of one token, those of a group as the rows of its shared head."""
    rows_BKGD = kv_cache.groups_as_rows(query_BH1D, key_BKSD.shape[1])
    # The rows all belong to the same token, so none is causal. A mask has one row, which is right for all of them.
    module: Any = types.SimpleNamespace(is_causal=False)
    named["is_causal"] = False
    out_BGKD, _ = sdpa_attention_forward(module, rows_BKGD, key_BKSD, value_BKSD, *arguments, **named)
    return out_BGKD.transpose(1, 2).flatten(1, 2).unsqueeze(1), None


@torch.compiler.disable  # the lengths differ in every batch, and a compiled block would be compiled again for each
def sdpa_by_document(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each document of packed rows; for rows that are not packed, do as :func:`sdpa_expanded`.

    Args:
        module: the block's attention.
        query_BHTD: queries, shape (B, H, T, D).
        key_BKSD: keys, shape (B, K, S, D).
        value_BKSD: values, shape (B, K, S, D).
        attention_mask: from :func:`lengths_or_mask`: the lengths of the documents, or a mask, or ``None``.
        **named: further arguments of transformers' sdpa attention.

    Returns:
        The output, shape (B, T, H, D), and ``None`` in place of the attention weights.
    """
    if attention_mask is None or attention_mask.dim() != 1:  # not the lengths of documents
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
    """Return the lengths of the documents for packed rows without a sliding window, and else the mask of sdpa.

    transformers does not tell where documents begin. It only gives ``mask_function(row, head, t, s)``, which says
    whether token t may attend to token s. So in packed rows a token begins a document if it may not attend to the token
    before it.

    Returns:
        Lengths as :func:`cria_tricks.techniques.packing.document_lengths` gives them, shape (N,), int64, on the CPU;
        or a mask, shape (B, 1, T, S), bool, on ``device``; or ``None`` if plain causal attention is right.
    """
    # For packed rows transformers gives no attention_mask, and forbids to leave out the mask (allow_is_causal_skip).
    # With use_vmap a model changes the mask itself; local_size is the width of a sliding window.
    packed = attention_mask is None and not allow_is_causal_skip and not use_vmap and local_size is None
    if packed and q_length > 1 and named["kv_length"] == q_length:  # as many keys as queries: no KV cache
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
    expand_kv_switch.IMPLEMENTATION: (sdpa_expanded, sdpa_mask),
    packing_switch.IMPLEMENTATION: (sdpa_by_document, lengths_or_mask),
}
"""For each name, the function that computes the attention, and the function that makes its mask."""

for name, (attend, make_mask) in ATTENTION.items():
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
