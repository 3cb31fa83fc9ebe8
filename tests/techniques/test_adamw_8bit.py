"""8-bit AdamW: bitsandbytes' levels and states, a bounded drift from 32 bits, two bytes a weight and a little."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

from cria_tricks.switches.adamw_8bit import BLOCK
from cria_tricks.techniques.adamw_8bit import AdamW8bit, dequantize_blocks, dynamic_levels, quantize_blocks
from tests.helpers import SMALL_LORA, difference, train
from tests.tolerances import ADAMW_8BIT_DRIFT, ADAMW_8BIT_TABLE

SIGNED = pytest.mark.parametrize("signed", [True, False])
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def no_overrides_of_another_test(monkeypatch):
    """bitsandbytes remembers for the whole process, by place, which tensors a trainer wanted in 32 bits."""
    monkeypatch.setattr("bitsandbytes.optim.GlobalOptimManager._instance", None)


@SIGNED
def test_levels_are_those_of_bitsandbytes(signed):
    from bitsandbytes.functional import create_dynamic_map

    assert torch.equal(dynamic_levels(signed), create_dynamic_map(signed=signed))


@SIGNED
def test_math(signed):
    """Each number moves to the nearest level of its block; bitsandbytes' CPU code gives the same bytes, as it should.

    It first moves a number to the nearest of 65,536 even places between -1 and 1, which are the entries of a table.
    """
    import bitsandbytes as bnb

    draw, levels = torch.Generator().manual_seed(0), dynamic_levels(signed)
    x = torch.randn(100 * BLOCK + 60, generator=draw)
    x = x if signed else x**2
    codes, absmax = quantize_blocks(x, levels)
    scale = absmax.repeat_interleave(BLOCK)[: len(x)]
    error = (dequantize_blocks(codes, absmax, levels) - x).abs()
    nearest = ((x / scale)[:, None] - levels).abs().amin(dim=1) * scale
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-6)
    theirs, their_absmax = torch.ops.bitsandbytes.quantize_blockwise(x, levels, BLOCK)
    assert torch.equal(absmax, their_absmax)
    places = ((x * (1 / scale) + 1) * 0.5 * 65535 + 0.5).int()
    in_the_table = -1 + 2 * places / 65535
    pieces = [torch.cat([torch.ones(1), piece]) for piece in in_the_table.split(BLOCK)]  # each block's largest is 1
    of_the_table = torch.cat([quantize_blocks(piece, levels, BLOCK + 1)[0][1:] for piece in pieces])
    assert torch.equal(of_the_table, theirs)
    their_error = (bnb.functional.dequantize_blockwise(theirs, absmax=absmax, code=levels, blocksize=BLOCK) - x).abs()
    assert ((their_error - error) / scale).max() <= ADAMW_8BIT_TABLE
    assert (codes == theirs).float().mean() > 0.96


def by_the_cuda_kernel(moment: torch.Tensor, levels: torch.Tensor) -> list[int]:
    """A first moment's codes by the rule of bitsandbytes' ``csrc/kernels.cu``, in words of our own.

    Take the level that is nearest to the number over its block's largest. If their sign bits differ, take the level
    above for a number above zero, else the level below.
    """
    codes = []
    for block in moment.double().flatten().split(BLOCK):
        for number in block.tolist():
            nearest = int((levels.double() - number / block.abs().max()).abs().argmin())
            if math.copysign(1, levels[nearest]) != math.copysign(1, number):
                nearest += 1 if number > 0 else -1
            codes.append(nearest)
    return codes


def test_a_negative_first_moment_that_becomes_zero_keeps_its_sign_as_on_a_card():
    """Moments over nine powers of ten, after one step and after two: a fifth of each block is nearest to zero."""
    import bitsandbytes as bnb

    draw = torch.Generator().manual_seed(0)
    weight = torch.zeros(3 * BLOCK + 60, requires_grad=True)
    optimizer, levels = AdamW8bit([weight]), dynamic_levels(signed=True)
    sizes = torch.logspace(-9, 0, weight.numel())[torch.randperm(weight.numel(), generator=draw)]
    moment = torch.zeros(weight.numel())
    for _ in range(2):
        weight.grad = sizes * torch.randn(weight.shape, generator=draw).sign()
        weight.grad[::100] = 0
        moment = 0.9 * moment + (1 - 0.9) * weight.grad
        optimizer.step()
        codes, absmax = optimizer.states[0][0]
        assert codes.tolist() == by_the_cuda_kernel(moment, levels)
        nearest = quantize_blocks(moment, levels)[0]
        assert levels[nearest.long()][codes != nearest].eq(0).all()
        assert levels[codes.long()][codes != nearest].eq(levels[levels < 0].max()).all()
        assert 0.05 < (codes != nearest).float().mean() < 0.2
        moment = dequantize_blocks(codes, absmax, levels)
    # A CPU has no such rule: its table has no place for zero, so even zero becomes a number beside it.
    theirs, scale = torch.ops.bitsandbytes.quantize_blockwise(torch.tensor([1.0, 0.0, -1e-7]), levels, BLOCK)
    _, zero, below = bnb.functional.dequantize_blockwise(theirs, absmax=scale, code=levels, blocksize=BLOCK).tolist()
    assert zero == -below > 1e-5


def test_a_gradient_that_is_not_finite_spreads_over_its_block_on_a_cpu():
    """What the lesson says of bitsandbytes' two ways: by its source, the CUDA kernel leaves that one weight out."""
    import bitsandbytes as bnb

    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = bnb.optim.AdamW8bit([weight])
    for spoilt in (1, BLOCK):
        weight.grad = torch.ones(64, 64)
        weight.grad[0, 0] = torch.inf if spoilt == 1 else 1
        optimizer.step()
        assert weight.isnan().sum() == spoilt


