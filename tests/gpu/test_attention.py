"""Attention kernels on a CUDA card, natively and under a T4's rules: no flash, no cuDNN. ``pytest -m gpu``."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cria_tricks.data.batches import PadToLongest
from cria_tricks.doctor import machine
from cria_tricks.hardware import T4, this_device
from cria_tricks.measure.counting import attention_kernel
from cria_tricks.techniques.expand_kv import expand_kv
from cria_tricks.techniques.flash_attention import flash_attention
from cria_tricks.techniques.flash_decoding import flash_decoding, for_chat
from cria_tricks.techniques.packing import PackedRows
from tests.helpers import prepare
from tests.techniques.attention import heads, with_gradients
from tests.tolerances import FLASH_ATTENTION, FLASH_DECODING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

T4_RULES = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]
BACKENDS = [
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
EXPANDED = ["tricks.attention=sdpa", "tricks.expand_kv=true"]


def is_ampere() -> bool:
    return this_device().capability >= (8, 0)


def on_card(*tensors):
    return [x.detach().cuda().requires_grad_(x.requires_grad) for x in tensors]


def in_model(loaded, padded: bool, t4_rules: bool) -> str:
    """The kernel of one forward pass in fp16, 2 rows of 32 tokens."""
    ids, mask = (torch.arange(3, 67).view(2, 32).cuda(), torch.ones(2, 32, dtype=torch.long).cuda())
    mask[0, 20:] = not padded

    def forward():
        with torch.autocast("cuda", torch.float16):
            loaded.model(input_ids=ids, attention_mask=mask)

    if not t4_rules:
        return attention_kernel(forward)
    with sdpa_kernel(T4_RULES):
        return attention_kernel(forward)


def test_under_t4_rules_masked_rows_have_the_memory_efficient_kernel_either_way(tiny_model):
    for settings in (EXPANDED[:1], EXPANDED):
        _, _, loaded = prepare(tiny_model, *settings, "tricks.precision=fp16")
        assert in_model(loaded, padded=True, t4_rules=True) == "memory-efficient"


def test_under_t4_rules_expand_kv_takes_maskless_rows_from_math_to_memory_efficient(tiny_model):
    _, _, with_ = prepare(tiny_model, *EXPANDED, "tricks.precision=fp16")
    assert in_model(with_, padded=False, t4_rules=True) == "memory-efficient"
    _, _, without = prepare(tiny_model, *EXPANDED[:1], "tricks.precision=fp16")
    kernel = in_model(without, padded=False, t4_rules=True)
    if kernel == "memory-efficient":
        pytest.skip(f"the memory-efficient kernel of torch {torch.__version__} takes grouped heads by itself")
    assert kernel == "math"


@pytest.mark.parametrize("t4_rules", [False, True])
def test_packed_rows_need_no_mask_and_never_the_math_kernel(t4_rules, tiny_model, rows):
    """Attention goes document by document, and the heads are equal already."""
    _, _, loaded = prepare(tiny_model, "tricks.attention=sdpa", "tricks.packing=true", "tricks.precision=fp16")
    batch = {name: tensor.cuda() for name, tensor in PadToLongest(2)(PackedRows(rows[:3], 48)).items()}

    def forward():
        with torch.autocast("cuda", torch.float16):
            loaded.model(**batch).loss.backward()

    with sdpa_kernel(T4_RULES if t4_rules else BACKENDS):
        kernel = attention_kernel(forward)
    print(f"{this_device().name}, T4 rules {t4_rules}: {kernel}")
    assert kernel != "none"
    assert "math" not in kernel


@pytest.mark.parametrize("switch", ["true", "false"])
def test_natively_maskless_rows_have_the_best_kernel_of_the_card(switch, tiny_model):
    settings = [EXPANDED[0], f"tricks.expand_kv={switch}", "tricks.precision=fp16"]
    _, _, loaded = prepare(tiny_model, *settings)
    kernel = in_model(loaded, padded=False, t4_rules=False)
    print(f"{this_device().name}, torch {torch.__version__}, expand_kv={switch}: {kernel}")
    if is_ampere():
        assert kernel in ("flash", "cudnn")
    elif switch == "true":
        assert kernel == "memory-efficient"


def test_on_a_new_card_fp32_rows_need_expand_kv_as_well(tiny_model):
    """The flash and cuDNN kernels take 16 bits only, so ``expand_kv`` does not warn there."""
    _, _, loaded = prepare(tiny_model, *EXPANDED)
    ids = torch.arange(3, 67).view(2, 32).cuda()
    assert attention_kernel(lambda: loaded.model(input_ids=ids)) == "memory-efficient"


def test_the_scores_are_gone_from_the_cards_memory():
    """One maskless row of 4,096 tokens with half of Llama-3.2-1B's heads, forward and backward under T4 rules."""
    b, h, k, t, d = 1, 16, 4, 4096, 64
    peaks = {}
    for name in ("grouped", "expanded"):
        q, key, v, grad = on_card(*heads(b, h, k, t, t, d, torch.float16))

        def attend(q=q, key=key, v=v, name=name):
            if name == "grouped":
                return F.scaled_dot_product_attention(q, key, v, is_causal=True, enable_gqa=True)
            return F.scaled_dot_product_attention(q, expand_kv(key, h // k), expand_kv(v, h // k), is_causal=True)

        with sdpa_kernel(T4_RULES):
            kernel = attention_kernel(attend)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(attend(), (q, key, v), grad)
            peaks[name] = (kernel, torch.cuda.max_memory_allocated() - before)
    print(f"{this_device().name}, torch {torch.__version__}: {peaks}")
    assert peaks["expanded"][0] == "memory-efficient"
    scores = 4 * b * h * t * t  # in fp32, as the math kernel keeps them
    assert peaks["expanded"][1] < scores / 4
    if peaks["grouped"][0] == "math":
        assert peaks["grouped"][1] > scores


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_reference_is_the_production_kernel_within_rounding(backend):
    if backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) and not is_ampere():
        pytest.skip("needs compute capability 8.0")
    *inputs, grad = on_card(*heads(2, 8, 2, 256, 256, 64, torch.float16))
    ours = with_gradients(lambda q, k, v: flash_attention(q, k, v, tile=64), grad, *inputs)
    with sdpa_kernel(backend):
        torchs = with_gradients(
            lambda q, k, v: F.scaled_dot_product_attention(q, expand_kv(k, 4), expand_kv(v, 4), is_causal=True),
            grad,
            *inputs,
        )
    # Kernels hold gradients of single heads, and sum them over the group, in fp16; the values reach 16 here.
    for found, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=4 * FLASH_ATTENTION[torch.float16])


