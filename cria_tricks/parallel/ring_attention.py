"""Ring attention from scratch: a row's chunks lie in several processes, and keys and values go round a ring of them.

Each process keeps its queries. The attention over the keys of one chunk is a partial result. With it comes the
log-sum-exp of its scores: the logarithm of the sum by which its softmax divided. Two partial results are merged by
their log-sum-exp, as FlashAttention merges its tiles (the online softmax). The card of ``parallel/context.py`` has the
sources.

Shapes: N processes, 2 N chunks of C tokens, of which a process has two. B rows, H query heads, K key and value heads, D
the width of a head. Queries (B, H, 2 C, D), keys and values (B, K, 2 C, D), the log-sum-exp (B, H, 2 C).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from cria_tricks.common.errors import BadInput
from cria_tricks.parallel.ring_collectives import exchange, wait
from cria_tricks.parallel.zigzag import zigzag
from cria_tricks.techniques.expand_kv import expand_kv

NAME = "ring"
"""Under this name transformers finds :func:`attention`."""
_MULTIPLE = 32
"""CUDA's kernel returns the log-sum-exp of a multiple of so many queries, and asks for as many in the backward pass."""


class Seen(NamedTuple):
    """What one chunk's queries see of a chunk's keys: all; those up to their own (causal); or what a mask leaves."""

    causal: bool
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Chunks:
    """How the rows of a micro-batch are cut into 2 N chunks.

    Attributes:
        rank: this process's place in the ring.
        size: N, the number of processes.
        documents: for packed rows the document of each token, a tensor (B, C) for each of the 2 N chunks; ``None`` if
            each row is one document. Padding on the right then needs no mask, because no token sees what follows.
    """

    rank: int
    size: int
    documents: tuple[torch.Tensor, ...] | None = None

    def between(self, query: int, key: int, dtype: torch.dtype) -> Seen | None:
        """Return what the queries of a chunk see of the keys of a chunk; ``None`` if they see nothing."""
        if key > query:
            return None
        causal = query == key
        if self.documents is None:
            return Seen(causal, None)
        same_BCC = self.documents[query][:, :, None] == self.documents[key][:, None, :]
        if same_BCC.all():
            return Seen(causal, None)
        if not same_BCC.any():
            return None
        if causal:
            same_BCC = same_BCC.tril()
        # A large number, not infinity: a query that sees no key of this chunk then gets a log-sum-exp, with which the
        # merge gives this chunk a weight of zero. Of infinities it would get NaN.
        hidden = torch.finfo(dtype).min / 2
        mask_BCC = torch.full(same_BCC.shape, hidden, dtype=dtype, device=same_BCC.device).masked_fill_(same_BCC, 0.0)
        return Seen(False, mask_BCC[:, None])


def chunked(row: torch.Tensor, size: int, fill: int = 0, dim: int = 1) -> tuple[torch.Tensor, ...]:
    """Cut rows into 2 N chunks of equal length, after filling them up at their end.

    Args:
        row: a tensor whose dimension ``dim`` has the T tokens.
        size: N, the number of processes.
        fill: what the rows are filled up with.
        dim: the dimension that is cut.
    """
    missing = -row.shape[dim] % (2 * size)
    # F.pad counts dimensions from the last one.
    filled = torch.nn.functional.pad(row, (0, 0) * (row.ndim - 1 - dim) + (0, missing), value=fill)
    return filled.chunk(2 * size, dim)


def around_the_ring(tensor: torch.Tensor, chunks: Chunks) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield this process's tensor, and then those of all others: rank and tensor, each passed on by the left neighbour.

    The next one is on its way while the caller computes with the one that it got.
    """
    for step in range(chunks.size):
        under_way: list[Any] = []
        received = tensor
        if step < chunks.size - 1:
            received = torch.empty_like(tensor)
            under_way = exchange(tensor, received)
        yield (chunks.rank - step) % chunks.size, tensor
        wait(under_way)
        tensor = received


def merge(
    out_BHCD: torch.Tensor, lse_BHC: torch.Tensor, more_BHCD: torch.Tensor, more_lse_BHC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention over some keys with the attention over others, by their log-sum-exp."""
    both_BHC = torch.logaddexp(lse_BHC, more_lse_BHC)
    kept_BHCD = out_BHCD * (lse_BHC - both_BHC).exp()[..., None]
    return kept_BHCD + more_BHCD * (more_lse_BHC - both_BHC).exp()[..., None], both_BHC


