"""Ring attention: its gradients, its equality with one process at odd lengths, masked and packed, what it sends."""

import pytest
import torch
import torch.distributed as dist

from cria_tricks.parallel import ring_attention
from cria_tricks.parallel.tensor import Copied, Summed
from cria_tricks.tricks.expand_kv import expand_kv

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
"""Two query heads share a key head."""


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Attention of whole rows in one process, by all scores."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ expand_kv(k, groups).mT / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ expand_kv(v, groups)


def rows(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values of two rows, and a gradient of the result; the same in all processes."""
    draw = torch.Generator().manual_seed(length)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(2, many, length, WIDTH, generator=draw, dtype=torch.float64).to(dtype) for many in heads]


def through_the_ring(*q_k_v: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """The same attention, of whole rows to whole rows: cut, computed by all processes, and put together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = None if of is None else ring_attention.chunked(of, size, -1)
    parts = [ring_attention.chunked(Copied.apply(x), size, 0, 2) for x in q_k_v]
    own = [torch.cat([part[number] for number in ring_attention.zigzag(rank, size)], 2) for part in parts]
    out = ring_attention.RingAttention.apply(*own, ring_attention.Chunks(rank, size, numbers), WIDTH**-0.5)
    placed = [torch.zeros_like(chunk) for chunk in parts[0]]
    for number, chunk in zip(ring_attention.zigzag(rank, size), out.chunk(2, 2), strict=True):
        placed[number] = chunk
    return Summed.apply(torch.cat(placed, 2)[:, :, : q_k_v[0].shape[2]])


def errors(length: int, dtype: torch.dtype, of: torch.Tensor | None) -> list[float]:
    """The largest errors of the output and of three gradients, against those of whole rows in fp64."""
    given = rows(length, dtype)
    own = [x.clone().requires_grad_() for x in given[:3]]
    true = [x.double().requires_grad_() for x in given[:3]]
    got, wanted = through_the_ring(*own, of=of), whole(*true, of)
    found = [got, *torch.autograd.grad(got, own, given[3])]
    right = [wanted, *torch.autograd.grad(wanted, true, given[3].double())]
    return [float((f - r).abs().max() / r.abs().max()) for f, r in zip(found, right, strict=True)]


PACKED = torch.tensor([[0] * 5 + [1] * 13 + [2] * 3 + [3, 4], [0] * 11 + [1] * 12])
"""Rows of 23 tokens: three documents and two tokens of padding, each its own; and two documents."""


@pytest.mark.parametrize("pool", ["two", "four"])
@pytest.mark.parametrize(("length", "of"), [(16, None), (23, None), (3, None), (23, PACKED)], ids=str)
def test_math(request, pool, length, of):
    """In fp64: 23 tokens are no multiple of 4 or 8, and 3 leave processes with nothing but filling."""
    for found in request.getfixturevalue(pool).run(errors, length, torch.float64, of):
        # Each is a sum of at most 2 x 23 x 8 products, so it rounds within some hundred eps of its largest element.
        assert max(found) < 368 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
def test_in_narrow_numbers_partial_results_are_merged_in_fp32(four, dtype, eps):
    for found in four.run(errors, 23, dtype, PACKED):
        # What is stored is rounded: probabilities, the output, each pair's gradients. Merged in bf16 it would be more.
        assert max(found) < 12 * eps


def checked(of: torch.Tensor | None) -> bool:
    """torch's own check of gradients, which moves each number of the rows a little, in all processes at once."""
    given = [x[:, :, :7, :].clone().requires_grad_() for x in rows(23, torch.float64)[:3]]
    return torch.autograd.gradcheck(lambda *x: through_the_ring(*x, of=of), given, fast_mode=True)


@pytest.mark.parametrize("of", [None, PACKED[:, 2:9]], ids=["one document", "packed"])
def test_torchs_gradcheck(two, of):
    assert two.run(checked, of) == [True, True]


def test_each_process_has_as_much_work():
    """Pairs of chunks that a process computes: a causal one is half of a full one."""
    for size in (1, 2, 4):
        work = []
        for rank in range(size):
            chunks = ring_attention.Chunks(rank, size)
            found = [seen for owner in range(size) for _, _, seen in ring_attention.pairs(chunks, owner, torch.float32)]
            work.append(sum(1 - seen.causal / 2 for seen in found))
        assert work == [2 * size] * size
        assert sum(work) == (2 * size) ** 2 / 2, "half of all pairs"


def test_documents_that_never_meet_are_not_computed():
    of = torch.arange(16)[None] // 4  # four documents, one in each chunk of two processes
    chunks = ring_attention.Chunks(0, 2, ring_attention.chunked(of, 2))
    found = [list(ring_attention.pairs(chunks, owner, torch.float32)) for owner in range(2)]
    assert found == [[(0, 0, ring_attention.Seen(True, None)), (1, 1, ring_attention.Seen(True, None))], []]
