r"""Expanded K/V: repeat the shared key and value heads, so that a T4 finds a fast attention kernel.

Saves    attention scores of rows without a mask, B H T^2 elements a block. A T4 computes them in the math kernel, which
         holds them: the memory-efficient kernel needs as many key heads as query heads, and the flash kernel needs a
         newer card                                                                              [bytes]
Costs    keys and values of H heads are saved instead of K: 2 B (H - K) S D more elements a block; no more products
Claim    exact within rounding
Needs    attention = sdpa, a model with grouped heads, and a CUDA card below compute capability 8.0, or fp32 on a newer
         one, because the flash kernel takes 16 bits only
Breaks   nothing. It has no effect on padded rows, whose heads transformers repeats by itself; with packing, which
         repeats them too; and on a torch that has pull request 191085 (2026, after 2.13), whose memory-efficient kernel
         takes grouped heads
Sources  Ainslie et al. 2023, arXiv:2305.13245, sec. 2.2 (grouped queries); transformers issues 48633 and 45776
Ours     the repeat; torch's kernel computes the attention. ``load/attention.py`` gives both to transformers as one
         attention function

Shapes: queries (B, H, T, D); keys and values (B, K, S, D), with D the width of a head. G = H / K query heads share one.
"""

import torch

REFERENCE = ("expand_kv",)
PLAIN = """
import types
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def expanded(module, query, key, value, *arguments, **named):
    groups = query.shape[1] // key.shape[1]
    key, value = (
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
    )
    ungrouped = types.SimpleNamespace(is_causal=module.is_causal)
    return sdpa_attention_forward(ungrouped, query, key, value, *arguments, **named)


AttentionInterface.register("expanded", expanded)
AttentionMaskInterface.register("expanded", sdpa_mask)
model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="expanded")
"""


def expand_kv(heads_BKSD: torch.Tensor, groups: int) -> torch.Tensor:
    """Give every query head its own copy of the key or value head it shares.

    The gradient of a repeat is the sum over the copies, so a shared head learns from its whole group, as before.

    Args:
        heads_BKSD: keys or values, shape (B, K, S, D).
        groups: G, query heads that share one.

    Returns:
        Shape (B, K G, S, D), the G copies of a head side by side; ``heads_BKSD`` itself when G is 1.
    """
    if groups == 1:
        return heads_BKSD
    return heads_BKSD[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
