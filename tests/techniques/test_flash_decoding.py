"""One token's attention in pieces is its attention in one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cria_tricks.adapter import opening
from cria_tricks.hardware import T4, Device
from cria_tricks.measure.counting import attention_kernel
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.techniques import flash_decoding as technique
from cria_tricks.techniques.flash_decoding import attend_piece, flash_decoding, merge
from tests.techniques.attention import Attended, heads, naive_attention
from tests.tolerances import FLASH_DECODING

B, S, D = 2, 45, 16


@pytest.mark.parametrize("dtype", FLASH_DECODING, ids=str)
@pytest.mark.parametrize(("h", "k"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("splits", [1, 2, 7, S, 10 * S])
def test_math(splits, h, k, dtype):
    q, key, v, _ = (x.detach() for x in heads(B, h, k, 1, S, D, dtype))
    ours = flash_decoding(q, key, v, splits)
    assert (ours.dtype, ours.shape) == (dtype, q.shape)
    for expected in (
        naive_attention(q, key, v, False),
        F.scaled_dot_product_attention(q, key, v, enable_gqa=True),
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=FLASH_DECODING[dtype])


def test_pieces_that_differ_by_more_than_an_exponential_holds():
    """One piece's scores near 1000, the other's near -1000: weights of 1 and 0, and no infinity."""
    q, k, v, _ = (x.detach() for x in heads(1, 2, 2, 1, 8, D, torch.float64))
    k = torch.cat([q, -q], dim=2).repeat_interleave(4, dim=2) * 4000 / q.square().sum(-1, keepdim=True)
    ours = flash_decoding(q, k, v, 2)
    torch.testing.assert_close(ours, naive_attention(q, k, v, False), rtol=0, atol=FLASH_DECODING[torch.float64])
    assert ours.isfinite().all()


def test_merged_pieces_can_be_merged():
    q, k, v, _ = (x.detach() for x in heads(B, 4, 2, 1, 12, D, torch.float64))
    grouped = q.squeeze(2).unflatten(1, (2, -1))
    a, b, c = (attend_piece(grouped, k[:, :, i : i + 4], v[:, :, i : i + 4]) for i in (0, 4, 8))
    left = merge(*([x, y] for x, y in zip(merge(*([x, y] for x, y in zip(a, b, strict=True))), c, strict=True)))
    right = merge(*([x, y] for x, y in zip(a, merge(*([x, y] for x, y in zip(b, c, strict=True))), strict=True)))
    whole = attend_piece(grouped, k, v)
    for found in (left, right):
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=FLASH_DECODING[torch.float64])


def test_what_is_no_decoding_is_refused():
    q, k, v, _ = heads(1, 2, 2, 3, 5, D)
    for query, splits in ((q, 2), (q[:, :, :1], 0)):
        with pytest.raises(ValueError, match="one query a sequence and at least one split"):
            flash_decoding(query, k, v, splits)


@pytest.mark.parametrize("splits", [1, 3, 9])
@pytest.mark.parametrize("s", [45, 90])
def test_mechanism(splits, s):
    """n outputs and log-sum-exps whatever the length of the past, and not one product more."""
    h, k = 6, 2
    q, key, v, _ = (x.detach() for x in heads(B, h, k, 1, s, D))
    with FlopCounterMode(display=False) as count:
        flash_decoding(q, key, v, splits)
    assert count.get_total_flops() == 2 * 2 * B * h * s * D
    grouped = q.squeeze(2).unflatten(1, (k, -1))
    with LiveBytes() as live:
        for tensor in (grouped, key, v):
            live.track(tensor)
        before = live.live
        pairs = zip(key.tensor_split(splits, 2), v.tensor_split(splits, 2), strict=True)
        pieces = [attend_piece(grouped, *pair) for pair in pairs]
        assert live.live - before == splits * B * h * (D + 1) * 4
    assert len(pieces) == splits


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path):
    """A fully fine-tuned model as ``cria train`` leaves it."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("device", "implementation", "call"),
    [
        (Device("cpu", "some CPU", (0, 0), real_bf16=False, memory_bytes=2**34), "sdpa", {"heads": 4, "tokens": 1}),
        (Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=2**35), "sdpa", {"heads": 4, "tokens": 1}),
        (T4, "sdpa_expanded", {"heads": 2, "tokens": 2}),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else None,
)
def test_switch(device, implementation, call, folder, monkeypatch):
    """What one new token meets in ``cria chat``: torch's kernel, without a mask, and with shared heads.

    On a T4 the two queries that share a head are rows of it, because the fast kernel there takes no shared heads.
    """
    here = technique.for_chat
    monkeypatch.setattr(technique, "for_chat", lambda _: here(device))
    model, _ = opening.open_folder(folder)
    assert model.config._attn_implementation == implementation
    model = model.float()
    ids = torch.arange(3, 12)[None]
    with Attended() as seen:
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 2, "eos_token_id": None}
        kernel = attention_kernel(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    assert kernel == "flash"
    decoding = [one for one in seen.calls if one["tokens"] != 9]  # the prompt has nine tokens
    assert decoding == [{**call, "kv_heads": 2, "masked": False}] * 2 * 3
