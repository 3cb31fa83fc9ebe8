"""Fused adapters and blocks on a CUDA card: the numbers of peft, fp32 gradients, fewer bytes. ``pytest -m gpu``."""

import gc

import pytest
import torch

from cria_tricks.hardware import this_device
from cria_tricks.techniques import fused_lora
from tests.helpers import difference, train
from tests.tolerances import COMPILED_MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LORA = ["tricks.peft=lora", "lora.r=8", "train.batch_size=2", "train.max_steps=6", "train.learning_rate=5e-3"]
FUSED = {"torch": ["tricks.fused_lora=true", "tricks.fused_blocks=true"], "triton": ["tricks.fused_blocks=triton"]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_adapters_are_the_fp32_sums_of_16_bit_products(dtype):
    """The one product that only a card has: torch.mm with out_dtype."""
    torch.manual_seed(0)
    left, right = (torch.randn(512, width, device="cuda").to(dtype) for width in (16, 2048))
    found = fused_lora._of_adapter(left, right, torch.float32)
    exact = left.double().mT @ right.double()
    assert found.dtype == torch.float32
    assert difference(found, exact) < 512 * 2**-24
    assert difference(found.to(dtype), exact) > 8 * difference(found, exact), "16 bits would have rounded it"


@pytest.mark.parametrize("kernels", FUSED)
@pytest.mark.parametrize("base", ["none", "nf4", "int8"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_follows_pefts(kernels, base, precision, tiny_model, rows, tmp_path):
    settings = [*LORA, f"tricks.quantization={base}", f"tricks.precision={precision}", "tricks.attention=sdpa"]
    losses, peaks = {}, {}
    for name, more in (("peft's", []), ("fused", FUSED[kernels])):
        gc.collect()  # the model of the run before
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run, _ = train(tiny_model, rows, tmp_path / name, *settings, *more)
        losses[name] = [entry["loss"] for entry in run.training]
        peaks[name] = torch.cuda.max_memory_allocated() - before
    print(f"{this_device().name}, {kernels}, {base}, {precision}: {losses}, peaks {peaks} bytes")
    near = COMPILED_MODEL if precision == "fp32" else 2e-2  # a loss near 6 in fp16, after steps that round otherwise
    if base == "int8":  # a difference of rounding moves an 8-bit code of the next product's input
        near = max(near, 1e-3)
    assert losses["fused"] == pytest.approx(losses["peft's"], abs=near)
    assert peaks["fused"] <= peaks["peft's"]
