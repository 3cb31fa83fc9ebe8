"""LLM.int8(): the integers of bitsandbytes, an error within the stated bound, and what the outlier path is for."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from cria_tricks.adapter.merge import CPU
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.int8 import linear_8bit, quantize_rows
from tests.helpers import prepare
from tests.tolerances import INT8_PRODUCT

T, D, N = 64, 256, 128


def inputs(outliers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs in fp16, whose features 7 and 100 are large when asked for, and a weight."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(T, D, generator=draw), torch.randn(N, D, generator=draw) * 0.05
    if outliers:
        x[:, 7] *= 40
        x[:, 100] *= 20
    return x.half(), w.half()


@pytest.mark.parametrize("outliers", [False, True])
def test_math(outliers):
    """The same integers, scales and outlier columns, and so the same product to a rounding of fp16."""
    import bitsandbytes as bnb

    x, w = inputs(outliers)
    codes, absmax = quantize_rows(w)
    their_codes, their_absmax, _ = bnb.functional.int8_vectorwise_quant(w)
    assert torch.equal(codes, their_codes)
    assert torch.equal(absmax, their_absmax)
    x_codes, x_absmax, columns = bnb.functional.int8_vectorwise_quant(x.clone(), threshold=6.0)
    assert columns.tolist() == ([7, 100] if outliers else [])
    theirs, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, x_codes, codes, x_absmax, absmax, columns, None)
    torch.testing.assert_close(linear_8bit(x, codes, absmax), theirs, rtol=0, atol=INT8_PRODUCT)
    inside = x.masked_fill(x.abs() >= 6, 0)
    ours, ours_absmax = quantize_rows(inside)
    ours[:, columns] = 0
    assert torch.equal(ours, x_codes)
    assert torch.equal(ours_absmax, x_absmax)


def test_a_token_of_nothing_but_outliers_is_multiplied_in_16_bits_alone():
    """Its row of integers is zeros, and divides by no zero."""
    x, w = inputs(False)
    x[3] = 7
    codes, absmax = quantize_rows(w)
    assert torch.equal(quantize_rows(torch.zeros(2, D))[0], torch.zeros(2, D, dtype=torch.int8))
    expected = x[3].float() @ (codes * (absmax / 127)[:, None]).t()
    torch.testing.assert_close(linear_8bit(x.float(), codes, absmax)[3], expected, rtol=1e-5, atol=1e-5)


def test_math_bound():
    """Each number moves by at most half a step of its row, and the product by no more than these moves add up to."""
    x, w = inputs(False)
    codes, absmax = quantize_rows(w)
    w_error = (codes * (absmax / 127)[:, None] - w.float()).abs()
    assert (w_error <= absmax[:, None] / 254 * 1.001).all()
    x_codes, x_absmax = quantize_rows(x)
    x_error = (x_codes * (x_absmax / 127)[:, None] - x.float()).abs()
    assert (x_error <= x_absmax[:, None] / 254 * 1.001).all()
    exact = x.float() @ w.float().t()
    bound = x_error @ w.float().abs().t() + (x.float().abs() + x_error) @ w_error.t()
    assert ((linear_8bit(x.float(), codes, absmax, 0) - exact).abs() <= bound + 1e-4).all()


@pytest.mark.parametrize(("large", "product"), [(6.0, 7.0), (-6.0, -5.0), (5.9375, 5.9375 + 21 * 5.9375 / 127)])
def test_an_input_of_just_the_threshold_is_multiplied_in_16_bits(large, product):
    """It leaves the 1 beside it its own scale; one below it makes the 1 to 21 of its steps."""
    codes, absmax = torch.tensor([[127, 127]], dtype=torch.int8), torch.ones(1)
    found = linear_8bit(torch.tensor([[large, 1.0]]), codes, absmax)
    assert found.item() == pytest.approx(product, rel=1e-6)
    assert linear_8bit(torch.tensor([[large, 1.0]]), codes, absmax, 0).item() == pytest.approx(
        large + 21 * abs(large) / 127, rel=1e-6
    )


def test_rows_of_integers_by_hand():
    codes, absmax = quantize_rows(torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [-4.0, 4.0, 0.01]]))
    assert codes.tolist() == [[64, -127, 32], [0, 0, 0], [-127, 127, 0]]
    assert absmax.tolist() == [2.0, 0.0, 4.0]


def test_mechanism():
    """One byte a weight and a fp32 scale a row. With outliers, the outlier path keeps the error of a row without."""
    x, w = inputs(False)
    codes, absmax = quantize_rows(w)
    assert codes.nbytes + absmax.nbytes == N * D + 4 * N

    def error(x: torch.Tensor, threshold: float) -> float:
        exact = x.float() @ w.float().t()
        return ((linear_8bit(x.float(), codes, absmax, threshold) - exact).norm() / exact.norm()).item()

    large, _ = inputs(True)
    errors = {"no outliers": error(x, 6), "with the path": error(large, 6), "without it": error(large, 0)}
    print(errors)
    assert errors["with the path"] < 1.5 * errors["no outliers"]
    assert errors["without it"] > 3 * errors["with the path"]


def test_a_reentrant_checkpoint_frees_the_inputs_that_bitsandbytes_keeps(tiny_model):
    """In 16 bits four inputs a block: of q, k and v, of o, of gate and up, and of down, which is as wide as the MLP."""
    config = BitsAndBytesConfig(load_in_8bit=True)
    ids = torch.arange(3, 35).reshape(2, 16)
    found = {}
    for reentrant in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=config, dtype="float16").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        alive = LiveBytes()
        alive.track_all(every_tensor(model))
        before = alive.live
        with alive:
            loss = model(ids, labels=ids, use_cache=False).loss
        found[reentrant] = alive.live - before, loss.item()
    blocks, width, inner = 2, 256, 512
    assert found[False][0] - found[True][0] == blocks * ids.numel() * 2 * (3 * width + inner)
    assert found[False][1] == found[True][1]


def test_switch(tiny_model):
    """Every linear but the head is an 8-bit one, with the paper's threshold; its weight is integers."""
    import bitsandbytes as bnb

    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "tricks.quantization=int8")
    quantised = [m for m in loaded.model.modules() if isinstance(m, bnb.nn.Linear8bitLt)]
    assert len(quantised) == 2 * 7
    assert all(m.weight.dtype == torch.int8 and m.state.threshold == 6.0 for m in quantised)
    assert not isinstance(loaded.model.get_output_embeddings(), bnb.nn.Linear8bitLt)


def test_dora_over_int8_is_refused_on_a_cpu_where_peft_loses_the_scales():
    recipe = with_settings(Recipe(), ["tricks.quantization=int8", "tricks.peft=lora", "lora.dora=true"])
    with pytest.raises(BadInput, match=r"lora.dora=true with tricks.quantization=int8: .* tricks.quantization=nf4"):
        resolve(recipe, CPU)
    assert resolve(recipe, T4).peft["use_dora"]
    assert resolve(with_settings(recipe, ["lora.dora=false"]), CPU).quantization == {"load_in_8bit": True}