def test_the_flash_kernel_splits_one_querys_keys_by_itself():
    if not is_ampere():
        pytest.skip("the flash kernel needs compute capability 8.0")
    q, k, v, _ = (x.detach().cuda() for x in heads(1, 32, 8, 1, 16384, 64, torch.float16))
    q = q * 3  # few keys of the 16,384 have most of the weight, so the output is of order 1

    def attend():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = attend()  # once outside of the profile, to load the kernel
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            attend()
            torch.cuda.synchronize()
    kernels = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    if not kernels:
        pytest.skip("no CUDA kernel can be profiled here")
    assert any("splitkv" in name for name in kernels), kernels
    torch.testing.assert_close(flash_decoding(q, k, v, splits=16), out, rtol=0, atol=FLASH_DECODING[torch.float16])


def test_chat_decodes_on_a_fast_kernel(tiny_model):
    """One new token never goes through the math kernel, on this card and under a T4's rules."""
    from transformers import AutoModelForCausalLM

    import cria_tricks.load.attention  # noqa: F401 (names sdpa_expanded to transformers)

    ids = torch.arange(3, 19)[None].cuda()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    for device, backends in ((this_device(), BACKENDS), (T4, T4_RULES)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float16, **for_chat(device)).cuda().eval()

        def generate(model=model):
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

        with sdpa_kernel(backends):
            kernel = attention_kernel(generate)
        print(f"{device.name} rules on {this_device().name}: {kernel}")
        assert "math" not in kernel
        assert kernel != "none"


def test_doctor_names_the_kernels_of_this_card():
    found = machine.examine()["attention"]
    print(this_device().name, found)
    assert found["masked"] != "math"
    assert found["maskless, expand_kv"] != "math"
    if is_ampere():
        assert found["maskless"] in ("flash", "cudnn")
