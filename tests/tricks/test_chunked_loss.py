"""The chunked loss is the plain loss, in chunks."""

import pytest
import torch
import torch.nn.functional as F

from cria_tricks.measure import LiveBytes
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

N, D, V = 40, 32, 1000


def inputs(dtype=torch.float32, n=N):
    torch.manual_seed(0)
    hidden = torch.randn(n, D).to(dtype).requires_grad_(True)
    return hidden, torch.randn(V, D).to(dtype) * 0.2, torch.randint(0, V, (n,))


@pytest.mark.parametrize("chunk", [1, 7, N, 4 * N])
def test_loss_and_gradient_equal_the_plain_ones(chunk):
    hidden, head, labels = inputs()
    plain = F.cross_entropy(hidden @ head.T, labels, reduction="sum")
    (expected,) = torch.autograd.grad(plain, hidden)
    loss = chunked_cross_entropy(hidden, head, labels, chunk)
    (found,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_the_derivative():
    hidden, head, labels = inputs(torch.float64, n=5)
    # The loss is summed in fp32, so the step must be large against its rounding.
    assert torch.autograd.gradcheck(
        lambda h: chunked_cross_entropy(h, head, labels, 2), (hidden,), eps=1e-2, atol=1e-2, rtol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_fp32_whatever_goes_in(dtype):
    hidden, head, labels = inputs(dtype)
    plain = F.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")
    loss = chunked_cross_entropy(hidden, head, labels, 8)
    assert loss.dtype == torch.float32
    # Both round the same 16-bit logits; only the order of summing differs.
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)


def test_small_fp16_probabilities_keep_their_gradient():
    """With 100,000 words a typical probability is 1e-5, under the smallest normal fp16 number, 6e-5."""
    torch.manual_seed(0)
    words = 100_000
    head = torch.randn(words, D).mul_(0.01)
    labels = torch.randint(0, words, (4,))
    exact_hidden = torch.randn(4, D).requires_grad_(True)
    (exact,) = torch.autograd.grad(F.cross_entropy(exact_hidden @ head.T, labels, reduction="sum"), exact_hidden)
    half_hidden = exact_hidden.detach().half().requires_grad_(True)
    loss = chunked_cross_entropy(half_hidden, head.half(), labels, 2)
    (found,) = torch.autograd.grad(loss, half_hidden)
    assert (found.float() - exact).norm() / exact.norm() < 2e-3  # fp16 holds 11 bits: 5e-4 an element


def test_autocast_decides_the_dtype():
    hidden, head, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        low = chunked_cross_entropy(hidden, head, labels, 8)
    high = chunked_cross_entropy(hidden, head, labels, 8)
    assert low.dtype == torch.float32
    assert low.item() != high.item()
    assert low.item() == pytest.approx(high.item(), rel=1e-2)


def test_no_more_than_one_chunk_of_logits_is_alive():
    hidden, head, labels = inputs(n=512)
    peaks = []
    for chunk in (16, 512):
        with LiveBytes() as count:
            chunked_cross_entropy(hidden, head, labels, chunk).backward()
        hidden.grad = None
        peaks.append(count.peak)
    logits = 4 * V  # bytes of one token's
    small, large = peaks
    assert large - small > 0.9 * (512 - 16) * logits
    assert small < 16 * logits * 4 + 4 * 512 * D * 4


def test_without_a_gradient_none_is_made():
    hidden, head, labels = inputs()
    peaks = []
    for wanted in (True, False):
        with LiveBytes() as count, torch.set_grad_enabled(wanted):
            chunked_cross_entropy(hidden, head, labels, 1)
        peaks.append(count.peak)
    assert peaks[0] - peaks[1] >= hidden.nbytes


def test_no_trained_token_is_no_loss():
    hidden, head, labels = inputs(n=0)
    assert chunked_cross_entropy(hidden, head, labels).item() == 0.0