class RingAttention(torch.autograd.Function):
    """Causal attention over rows whose chunks lie in N processes; each keeps its queries, and keys and values travel.

    Of all scores only those of one kernel's tile exist at a time. The forward pass merges the partial results of all
    chunks of keys. With the merged log-sum-exp the backward pass recomputes the true softmax of each pair of chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, chunks: Chunks, scale: float
    ) -> torch.Tensor:
        """Return the attention of this process's queries, shape (B, H, 2 C, D)."""
        # fp32, or fp64 to check the gradients
        wide = torch.promote_types(q_BHTD.dtype, torch.float32)
        queries = q_BHTD.chunk(2, 2)
        outs = [torch.zeros_like(query, dtype=wide) for query in queries]
        lses = [torch.full_like(out[..., 0], -torch.inf) for out in outs]
        for owner, keys_values in around_the_ring(torch.stack([k_BKTD, v_BKTD]), chunks):
            for mine, its, seen in pairs(chunks, owner, q_BHTD.dtype):
                key, value = keys_values.chunk(2, 3)[its]
                out, lse = attend(queries[mine], key, value, seen, scale)
                outs[mine], lses[mine] = merge(outs[mine], lses[mine], out, lse.to(wide))
        # Laid out token by token, as the output projection reads it. Otherwise that would copy it, and save the copy.
        out_BHTD = torch.cat([out.transpose(1, 2) for out in outs], 1).to(q_BHTD.dtype).transpose(1, 2)
        ctx.save_for_backward(q_BHTD, k_BKTD, v_BKTD, out_BHTD, torch.cat(lses, 2))
        ctx.chunks = chunks
        ctx.scale = scale
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of queries, keys and values; those of the keys and values travel with them."""
        q_BHTD, k_BKTD, v_BKTD, out_BHTD, lse_BHT = ctx.saved_tensors
        queries, outs, lses, grads = (x.chunk(2, 2) for x in (q_BHTD, out_BHTD, lse_BHT, gradients[0]))
        wide = lse_BHT.dtype
        dq_BHTD = torch.zeros_like(q_BHTD, dtype=wide)
        travelling = torch.zeros(2, *k_BKTD.shape, dtype=wide, device=k_BKTD.device)
        for owner, keys_values in around_the_ring(torch.stack([k_BKTD, v_BKTD]), ctx.chunks):
            for mine, its, seen in pairs(ctx.chunks, owner, q_BHTD.dtype):
                key, value = keys_values.chunk(2, 3)[its]
                back = attend_backward(grads[mine], queries[mine], key, value, outs[mine], lses[mine], seen, ctx.scale)
                dq_BHTD.chunk(2, 2)[mine].add_(back[0])
                for total, part in zip(travelling.chunk(2, 3)[its], back[1:], strict=True):
                    total += part
            # They follow their keys and values, and the last of the N sends brings them home.
            if ctx.chunks.size > 1:
                received = torch.empty_like(travelling)
                wait(exchange(travelling, received))
                travelling = received
        dk_BKTD, dv_BKTD = travelling.to(k_BKTD.dtype)
        return dq_BHTD.to(q_BHTD.dtype), dk_BKTD, dv_BKTD, None, None


def pairs(chunks: Chunks, owner: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Seen]]:
    """Yield which of this process's two chunks sees which of the owner's two (0 or 1 each), and what it sees of it."""
    for mine, query in enumerate(zigzag(chunks.rank, chunks.size)):
        for its, key in enumerate(zigzag(owner, chunks.size)):
            if seen := chunks.between(query, key, dtype):
                yield mine, its, seen


def attend(
    q_BHCD: torch.Tensor, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, seen: Seen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one pair of chunks by torch's fused kernel: its output and its log-sum-exp."""
    groups = q_BHCD.shape[1] // k_BKCD.shape[1]
    q_k_v = q_BHCD, expand_kv(k_BKCD, groups), expand_kv(v_BKCD, groups)
    if not q_BHCD.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *q_k_v, 0.0, seen.causal, attn_mask=seen.mask, scale=scale
        )
    out_BHCD, lse_BHC, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *q_k_v, _aligned(seen.mask, q_BHCD), True, 0.0, seen.causal, scale=scale
    )
    return out_BHCD, lse_BHC[..., : q_BHCD.shape[2]]


