r"""KV cache in place: a new token's keys and values are written behind the others, and its queries share them.

Saves    traffic of each new token: the cache moves once. torch.cat moves it 3 times in all, and 3 + 2 G times where G
         query heads get copies of the keys and values that they share                                    [bytes]
Costs    room for the whole answer from its first token on: 2 B K R D elements a block, R tokens of prompt and answer
Claim    exact within rounding: the keys, the values and the softmax are the same
Needs    a model with a KV cache, and the number of tokens in advance
Breaks   nothing. Blocks with a sliding window and learnt prompts keep the cache of transformers
Sources  Shazeer 2019, arXiv:1911.02150, sec. 2.4 (a new token waits for the bytes of the cache, not for products);
         ``seqlenq_ngroups_swapped`` in torch's ``flash_api.cpp`` (queries of a group as rows)
Ours     both functions; ``load/answering.py`` and ``load/attention.py`` give them to transformers. ``cria chat`` and
         ``cria eval`` always use the first, and the second where torch's fast kernel takes no shared heads, as on a T4

Shapes: B sequences, H query heads, K key and value heads, G = H / K queries that share one, T new tokens, S tokens in
the cache, R tokens that have room, D width of a head.
"""

import torch

from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="flash_decoding", command="cria eval")
REFERENCE = ("append", "groups_as_rows")
PLAIN = """
from transformers import AutoModelForCausalLM

# 16-bit weights, and no autocast: under it, keys and values would differ in dtype.
model = AutoModelForCausalLM.from_pretrained(
    base, dtype="float16", attn_implementation="sdpa"
)
answer = model.generate(
    **inputs, max_new_tokens=2, do_sample=False, cache_implementation="static"
)
"""


def append(room_BKRD: torch.Tensor, length: int, new_BKTD: torch.Tensor) -> torch.Tensor:
    """Write new keys, or values, behind those that are there.

    Args:
        room_BKRD: the memory of the cache, shape (B, K, R, D). It is changed in place.
        length: S, how many tokens are in it.
        new_BKTD: what is added, shape (B, K, T, D).

    Returns:
        A view of all that is in the cache now, shape (B, K, S + T, D). Nothing is copied but the new tokens.

    Raises:
        ValueError: if there is no room for so many tokens.
    """
    end = length + new_BKTD.shape[2]
    if end > room_BKRD.shape[2]:
        raise ValueError(f"the cache has room for {room_BKRD.shape[2]} tokens, not for {end}")
    room_BKRD[:, :, length:end] = new_BKTD
    return room_BKRD[:, :, :end]


def groups_as_rows(q_BH1D: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Turn the query heads that share a key head into rows of one head, so that no key is repeated for them.

    This is right for one new token only. It may attend to all of the past, so its rows need no causal mask.

    Args:
        q_BH1D: the new token's queries, shape (B, H, 1, D).
        kv_heads: K, the number of key heads, which divides H.

    Returns:
        A view, shape (B, K, G, D).
    """
    return q_BH1D.squeeze(2).unflatten(1, (kv_heads, -1))