def test_a_block_of_zeros_stays_zero():
    for signed in (True, False):
        codes, absmax = quantize_blocks(torch.zeros(BLOCK + 1), dynamic_levels(signed))
        assert torch.equal(dequantize_blocks(codes, absmax, dynamic_levels(signed)), torch.zeros(BLOCK + 1))
        assert not dynamic_levels(signed)[codes.long()].any(), "coded as zeros, not as anything times a scale of zero"


def regression(steps: int, make, spread: float = 2) -> tuple[torch.Tensor, list[float]]:
    """A matrix of 128 x 64 learns another; the gradients of a row's weights differ by so many powers of ten."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.zeros(128, 64, requires_grad=True)
    wanted = torch.randn(128, 64, generator=draw)
    sizes = torch.logspace(1 - spread, 1, 64)
    optimizer, losses = make([weight]), []
    for _ in range(steps):
        x = torch.randn(32, 64, generator=draw) * sizes
        loss = F.mse_loss(x @ weight.t(), x @ wanted.t())
        weight.grad = None
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return weight.detach(), losses


def test_math_drift():
    """Over 200 steps the weights stay within the stated distance of 32-bit AdamW's, and it learns as much."""
    import bitsandbytes as bnb

    exact, exact_losses = regression(200, lambda w: torch.optim.AdamW(w, **SETTINGS, foreach=False))
    for make in (lambda w: AdamW8bit(w, **SETTINGS), lambda w: bnb.optim.AdamW8bit(w, **SETTINGS)):
        found, losses = regression(200, make)
        drift = difference(found, exact)
        print(f"drift {drift:.4f}, loss {losses[0]:.2f} -> {losses[-1]:.4f}, in 32 bits {exact_losses[-1]:.4f}")
        assert 1e-4 < drift < ADAMW_8BIT_DRIFT
        assert losses[-1] < 1.1 * exact_losses[-1]


def test_a_second_moment_that_becomes_zero_lets_its_weight_run_away():
    """The card's Breaks line: gradients of one block that differ by 1,000, so second moments that differ by 10^6."""
    import bitsandbytes as bnb

    makes = {
        "32 bits": lambda w: torch.optim.AdamW(w, **SETTINGS, foreach=False),
        "nearest level": lambda w: AdamW8bit(w, **SETTINGS),
        "bitsandbytes": lambda w: bnb.optim.AdamW8bit(w, **SETTINGS),
    }
    largest = {name: regression(200, make, spread=3)[0].abs().max().item() for name, make in makes.items()}
    print(largest)
    assert largest["nearest level"] > 5 * largest["32 bits"]
    assert largest["bitsandbytes"] < 1.5 * largest["32 bits"], "its CPU table rounds the smallest ones up"


def test_math_states_of_bitsandbytes():
    """The states after one step, of a tensor that is large enough to be quantised; afterwards roundings part."""
    import bitsandbytes as bnb

    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    ours.grad = torch.randn(64, 64, generator=draw)
    theirs.grad = ours.grad.clone()
    a, b = AdamW8bit([ours], **SETTINGS), bnb.optim.AdamW8bit([theirs], **SETTINGS)
    a.step()
    b.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for i, (codes, absmax) in enumerate(a.states[0], start=1):
        assert torch.equal(absmax, b.state[theirs][f"absmax{i}"])
        values, their_values = (
            dequantize_blocks(c.flatten(), absmax, a.levels[i - 1]) for c in (codes, b.state[theirs][f"state{i}"])
        )
        scale = absmax.repeat_interleave(BLOCK)
        wanted = ours.grad.flatten() * 0.1 if i == 1 else ours.grad.flatten() ** 2 * 0.01
        further = (their_values - wanted).abs() - (values - wanted).abs()
        assert (further / scale).max() <= ADAMW_8BIT_TABLE


def test_mechanism():
    """Two bytes a weight, and a fp32 scale a block for each moment: 2 + 8 / 256."""
    weight = torch.zeros(1000, 256, requires_grad=True)
    optimizer = AdamW8bit([weight])
    assert sum(tensor.nbytes for moment in optimizer.states[0] for tensor in moment) == weight.numel() * (2 + 8 / 256)
    plain = torch.optim.AdamW([weight], foreach=False)
    weight.grad = torch.ones_like(weight)
    plain.step()
    assert sum(t.nbytes for t in plain.state[weight].values() if t.dim()) == weight.numel() * 8


def test_switch(tiny_model, rows, tmp_path):
    """In the trainer: states of matrices of 4,096 elements or more are bytes, smaller ones stay in fp32."""

    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, optimizer=None, **kwargs):
            self.states = {p.numel(): s["state1"] for p, s in optimizer.state.items()}

    settings = ["tricks.peft=lora", *SMALL_LORA, "train.max_steps=2"]
    watch = Watch()
    train(tiny_model, rows, tmp_path, *settings, "tricks.optimizer=adamw_8bit", callbacks=[watch])
    assert {size: state.dtype for size, state in watch.states.items()} == {
        4096: torch.uint8,  # r x 256
        8192: torch.uint8,  # r x 512
        2048: torch.float32,  # r x 128, of the keys' and values' two heads
    }