def attend_backward(
    grad_BHCD: torch.Tensor,
    q_BHCD: torch.Tensor,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    out_BHCD: torch.Tensor,
    lse_BHC: torch.Tensor,
    seen: Seen,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of one pair of chunks, from the output and the log-sum-exp over all keys of the row."""
    groups = q_BHCD.shape[1] // k_BKCD.shape[1]
    q_k_v = q_BHCD, expand_kv(k_BKCD, groups), expand_kv(v_BKCD, groups)
    if q_BHCD.is_cuda:
        mask = _aligned(seen.mask, q_BHCD)
        # The queries that fill it up get a log-sum-exp of infinity, so each of their weights is zero.
        lse = torch.nn.functional.pad(lse_BHC, (0, -lse_BHC.shape[-1] % _MULTIPLE), value=torch.inf).contiguous()
        none = torch.zeros((), dtype=torch.int64)  # the random state of dropout, of which there is none
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_BHCD, *q_k_v, mask, out_BHCD, lse, none, none, 0.0, (True, True, True, False), seen.causal, scale=scale
        )
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHCD, *q_k_v, out_BHCD, lse_BHC, 0.0, seen.causal, attn_mask=seen.mask, scale=scale
        )
    # The gradient of a key head is the sum over the query heads that share it.
    return dq, dk.unflatten(1, (-1, groups)).sum(2), dv.unflatten(1, (-1, groups)).sum(2)


def _aligned(mask_B1CC: torch.Tensor | None, q_BHCD: torch.Tensor) -> torch.Tensor | None:
    """Return a mask whose lines begin at multiples of 16 elements, for each head, as CUDA's kernel wants it."""
    if mask_B1CC is None:
        return None
    C = mask_B1CC.shape[-1]
    return torch.nn.functional.pad(mask_B1CC, (0, -C % 16))[..., :C].expand(-1, q_BHCD.shape[1], -1, -1)


def attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ring: Chunks | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one block of a transformers model, whose batch has an entry ``ring``.

    Returns:
        The output, shape (B, 2 C, H, D), and ``None`` in place of the attention weights.

    Raises:
        BadInput: if the model's attention is not plain causal attention.
    """
    kind = type(module).__name__
    if ring is None or attention_mask is not None:
        raise BadInput(f"parallel.strategy=context: {kind} takes no chunks of a row; use parallel.strategy=ddp or fsdp")
    if sliding_window or dropout:
        raise BadInput(
            f"parallel.strategy=context: {kind} has a sliding window or dropout, which the ring has not; use "
            "parallel.strategy=ddp or fsdp"
        )
    q_k_v = [query_BHTD, key_BKTD, value_BKTD]
    device = query_BHTD.device.type
    if torch.is_autocast_enabled(device):  # it casts what torch's own attention gets, but does not know ours
        q_k_v = [x.to(torch.get_autocast_dtype(device)) for x in q_k_v]
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    return RingAttention.apply(*q_k_v, ring, scale).transpose(1, 2), None


def install(model: Any) -> None:
    """Let a transformers model, or peft's wrapper of one, attend by :func:`attention`.

    No function for a mask is registered, so transformers makes none: what a chunk sees is in ``ring``.
    """
    # transformers takes seconds to import; a run has it already.
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    model.set_attn_implementation(NAME)
