"""FlashAttention is plain attention, without the T x T matrix; and the kernel that runs is named."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cria_tricks.measure.counting import attention_kernel
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.techniques.flash_attention import flash_attention
from tests.helpers import prepare
from tests.techniques.attention import heads, naive_attention, saved_bytes, with_gradients
from tests.tolerances import FLASH_ATTENTION

B, D = 2, 16


@pytest.mark.parametrize("dtype", FLASH_ATTENTION, ids=str)
@pytest.mark.parametrize(("h", "k"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("t", "s", "tile", "causal"),
    [(1, 1, 4, True), (37, 37, 8, True), (32, 32, 8, True), (40, 40, 128, True), (9, 9, 1, True), (37, 50, 8, False)],
)
def test_math(t, s, tile, causal, h, k, dtype):
    *inputs, grad = heads(B, h, k, t, s, D, dtype)
    ours = with_gradients(lambda q, k, v: flash_attention(q, k, v, causal, tile), grad, *inputs)
    plain = with_gradients(lambda q, k, v: naive_attention(q, k, v, causal), grad, *inputs)
    torchs = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), grad, *inputs
    )
    for name, found, by_formula, production in zip(("out", "dq", "dk", "dv"), ours, plain, torchs, strict=True):
        assert found.dtype == dtype
        for expected in (by_formula, production):
            torch.testing.assert_close(
                found, expected, rtol=0, atol=FLASH_ATTENTION[dtype], msg=lambda m, n=name: n + m
            )


def test_scores_that_overflow_an_exponential():
    """exp(1000) is infinite in every dtype; only differences to the running maximum may be exponentiated."""
    *inputs, grad = heads(1, 2, 1, 24, 24, D, torch.float64)
    inputs[0] = (inputs[0] * 1000).detach().requires_grad_(True)
    ours = with_gradients(lambda q, k, v: flash_attention(q, k, v, tile=8), grad, *inputs)
    plain = with_gradients(lambda q, k, v: naive_attention(q, k, v, True), grad, *inputs)
    assert (inputs[0] @ inputs[1].mT).max() / D**0.5 > 1000
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_causal_attention_needs_as_many_queries_as_keys():
    q, k, v, _ = heads(1, 2, 2, 3, 5, D)
    with pytest.raises(ValueError, match="as many queries as keys"):
        flash_attention(q, k, v)


@pytest.mark.parametrize("t", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mechanism(t, dtype):
    """Kept: queries, keys, values, output, and one fp32 number a query. Not kept: anything with T^2."""
    h, k, tile, size = 4, 2, 16, dtype.itemsize
    q, key, v, grad = heads(B, h, k, t, t, D, dtype)
    own = size * B * t * D * (2 * h + 2 * k) + 4 * B * h * t
    assert saved_bytes(lambda: flash_attention(q, key, v, tile=tile)) == own
    whole_matrix = size * B * h * t * t + t * t  # the probabilities, and the causal mask in bytes
    assert saved_bytes(lambda: naive_attention(q, key, v, True)) == size * B * t * D * 3 * h + whole_matrix

    with LiveBytes() as count:
        for tensor in (q, key, v):
            count.track(tensor)
        out = flash_attention(q, key, v, tile=tile)
        assert count.live == own
    del out

    n = t // tile
    tiles = n * (n + 1) // 2  # on and under the diagonal
    product = 2 * B * h * tile * tile * D
    with FlopCounterMode(display=False) as forward:
        out = flash_attention(q, key, v, tile=tile)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, (q, key, v), grad)
    assert forward.get_total_flops() == 2 * tiles * product
    assert backward.get_total_flops() == 5 * tiles * product
    with FlopCounterMode(display=False) as plain:
        torch.autograd.grad(naive_attention(q, key, v, True), (q, key, v), grad)
    assert plain.get_total_flops() == (2 + 4) * n * n * product


def test_mechanism_peaks_are_linear_in_the_tokens():
    """What a tile takes for a moment does not depend on T, so every peak grows by the same bytes a token."""
    tile, peaks = 16, []
    for t in (64, 128, 192):
        q, k, v, grad = heads(B, 4, 2, t, t, D)
        with LiveBytes() as count:
            out = flash_attention(q, k, v, tile=tile)
            forward, count.peak = count.peak, count.live
            torch.autograd.grad(out, (q, k, v), grad)
        peaks.append((forward, count.peak))
    for first, second, third in zip(*peaks, strict=True):
        assert second - first == third - second > 0


def test_the_kernel_is_named():
    q, k, _, _ = heads(1, 4, 2, 16, 16, D)

    def attend(**options):
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options)

    assert attention_kernel(attend) == "flash"
    assert attention_kernel(lambda: attend(attn_mask=torch.ones(16, 16, dtype=torch.bool))) == "flash"
    assert attention_kernel(lambda: attend(dropout_p=0.1)) == "math"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernel(attend) == "math"
        assert attention_kernel(lambda: attend(is_causal=True)) == "math"
    with torch.inference_mode():
        assert attention_kernel(attend) == "flash"
        assert attention_kernel(lambda: attend(dropout_p=0.1)) == "math"
    assert attention_kernel(lambda: (attend(), attend(dropout_p=0.1))) == "flash+math"
    assert attention_kernel(lambda: naive_attention(q, k, k, True)) == "none"
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 4, 16, D) for _ in range(3))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        assert attention_kernel(lambda: efficient(q, k, v, None, True)) == "memory-efficient"


@pytest.mark.parametrize(("attention", "kernel"), [("eager", "none"), ("sdpa", "flash")])
@pytest.mark.parametrize("padded", [False, True])
def test_switch(attention, kernel, padded, tiny_model):
    """The kernel in a loaded model: eager has none, sdpa has torch's."""
    _, _, loaded = prepare(tiny_model, f"tricks.attention={attention}")
    ids, mask = torch.arange(3, 27).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = not padded
    assert attention_kernel(lambda: loaded.model(input_ids=ids, attention_mask=mask)) == kernel
    with sdpa_kernel(SDPBackend.MATH):
        forced = attention_kernel(lambda: loaded.model(input_ids=ids, attention_mask=mask))
    assert forced == ("math" if attention == "sdpa" else "none")
