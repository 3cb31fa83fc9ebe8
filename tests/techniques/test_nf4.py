"""NF4: levels from quantiles, bytes of bitsandbytes, 4.5 and 4.127 bits, the smallest error of the four-bit kinds."""

import pytest
import torch

from cria_tricks.bill.operation import BLOCK
from cria_tricks.techniques.adamw_8bit import quantize_blocks
from cria_tricks.techniques.nf4 import dequantize, normal_levels, quantize
from tests.helpers import prepare
from tests.tolerances import NF4_LEVELS, NF4_SCALE_CODES

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
DOUBLE = pytest.mark.parametrize("double", [False, True], ids=["single", "double"])


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def test_levels_are_those_of_bitsandbytes():
    from bitsandbytes.functional import get_4bit_type

    levels = normal_levels()
    assert (levels - get_4bit_type("nf4", device="cpu")).abs().max() < NF4_LEVELS
    assert levels[7] == 0
    assert (levels[0], levels[-1]) == (-1, 1)


def test_equally_many_normal_numbers_lie_between_two_levels():
    """What they are for. Between the outermost two of each side and the middle the shares are a sixteenth, or so."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    levels = normal_levels() * torch.special.ndtri(torch.tensor(1 - (1 / 32 + 1 / 30) / 2))
    shares = torch.bincount(torch.bucketize(x, levels), minlength=17) / len(x)
    assert (shares[1:8] - shares[1:8].mean()).abs().max() < 1e-3, "the negative half"
    assert (shares[8:16] - shares[8:16].mean()).abs().max() < 1e-3, "the positive half"


@DTYPES
@DOUBLE
def test_math(dtype, double):
    """Packed bytes and scales are those of bitsandbytes; what is looked up again is, too."""
    import bitsandbytes as bnb

    w = weight(dtype)
    ours = quantize(w, normal_levels(), double)
    packed, state = bnb.functional.quantize_4bit(w, quant_type="nf4", compress_statistics=double)
    assert torch.equal(ours.packed, packed.flatten())
    restored = bnb.functional.dequantize_4bit(packed, state).flatten()
    if double:
        # The scales' bytes come from the table with 65,536 entries (see adamw_8bit): a few are neighbours.
        assert torch.equal(ours.absmax_of_absmax, state.state2.absmax)
        assert torch.equal(ours.mean, state.offset)
        assert (ours.absmax != state.absmax).float().mean() < NF4_SCALE_CODES
        ours.absmax = state.absmax
    assert torch.equal(ours.absmax, state.absmax)
    # The levels are 1.8e-7 apart, which may turn the last bit of a number in the weight's dtype.
    last_bit = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(dequantize(ours, normal_levels()).to(dtype), restored, rtol=last_bit, atol=0)


@DOUBLE
def test_mechanism(double):
    """4 + 32 / 64 bits a weight; with double quantization 4 + 8 / 64 + 32 / (64 x 256), and one mean a matrix."""
    w = weight()
    bits = quantize(w, normal_levels(), double).bytes * 8
    blocks = w.numel() // BLOCK
    assert bits == (4 * w.numel() + 8 * blocks + 32 * blocks // 256 + 32 if double else 4.5 * w.numel())
    assert round(bits / w.numel(), 3) == (4.127 if double else 4.5)


def test_mechanism_error():
    """Of four bits for normal weights NF4 has the smallest error; a double quantization adds next to nothing."""
    import bitsandbytes as bnb

    w = weight()

    def error(restored: torch.Tensor) -> float:
        return ((restored.view_as(w) - w).norm() / w.norm()).item()

    levels = torch.linspace(-7, 7, 15) / 7  # int4, symmetric
    errors = {"int4": error(dequantize(quantize(w, levels), levels))}
    errors["fp4"] = error(bnb.functional.dequantize_4bit(*bnb.functional.quantize_4bit(w, quant_type="fp4")))
    errors["nf4"] = error(dequantize(quantize(w, normal_levels()), normal_levels()))
    errors["nf4 double"] = error(dequantize(quantize(w, normal_levels(), True), normal_levels()))
    print(errors)
    assert errors["nf4"] < errors["int4"] < errors["fp4"]
    assert errors["nf4"] < errors["nf4 double"] < 1.01 * errors["nf4"]
    codes, _ = quantize_blocks(w, normal_levels(), BLOCK)
    shares = torch.bincount(codes.long(), minlength=16) / w.numel()
    # Not equally: of 64 normal numbers the largest is nearer to 2.4 standard deviations than to the levels' 1.85.
    assert shares[1:15].min() > 0.03, "but every level is used"


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@DOUBLE
def test_switch(kind, double, tiny_model):
    """Every linear but the head is four-bit, of that kind; its weight is packed bytes, in a block's layout."""
    import bitsandbytes as bnb

    sets = ["tricks.peft=lora", f"tricks.quantization={kind}", f"tricks.double_quantization={str(double).lower()}"]
    _, _, loaded = prepare(tiny_model, *sets)
    quantised = [m for m in loaded.model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) == 2 * 7
    for module in quantised:
        state = module.weight.quant_state
        assert module.weight.dtype == torch.uint8
        assert module.weight.numel() == module.in_features * module.out_features // 2
        assert (state.quant_type, state.nested, state.blocksize) == (kind, double, BLOCK)
    assert not isinstance(loaded.model.get_output_embeddings(), bnb.nn.Linear4bit)
