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
    """A sure model leaves each of 100,000 wrong words 1e-8: under 6e-8, the smallest fp16 number there is."""
    torch.manual_seed(0)
    words = 100_000
    head = torch.randn(words, D) * 0.01 + 0.3  # the wrong words pull together, so losing them shows
    head[7] += 1.0
    exact_hidden = torch.full((2, D), 0.575).requires_grad_(True)
    labels = torch.tensor([7, 7])
    logits = exact_hidden @ head.T
    assert 1e-9 < logits.softmax(-1)[0, 0].item() < 3e-8
    (exact,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), exact_hidden)
    half_hidden = exact_hidden.detach().half().requires_grad_(True)
    loss = chunked_cross_entropy(half_hidden, head.half(), labels, 2)
    (found,) = torch.autograd.grad(loss, half_hidden)
    error = (found.float() - exact).norm() / exact.norm()
    assert error < 0.15  # what fp16 logits near 24, rounded to 1/64, leave; it is 0.42 with the small ones lost


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
