r"""Flash-Decoding: one new token attends to a long past in many pieces at once.

Saves    time: one new token makes only B K independent pieces of work, which leave most of a card idle; with n splits
         it makes B K n
Costs    the splits' outputs and log-sum-exps: n B H (D + 1) fp32 elements for a moment      [bytes]; no more products
Claim    exact within rounding: a softmax over pieces, merged by their log-sum-exps, is the softmax over all
Needs    a KV cache, and one query a sequence; in production compute capability 8.0 and 16 bits
Breaks   nothing; with many sequences or a short past there is enough work without splits
Sources  Dao, Haziza, Massa, Sizov 2023, pytorch.org/blog/flash-decoding (three steps: split, attend, merge)
Ours     all three steps in plain torch, the splits one after another. There is no switch, because a kernel that can
         split does so by itself (see ``for_chat``)

Shapes: B batch, H query heads, K key and value heads, G = H / K queries that share one, S tokens in the cache,
D width of a head; n splits.
"""

import torch

from cria_tricks.hardware import Device
from cria_tricks.switches.expand_kv import IMPLEMENTATION
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="flash_decoding", command="cria chat")
REFERENCE = ("attend_piece", "merge")
PLAIN = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
answer = model.generate(**inputs, max_new_tokens=2, do_sample=False)
"""


def attend_piece(q_BKGD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to one piece of the past, as if there were no other.

    Args:
        q_BKGD: the new token's queries, shape (B, K, G, D); the G queries of a group share keys.
        k_BKSD: the piece's keys, shape (B, K, S, D), S at least 1.
        v_BKSD: its values, shape (B, K, S, D).

    Returns:
        The piece's output, shape (B, K, G, D), and the log-sum-exp of its scores, shape (B, K, G, 1).
    """
    scores = q_BKGD @ k_BKSD.mT / q_BKGD.shape[-1] ** 0.5
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v_BKSD, lse


def merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the outputs of pieces: the weight of each is its share of the whole sum of exponentials.

    The result is again an output with its log-sum-exp, so merged pieces can be merged.

    Args:
        outs: n outputs, each (..., D).
        lses: their log-sum-exps, each (..., 1).

    Returns:
        The output over all pieces, shape (..., D), and its log-sum-exp, shape (..., 1).
    """
    lse_n = torch.stack(lses)
    lse = lse_n.logsumexp(0)
    return ((lse_n - lse).exp() * torch.stack(outs)).sum(0), lse


def flash_decoding(q_BH1D: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, splits: int) -> torch.Tensor:
    """Attend with one new token to the whole past, in pieces.

    Args:
        q_BH1D: queries of one token a sequence, shape (B, H, 1, D), any float dtype.
        k_BKSD: cached keys, the new token's included, shape (B, K, S, D); K divides H.
        v_BKSD: cached values, shape (B, K, S, D).
        splits: n, how many pieces of about equal length; if it is above S, there are S.

    Returns:
        softmax(q k^T / sqrt(D)) v, shape (B, H, 1, D), in the dtype of the queries.

    Raises:
        ValueError: if there are several queries a sequence, or no split.
    """
    if q_BH1D.shape[2] != 1 or splits < 1:
        raise ValueError(f"one query a sequence and at least one split, not {q_BH1D.shape[2]} and {splits}")
    wide = torch.promote_types(q_BH1D.dtype, torch.float32)  # sums are fp32 in the kernels too
    q_BKGD = q_BH1D.squeeze(2).unflatten(1, (k_BKSD.shape[1], -1)).to(wide)
    pieces = [x.tensor_split(min(splits, x.shape[2]), dim=2) for x in (k_BKSD, v_BKSD)]
    outs, lses = zip(*(attend_piece(q_BKGD, k.to(wide), v.to(wide)) for k, v in zip(*pieces, strict=True)), strict=True)
    out_BKGD, _ = merge(list(outs), list(lses))
    return out_BKGD.flatten(1, 2).unsqueeze(2).to(q_BH1D.dtype)


def for_chat(device: Device) -> dict[str, str]:
    """Choose the attention with which ``cria chat`` loads a model, so that decoding is fast.

    From compute capability 8.0 on the default is right: transformers takes sdpa, and torch's flash kernel chooses the
    number of splits for one query itself (``num_splits_heuristic`` in torch's ``flash_api.cpp``). An older card, such
    as a T4, has no kernel that splits, and its fast kernel takes no shared heads. There the heads are repeated for the
    prompt (see ``expand_kv``), and for one new token the queries that share a head become its rows (see ``kv_cache``).
    The CPU's flash kernel takes shared heads, and does not split: its cores divide heads and queries among them.
    ``flash_attn_with_kvcache`` of the package flash-attn splits too, but transformers (5.23) calls it only for
    continuous batching.

    Args:
        device: the machine that chats.

    Returns:
        Keyword arguments for ``from_pretrained``; none where the default is right.
    """
    if device.needs_expand_kv:
        return {"attn_implementation": IMPLEMENTATION}
    return {}
