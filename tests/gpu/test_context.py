"""Ring attention on CUDA: its kernels on one card, torch's context_parallel on two. ``pytest -m gpu``; never run."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cria_tricks.parallel.ring_attention import Chunks, RingAttention, chunked, zigzag
from cria_tricks.techniques.packing import block_causal_mask, documents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

POSITIONS = torch.tensor([[*range(40), *range(23), 0], [*range(64)]])
"""Two packed rows of 64 tokens: two documents and a token of padding, and one document."""


def drawn(seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of two rows, four heads."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, 64, 32, generator=draw).cuda() for _ in range(4)]


def with_gradients(attend, q, k, v, grad) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_pair_of_chunks_on_a_card_is_attention(packed):
    given = drawn()
    numbers = chunked(documents(POSITIONS.cuda()), 1, -1) if packed else None
    seen = block_causal_mask(POSITIONS.cuda())[:, None] if packed else None
    ours = with_gradients(lambda *x: RingAttention.apply(*x, Chunks(0, 1, numbers), 32**-0.5), *given)
    right = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=seen, is_causal=not packed), *given)
    for found, wanted in zip(ours, right, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)  # TF32 has 11 bits


def beside_torchs(rank: int) -> None:
    """In each of two processes: the same chunks by torch's context_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mine = [torch.cat([x.chunk(4, 2)[number] for number in zigzag(rank, 2)], 2) for x in drawn()]
    ours = with_gradients(lambda *x: RingAttention.apply(*x, Chunks(rank, 2), 32**-0.5), *mine)
    buffers = drawn()
    with context_parallel(init_device_mesh("cuda", (2,)), buffers=buffers, buffer_seq_dims=[2] * 4):
        theirs = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *buffers)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_two_cards_compute_what_torchs_context_parallel_does():
    torch.multiprocessing.spawn(beside_torchs, nprocs=2)
