r"""FlashAttention: exact attention that never holds the T x T matrix.

Saves    attention scores: B H T^2 elements a block -> one log-sum-exp a query, B H T          [bytes]
Costs    the backward pass recomputes the scores tile by tile: 5 products a tile, where plain attention has 4. Causal
         tiles above the diagonal are skipped, which halves all products
Claim    exact within rounding
Needs    sdpa: nothing, torch picks a kernel. flash_attention_2: compute capability 8.0, fp16 or bf16
Breaks   flash_attention_2 on a T4 (7.5). With sdpa, a model with grouped heads gets the math kernel there on rows
         without a mask, and that holds the matrix (see expand_kv; ``cria doctor`` names the kernel that runs)
Sources  Dao 2023, arXiv:2307.08691, sec. 3.1, alg. 1 and 2; Dao et al. 2022, arXiv:2205.14135, sec. 3
Ours     both algorithms in plain torch, grouped-query included. A kernel keeps its tiles in on-chip memory and so is
         faster as well; here only the bytes shrink

Shapes: B batch, H query heads, K key and value heads, G = H / K queries that share one, T queries, S keys,
D width of a head; tiles of I queries and J keys. A group's queries are stacked, as they share keys: G I x J scores.
"""

import torch
from torch.autograd.function import once_differentiable

REFERENCE = ("_FlashAttention.forward",)
PLAIN = """
from transformers import AutoModelForCausalLM

# "flash_attention_2" needs compute capability 8.0; a T4 has 7.5.
model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
"""
TILE = 128
"""Tokens along each side of a tile."""


def _rows(x_BKGTD, i, tile):
    """Cut out one tile of queries, with those of a group stacked: (B, K, G I, D), in fp32 as in kernels, or wider."""
    return _wide(x_BKGTD[:, :, :, i : i + tile].flatten(2, 3))


def _wide(x):
    """Cast to fp32, unless the dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q_rows, k_BKJD, i, j, groups, causal):
    """Compute the scaled scores of one tile, (B, K, G I, J), with -inf where a query would look ahead."""
    scores = q_rows @ k_BKJD.mT / q_rows.shape[-1] ** 0.5
    rows, keys = scores.shape[-2:]
    if causal and j + keys > i + 1:  # the tile reaches over the diagonal
        at = torch.arange(i, i + rows // groups, device=scores.device).repeat(groups)
        ahead = torch.arange(j, j + keys, device=scores.device) > at[:, None]
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BKGTD, k_BKSD, v_BKSD, causal, tile):
        groups = q_BKGTD.shape[2]
        tokens = q_BKGTD.shape[3]
        keys = k_BKSD.shape[2]
        out_BKGTD = torch.empty_like(q_BKGTD)
        lse_BKGT = torch.empty_like(q_BKGTD[..., 0], dtype=torch.promote_types(q_BKGTD.dtype, torch.float32))
        for i in range(0, tokens, tile):
            q = _rows(q_BKGTD, i, tile)
            # The online softmax: for each query the sum of weighted values, the largest score and the sum of weights so
            # far. Both sums are relative to that largest score.
            out = torch.zeros_like(q)
            peak = torch.full_like(q[..., :1], float("-inf"))
            total = torch.zeros_like(q[..., :1])
            for j in range(0, i + 1 if causal else keys, tile):
                k = _wide(k_BKSD[:, :, j : j + tile])
                v = _wide(v_BKSD[:, :, j : j + tile])
                scores = _scores(q, k, i, j, groups, causal)
                higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
                shrink = (peak - higher).exp()  # makes the sums so far relative to the new largest score
                weights = (scores - higher).exp()
                out = out * shrink + weights @ v
                total = total * shrink + weights.sum(-1, keepdim=True)
                peak = higher
            here = slice(i, i + tile)
            out_BKGTD[:, :, :, here] = (out / total).unflatten(2, (groups, -1))
            lse_BKGT[:, :, :, here] = (peak + total.log()).squeeze(-1).unflatten(2, (groups, -1))
        ctx.save_for_backward(q_BKGTD, k_BKSD, v_BKSD, out_BKGTD, lse_BKGT)  # and no T x S matrix
        ctx.causal = causal
        ctx.tile = tile
        return out_BKGTD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BKGTD):
        q_BKGTD, k_BKSD, v_BKSD, out_BKGTD, lse_BKGT = ctx.saved_tensors
        causal = ctx.causal
        tile = ctx.tile
        groups = q_BKGTD.shape[2]
        tokens = q_BKGTD.shape[3]
        keys = k_BKSD.shape[2]
        scale = q_BKGTD.shape[-1] ** -0.5
        dq_BKGTD, dk_BKSD, dv_BKSD = torch.empty_like(q_BKGTD), *(_wide(torch.zeros_like(x)) for x in (k_BKSD, v_BKSD))
        for i in range(0, tokens, tile):
            q, out, grad = (_rows(x, i, tile) for x in (q_BKGTD, out_BKGTD, grad_BKGTD))
            lse = _rows(lse_BKGT[..., None], i, tile)
            dq = torch.zeros_like(q)
            # The softmax's gradient needs, for each query, the sum of weight x gradient over its keys (D in alg. 2).
            inner = (grad * out).sum(-1, keepdim=True)
            for j in range(0, i + 1 if causal else keys, tile):
                here = slice(j, j + tile)
                k = _wide(k_BKSD[:, :, here])
                v = _wide(v_BKSD[:, :, here])
                weights = (_scores(q, k, i, j, groups, causal) - lse).exp()  # the softmax again, from its log-sum-exp
                dscores = weights * (grad @ v.mT - inner) * scale
                dv_BKSD[:, :, here] += weights.mT @ grad  # a group's queries are rows, so this sums over the group
                dk_BKSD[:, :, here] += dscores.mT @ q
                dq += dscores @ k
            dq_BKGTD[:, :, :, i : i + tile] = dq.unflatten(2, (groups, -1))
        return dq_BKGTD, dk_BKSD.to(k_BKSD.dtype), dv_BKSD.to(v_BKSD.dtype), None, None


def flash_attention(
    q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, causal: bool = True, tile: int = TILE
) -> torch.Tensor:
    """Compute the attention of every query over its keys, one tile of scores at a time.

    Args:
        q_BHTD: queries, shape (B, H, T, D), any float dtype.
        k_BKSD: keys, shape (B, K, S, D); K divides H, and neighbouring query heads share one.
        v_BKSD: values, shape (B, K, S, D).
        causal: whether a query sees only the keys up to its own place; needs T = S.
        tile: tokens along each side of a tile.

    Returns:
        softmax(q k^T / sqrt(D)) v, shape (B, H, T, D), in the dtype of the queries.

    Raises:
        ValueError: if attention is causal and T is not S.
    """
    if causal and q_BHTD.shape[2] != k_BKSD.shape[2]:
        raise ValueError("causal attention needs as many queries as keys")
    q_BKGTD = q_BHTD.unflatten(1, (k_BKSD.shape[1], -1))
    return _FlashAttention.apply(q_BKGTD, k_BKSD, v_BKSD, causal, tile).flatten(1, 2)
