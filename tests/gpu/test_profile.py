"""``hardware.profile("t4")`` on a real card: kernels, bf16 and memory are a T4's inside. ``pytest -m gpu``."""

import pytest
import torch
import torch.nn.functional as F

from cria_tricks import hardware
from cria_tricks.common.errors import BadInput
from cria_tricks.doctor import machine
from cria_tricks.hardware import T4, this_device
from cria_tricks.measure.counting import attention_kernel
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.expand_kv import expand_kv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def kernels() -> tuple[str, str]:
    """Of grouped heads without a mask, and of the same with their keys repeated; Llama-3.2-1B's heads in fp16."""
    q = torch.zeros(1, 32, 128, 64, dtype=torch.float16, device="cuda", requires_grad=True)
    kv = torch.zeros(1, 8, 128, 64, dtype=torch.float16, device="cuda", requires_grad=True)
    wide = expand_kv(kv, 4)
    return (
        attention_kernel(lambda: F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)),
        attention_kernel(lambda: F.scaled_dot_product_attention(q, wide, wide, is_causal=True)),
    )


def test_grouped_heads_end_in_the_math_kernel_as_on_a_t4():
    before = kernels()
    with hardware.profile("t4"):
        grouped, expanded = kernels()
    print(f"{this_device().name}, torch {torch.__version__}: {before} -> {(grouped, expanded)}")
    assert expanded == "memory-efficient"
    assert grouped in ("math", "memory-efficient"), "the latter where torch has pull request 191085"
    assert kernels() == before


def test_bf16_is_refused_and_doctor_says_so():
    with hardware.profile("t4"):
        found = machine.examine()
        assert (found["device"]["capability"], found["bf16"]["runs"]) == ((7, 5), "emulated")
        assert found["device"]["free_bytes"] <= T4.memory_bytes
        with pytest.raises(BadInput, match="has no bf16 units"):
            resolve(with_settings(Recipe(), ["tricks.precision=bf16"]))


def test_no_more_memory_than_a_t4_has():
    if torch.cuda.get_device_properties(0).total_memory < 20 * 2**30:
        pytest.skip("the card is hardly larger than a T4")
    torch.cuda.empty_cache()
    with hardware.profile("t4"):
        held = torch.empty(13 * 2**30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
        del held
        torch.cuda.empty_cache()
    afterwards = torch.empty(16 * 2**30, dtype=torch.uint8, device="cuda")
    assert afterwards.nbytes > T4.memory_bytes, "the whole card is there again"
