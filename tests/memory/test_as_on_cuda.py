"""What a card's kernels keep and allocate, by hand; fake tensors go their ways and leave everything as it was."""

import contextlib
import functools

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from cria_tricks.hardware import T4, Device
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.predict import fake_model
from cria_tricks.predict.fake_model import kernels_of

A100 = Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=40 * 2**30)
B, H, K, D = 2, 6, 2, 16


def kept(device: Device, tokens: int, *, masked: bool, grouped: bool, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that attention keeps for its backward pass, its output included, its inputs not."""
    with FakeTensorMode(), LiveBytes() as live, kernels_of(device):
        q, k, v = (
            torch.empty(B, heads, tokens, D, dtype=dtype, requires_grad=True)
            for heads in (H, *(K if grouped else H,) * 2)
        )
        mask = torch.ones(B, 1, tokens, tokens, dtype=torch.bool) if masked else None
        before = live.live
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=grouped)
        after = live.live
        out.sum().backward()
        assert k.grad.shape == k.shape
    return after - before


def test_the_math_kernel_keeps_the_matrix_and_the_efficient_one_a_number_a_query():
    """By hand: twice the tokens, and what grows with their square is left of kept(2T) - 2 kept(T)."""
    T = 64
    math, efficient = (functools.partial(kept, T4, masked=False, grouped=g) for g in (True, False))
    assert math(2 * T) - 2 * math(T) == 2 * B * H * T * T * 4
    random_state = 16
    assert efficient(T) == B * H * T * D * 4 + B * H * T * 4 + random_state, "the output and its log-sum-exp"


def test_a_mask_costs_the_efficient_kernel_one_matrix_for_all_heads():
    T = 64
    plain, masked = (kept(T4, T, masked=m, grouped=False) for m in (False, True))
    assert masked - plain == B * T * T * 4


def test_flash_takes_groups_on_a_newer_card_in_16_bits_only():
    T = 64
    assert (
        kept(A100, T, masked=False, grouped=True, dtype=torch.bfloat16) < kept(A100, T, masked=False, grouped=True) / 4
    )
    flash = functools.partial(kept, A100, masked=False, grouped=True, dtype=torch.bfloat16)
    assert flash(2 * T) - 2 * flash(T) <= 64, "no matrix, but for the random state"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_math_kernel_is_torchs_to_the_byte(masked, autocast, monkeypatch):
    """Autocast casts its inputs and nothing inside: half-precision scores would be half the bytes."""
    monkeypatch.setattr(fake_model, "kernel_for", lambda *_, **__: "math")

    def bytes_of(attend) -> tuple[int, int, int]:
        q, k, v = (torch.randn(B, heads, 32, D, requires_grad=True) for heads in (H, *(H if masked else K,) * 2))
        mask = torch.ones(B, 1, 32, 32, dtype=torch.bool) if masked else None
        with LiveBytes() as live:
            with torch.autocast("cpu", dtype=torch.float16, enabled=autocast), sdpa_kernel(SDPBackend.MATH):
                out = attend(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=not masked)
            after, peak = live.live, live.peak
            out.sum().backward()
        return after, peak, live.peak

    assert bytes_of(functools.partial(fake_model._attend, T4)) == bytes_of(F.scaled_dot_product_attention)


def test_an_8_bit_product_is_made_of_32_bit_sums_and_unpacks_the_layer_on_the_way_back_only():
    rows, d_in, d_out = 64, 32, 256
    with FakeTensorMode(), LiveBytes() as live, kernels_of(T4):
        x = torch.empty(1, rows, d_in, dtype=torch.float16, requires_grad=True)
        state = bnb.MatmulLtState()
        state.has_fp16_weights, state.threshold = False, 6.0
        state.CB, state.SCB = torch.empty(d_out, d_in, dtype=torch.int8), torch.empty(d_out)
        before = live.live
        out = bnb.matmul(x, state.CB, state=state)
        assert live.live - before == rows * d_out * 2, "the output; of the input no copy"
        codes = rows * d_in + rows * 4
        assert live.peak - before == codes + rows * d_out * (4 + 2)
        grad, before = torch.empty_like(out), live.live
        live.peak = live.live
        out.backward(grad)
    after = live.live - before
    assert after == rows * d_in * 2
    assert live.peak - before == d_out * d_in * 2 + max(after, 2 * d_out * 4)


def test_a_dropped_out_element_costs_a_byte_on_a_card():
    x = torch.ones(1000, requires_grad=True)
    found = {}
    for kind, context in (("card", kernels_of(T4)), ("cpu", contextlib.nullcontext())):
        with LiveBytes() as live, context:
            out = F.dropout(x, 0.1)
            found[kind] = live.live - out.nbytes
    assert found == {"card": 1000, "cpu": 4000}
