"""int8, NF4, 8-bit AdamW and the loss scale on a CUDA card, against their references. ``pytest -m gpu``."""

import pytest
import torch
from torch import nn

from cria_tricks.hardware import this_device
from cria_tricks.techniques.adamw_8bit import AdamW8bit, dequantize_blocks, dynamic_levels, quantize_blocks
from cria_tricks.techniques.int8 import linear_8bit, quantize_rows
from cria_tricks.techniques.mixed_precision import LossScale
from cria_tricks.techniques.nf4 import dequantize, normal_levels, quantize
from tests.helpers import difference
from tests.tolerances import ADAMW_8BIT_DRIFT, INT8_PRODUCT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_cards_nf4_bytes_are_the_references(double, dtype):
    import bitsandbytes as bnb

    w = (normal(1024, 512) * 0.02).to(dtype)
    ours = quantize(w, normal_levels(), double)
    packed, state = bnb.functional.quantize_4bit(w.cuda(), quant_type="nf4", compress_statistics=double)
    same = (packed.cpu().flatten() == ours.packed).float().mean().item()
    scales = (state.absmax.cpu() == ours.absmax).float().mean().item()
    print(
        f"{this_device().name}, {dtype}, double {double}: {same:.6f} of the bytes and {scales:.6f} of the scales equal"
    )
    assert same > 0.9999, "a weight in the middle of two levels may go either way"
    assert scales > 0.999
    restored = bnb.functional.dequantize_4bit(packed, state).cpu().flatten().float()
    assert difference(restored, dequantize(ours, normal_levels())) < 1e-3


@pytest.mark.parametrize("signed", [True, False])
def test_the_cards_8_bit_codes_are_the_nearest(signed):
    """No table of 65,536 entries here, as there is on a CPU."""
    levels, x = dynamic_levels(signed), normal(256 * 100)
    x = x if signed else x**2
    codes, absmax = quantize_blocks(x, levels)
    theirs, their_absmax = torch.ops.bitsandbytes.quantize_blockwise(x.cuda(), levels.cuda(), 256)
    assert torch.equal(absmax, their_absmax.cpu())
    print(f"{this_device().name}: {(theirs.cpu() != codes).sum().item()} of {len(x)} codes differ")
    values, wanted = (dequantize_blocks(c.cpu().flatten(), absmax, levels) for c in (theirs, codes))
    scale = absmax.repeat_interleave(256)
    assert (((values - x).abs() - (wanted - x).abs()) / scale).max() < 1e-6


def test_the_cards_8_bit_adamw_follows_the_reference():
    import bitsandbytes as bnb

    settings = {"lr": 1e-2, "weight_decay": 0.1}
    ours, theirs = nn.Parameter(normal(128, 256)), nn.Parameter(normal(128, 256).cuda())
    a, b = AdamW8bit([ours], **settings), bnb.optim.AdamW8bit([theirs], **settings)
    for step in range(50):
        ours.grad = normal(128, 256, seed=step)
        theirs.grad = ours.grad.cuda()
        a.step()
        b.step()
    moved = (ours.detach() - normal(128, 256)).norm()
    apart = ((theirs.detach().cpu() - ours.detach()).norm() / moved).item()
    print(f"{this_device().name}: after 50 steps {apart:.4f} of the way apart")
    assert b.state[theirs]["state1"].dtype == torch.uint8
    assert apart < ADAMW_8BIT_DRIFT


@pytest.mark.parametrize("outliers", [False, True])
def test_the_cards_int8_product_is_the_references(outliers):
    import bitsandbytes as bnb

    x, w = normal(64, 256), normal(128, 256, seed=1) * 0.05
    if outliers:
        x[:, 7] *= 40
    x, w = x.half(), w.half()
    linear = bnb.nn.Linear8bitLt(256, 128, bias=False, has_fp16_weights=False, threshold=6.0)
    linear.weight = bnb.nn.Int8Params(w, requires_grad=False, has_fp16_weights=False)
    found = linear.cuda()(x.cuda()).cpu()
    expected = linear_8bit(x, *quantize_rows(w))
    print(f"{this_device().name}: largest difference {(found - expected).abs().max().item():.4f}")
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=4 * INT8_PRODUCT)


def test_the_cards_loss_scale_is_the_references():
    weights = [nn.Parameter(torch.ones(8, device="cuda")) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scale, scaler = LossScale(growth_interval=4), torch.amp.GradScaler("cuda", growth_interval=4)
    for step in range(16):
        scaler.scale(torch.zeros((), device="cuda"))
        assert scale.scale == scaler.get_scale()
        gradient = normal(8, seed=step).cuda()
        if step in (0, 1, 7):
            gradient[3] = torch.inf
        for weight in weights:
            weight.grad = gradient * scale.scale
        scale.step(optimizers[0], weights[:1])
        scaler.step(optimizers[1])
        scaler.update()
        assert torch.equal(*weights)
    assert scale.skipped == 3
