"""Repeated key and value heads give the same attention, to kernels that take equal heads only."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cria_tricks.hardware import T4, Device
from cria_tricks.measure.counting import attention_kernel
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.expand_kv import expand_kv
from tests.helpers import prepare
from tests.techniques.attention import Attended, heads, naive_attention, saved_bytes, with_gradients
from tests.tolerances import EXPAND_KV

B, H, K, T, D = 2, 6, 2, 32, 16
G = H // K
A100 = Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=40 * 2**30)
CPU = Device("cpu", "some CPU", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)


def expanded(q, k, v):
    return F.scaled_dot_product_attention(q, expand_kv(k, G), expand_kv(v, G), is_causal=True)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=str)
@pytest.mark.parametrize("dtype", EXPAND_KV, ids=str)
def test_math(dtype, backend):
    *inputs, grad = heads(B, H, K, T, T, D, dtype)
    assert torch.equal(expand_kv(inputs[1], G), inputs[1].repeat_interleave(G, dim=1))
    assert expand_kv(inputs[1], 1) is inputs[1]
    plain = with_gradients(lambda q, k, v: naive_attention(q, k, v, True), grad, *inputs)
    with sdpa_kernel(backend):
        ours, shared = with_gradients(expanded, grad, *inputs), with_gradients(grouped, grad, *inputs)
    assert torch.equal(ours[0], shared[0])
    for found, by_formula, production in zip(ours, plain, shared, strict=True):
        torch.testing.assert_close(found, production, rtol=0, atol=EXPAND_KV[dtype])
        torch.testing.assert_close(found, by_formula, rtol=0, atol=EXPAND_KV[dtype])


@pytest.mark.parametrize("padded", [False, True])
def test_math_in_a_model(padded, tiny_model):
    """Logits and gradients of a loaded model, with the switch and without."""
    ids, mask = torch.arange(3, 51).view(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = not padded  # on the left, where only a mask keeps it from the tokens that follow
    results = []
    for switch in ("false", "true"):
        _, _, loaded = prepare(tiny_model, "tricks.attention=sdpa", f"tricks.expand_kv={switch}")
        logits = loaded.model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        logits.square().mean().backward()
        gradient = loaded.model.get_input_embeddings().weight.grad
        results.append((logits.detach(), gradient / gradient.abs().max()))
    for without, with_ in zip(*results, strict=True):
        torch.testing.assert_close(with_, without, rtol=0, atol=EXPAND_KV[torch.float32])


def test_mechanism():
    """The copies are kept, and nothing is multiplied that was not before."""
    q, k, v, grad = heads(B, H, K, T, T, D)
    more = 2 * B * (H - K) * T * D * 4
    assert saved_bytes(lambda: expanded(q, k, v)) - saved_bytes(lambda: grouped(q, k, v)) == more
    with LiveBytes() as count:
        count.track(k)
        expand_kv(k, 1)
        assert count.live == k.nbytes
        copy = expand_kv(k, G)
        assert count.live == (1 + G) * k.nbytes == k.nbytes + copy.nbytes

    flops = []
    for call in (grouped, expanded):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as count:
            torch.autograd.grad(call(q, k, v), (q, k, v), grad)
        flops.append(count.get_total_flops())
    assert flops[0] == flops[1] == 6 * 2 * B * H * T * T * D


@pytest.mark.parametrize("t", [64, 256])
def test_mechanism_on_a_t4(t):
    """What a T4's two kernels keep of a row without a mask: math the scores, memory-efficient one number a query."""
    q, k, v, _ = heads(B, H, K, t, t, D, torch.float16)
    q_k_v_out = 2 * B * t * D * (H + 3 * H)
    with sdpa_kernel(SDPBackend.MATH):
        math = saved_bytes(lambda: grouped(q, k, v))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # no data, so a CUDA kernel runs on any machine
        q, k, v = (fake.from_tensor(x) for x in (q, k, v))
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        efficient = saved_bytes(lambda: attend(q, expand_kv(k, G), expand_kv(v, G), None, True, 0.0, True))
    seeds = 2 * 8
    assert efficient == q_k_v_out + 4 * B * H * t + seeds
    # Math goes over to fp32 first: the probabilities, and copies of what came in, shared heads repeated.
    assert math == 4 * (B * H * t * t + 3 * B * H * t * D)


@pytest.mark.parametrize(
    ("switch", "padded", "kv_heads"), [("false", False, 2), ("true", False, 4), ("false", True, 4), ("true", True, 4)]
)
def test_switch(switch, padded, kv_heads, tiny_model):
    """The heads that reach torch's kernel: transformers repeats those of masked rows, the switch all."""
    _, plan, loaded = prepare(tiny_model, "tricks.attention=sdpa", f"tricks.expand_kv={switch}")
    name = "sdpa_expanded" if switch == "true" else "sdpa"
    assert plan.model["attn_implementation"] == loaded.model.config._attn_implementation == name
    ids, mask = torch.arange(3, 27).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = not padded
    with Attended() as seen:
        kernel = attention_kernel(lambda: loaded.model(input_ids=ids, attention_mask=mask))
    assert kernel == "flash"
    assert seen.calls == [{"heads": 4, "tokens": 12, "kv_heads": kv_heads, "masked": padded}] * 2


def test_switch_under_an_adapter(tiny_model):
    settings = ("attention=sdpa", "expand_kv=true", "peft=lora")
    _, _, loaded = prepare(tiny_model, *(f"tricks.{setting}" for setting in settings))
    with Attended() as seen:
        loaded.model(input_ids=torch.arange(3, 15)[None])
    assert {call["kv_heads"] for call in seen.calls} == {4}


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (T4, ["attention=sdpa", "precision=fp16"], ""),
        (T4, ["attention=sdpa"], ""),
        (A100, ["attention=sdpa"], ""),  # fp32, which its flash kernel does not take
        (A100, ["attention=sdpa", "precision=bf16"], "expand_kv gains nothing on NVIDIA A100"),
        (CPU, ["attention=sdpa"], "expand_kv gains nothing without CUDA"),
        (T4, [], "expand_kv has no effect: attention=eager"),
    ],
)
def test_where_it_gains_nothing_it_warns(device, settings, said):
    sets = [f"tricks.{setting}" for setting in ("expand_kv=true", *settings)]
    plan = resolve(with_settings(Recipe(), sets), device)
    assert plan.model["attn_implementation"] == ("sdpa_expanded" if "attention=sdpa" in settings else "eager")
    assert [sentence for sentence in plan.warnings if "expand_kv" in sentence] == list(plan.warnings)
    assert len(plan.warnings) == bool(said)
    assert said in "".join(plan.warnings)
