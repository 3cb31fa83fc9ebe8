"""Mixed precision: autocast's roundings, torch's loss scale step by step, and what fp16 loses without them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.mixed_precision import LossScale, half_linear
from tests.helpers import prepare, train

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SIGNIFICANT_BITS = {torch.float16: 11, torch.bfloat16: 8}


@DTYPES
def test_math(dtype):
    """The product and both gradients are autocast's, bit for bit; the weight's gradient is in fp32."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    found = []
    for way in ("ours", "autocast"):
        if way == "ours":
            y = half_linear(x, weight, dtype)
        else:
            with torch.autocast("cpu", dtype):
                y = F.linear(x, weight)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), (x, weight))])
    assert all(map(torch.equal, *found))
    assert [tensor.dtype for tensor in found[0]] == [dtype, torch.float32, torch.float32]


@DTYPES
def test_math_bound(dtype):
    """A number moves by at most half a unit of its last significant bit: 2^-11 of itself in fp16, 2^-8 in bf16."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x = x[x.abs() > 1e-3]  # above fp16's subnormal numbers
    moved = ((x.to(dtype).float() - x) / x).abs().max()
    bound = 2.0 ** -SIGNIFICANT_BITS[dtype]
    assert bound / 2 < moved <= bound


class Overflowing:
    """A weight whose gradients overflow in some steps, for a scaler to find out."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(8))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.draw = torch.Generator().manual_seed(0)

    def gradient(self, step: int, scale: float) -> None:
        size = 1e30 if step in (0, 1, 7) else 1.0
        self.weight.grad = torch.randn(8, generator=self.draw) * size * scale  # 1e30 x 65536 is no fp32 number ...
        if size > 1:
            self.weight.grad[3] = torch.inf if step else torch.nan  # ... and where it would be, this makes sure


def test_math_loss_scale():
    """Scale, skipped steps and weights are those of torch's GradScaler, step for step."""
    ours, theirs = Overflowing(), Overflowing()
    scale = LossScale(growth_interval=4)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    for step in range(16):
        scaler.scale(torch.zeros(()))  # it makes its scale at the first use
        assert scale.scale == scaler.get_scale()
        ours.gradient(step, scale.scale)
        theirs.gradient(step, scaler.get_scale())
        taken = scale.step(ours.optimizer, [ours.weight])
        scaler.step(theirs.optimizer)
        scaler.update()
        assert taken == (step not in (0, 1, 7))
        assert torch.equal(ours.weight, theirs.weight)
    assert scale.skipped == 3
    assert scale.scale == 65536 / 2**3 * 2**3, "halved three times, doubled after steps 5, 11 and 15"


def test_one_gradient_that_overflowed_is_enough_to_skip_the_step():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for weight, gradient in zip(weights, (1.0, torch.inf), strict=True):
        weight.grad = torch.full((2,), gradient)
    assert not LossScale().step(torch.optim.SGD(weights, lr=0.1), weights)
    assert all(weight.eq(1).all() for weight in weights)


def test_a_small_gradient_is_lost_in_fp16_and_healed_by_the_scale():
    """1e-8 is below fp16's smallest number, 6e-8; multiplied by 65,536 on the way it comes back to 11 bits."""
    weight = torch.ones(3, requires_grad=True)
    found = {}
    for scale in (1.0, 65536.0):
        loss = (weight.half() * torch.tensor(1e-3, dtype=torch.float16)).sum().float() * 1e-5
        (gradient,) = torch.autograd.grad(loss * scale, weight)
        found[scale] = gradient / scale
    assert torch.equal(found[1.0], torch.zeros(3))
    torch.testing.assert_close(found[65536.0], torch.full((3,), 1e-8), rtol=2e-3, atol=0)


def test_a_small_update_is_lost_without_a_master_weight():
    """1 + 0.0004 is 1 in fp16, whose next number is 1.001: a hundred such updates come to nothing."""
    half, master = torch.ones(1).half(), torch.ones(1)
    for _ in range(100):
        half += torch.tensor(4e-4).half()
        master += 4e-4
    assert half == 1
    assert master.half() == pytest.approx(1.04, abs=1e-3)


def test_fp16_weights_cannot_be_unscaled():
    """torch's error reproduced, and ours; the cure is weights in fp32, which every adapter here has."""
    weight = nn.Parameter(torch.ones(3).half())
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="keep what trains in fp32"):
        LossScale().step(optimizer, [weight])


@DTYPES
def test_mechanism(dtype):
    """What a product keeps for the backward pass: 2 bytes an element of input and weight instead of 4."""
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    with SavedBytes() as saved:
        half_linear(x, weight, dtype).sum()
        kept = saved.peak
    with SavedBytes() as saved:
        F.linear(x, weight).sum()
        assert kept == saved.peak / 2 == 2 * (x.numel() + weight.numel())


def test_a_t4_emulates_bf16_so_it_is_refused_there_and_fp16_named():
    with pytest.raises(BadInput, match=r"no bf16 units and only emulates it; use tricks\.precision=fp16"):
        resolve(with_settings(Recipe(), ["tricks.precision=bf16"]), T4)
    assert resolve(with_settings(Recipe(), ["tricks.precision=fp16"]), T4).training["fp16"]


@pytest.mark.parametrize("peft", ["lora", "head", "prompt_tuning", "side_network"])
def test_what_trains_is_in_fp32_over_a_model_in_16_bits(peft, tiny_model):
    _, _, loaded = prepare(tiny_model, "tricks.precision=fp16", f"tricks.peft={peft}")
    dtypes = {True: set(), False: set()}
    for parameter in loaded.model.parameters():
        dtypes[parameter.requires_grad].add(parameter.dtype)
    assert dtypes == {True: {torch.float32}, False: {torch.float16}}


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_switch(precision, dtype, tiny_model, rows, tmp_path, monkeypatch):
    """In the trainer: products run in 16 bits, what trains is in fp32, and steps that overflow are counted."""
    seen: set[torch.dtype] = set()
    plain = F.linear

    def watch(x, *rest):
        y = plain(x, *rest)
        seen.add(y.dtype)
        return y

    monkeypatch.setattr(F, "linear", watch)
    settings = [f"tricks.precision={precision}", "tricks.peft=lora", "lora.r=4", "train.max_steps=6"]
    run, loaded = train(tiny_model, rows, tmp_path, *settings)
    assert seen == {dtype}
    assert {p.dtype for p in loaded.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in loaded.model.parameters() if not p.requires_grad} == {dtype}
    assert run.skipped_steps == sum(entry["skipped"] for entry in run.training)
    assert run.steps == 6
    if precision == "bf16":
        assert run.skipped_steps == 0


def one_step(model, ids) -> tuple[int, list[torch.Tensor]]:
    """The bytes that are alive at the end of the forward pass, and the loss with all gradients."""
    with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
        alive = live.live
    loss.backward()
    return alive, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("peft", ["none", "side_network"])
def test_switch_no_copy_of_a_matrix_outlives_its_block(peft, tiny_model, rows):
    """Without autocast's cache a checkpointed step gives the same bits, and holds no copy of a trained matrix."""
    ids = torch.tensor([rows[0]["input_ids"]])
    found = {}
    for cached in (False, True):
        _, plan, loaded = prepare(
            tiny_model, "tricks.precision=bf16", "tricks.gradient_checkpointing=true", f"tricks.peft={peft}"
        )
        assert plan.after_load[0] == "techniques.mixed_precision.cast_without_cache"
        if cached:
            loaded.model.base_model._forward_pre_hooks.clear()
            loaded.model.base_model._forward_hooks.clear()
        found[cached] = one_step(loaded.model.train(), ids)
    blocks = [block for block in blocks_of(loaded.model) if next(block.parameters()).requires_grad]
    matrices = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() == 2)
    assert found[True][0] - found[False][0] == 2 * matrices
    assert all(map(torch.equal, found[True][1], found[False][1]))
    assert len(found[True][1]) > 2


def test_autocast_caches_again_where_a_model_answers(tiny_model):
    """There each new token uses all weights once more. After the model, or an error in it, all is as before."""
    _, _, loaded = prepare(tiny_model, "tricks.precision=bf16")
    seen = []
    loaded.model.lm_head.register_forward_pre_hook(lambda *_: seen.append(("head", torch.is_autocast_cache_enabled())))
    loaded.model.model.norm.register_forward_pre_hook(
        lambda *_: seen.append(("norm", torch.is_autocast_cache_enabled()))
    )
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loaded.model(ids)
        loaded.model(ids, past_key_values=DynamicCache(), use_cache=True)
        with pytest.raises(IndexError):
            loaded.model(torch.tensor([[10**6]]))
        assert torch.is_autocast_cache_enabled()
    assert seen == [("norm", False), ("head", True), ("norm", True), ("head", True)]


@pytest.mark.parametrize("peft", ["lora", "head", "prompt_tuning"])
def test_adapters_are_cast_as_autocast_does_it(peft):
    plan = resolve(with_settings(Recipe(), ["tricks.precision=fp16", f"tricks.peft={peft}"]), T4)
    assert "techniques.mixed_precision.cast_without_cache" not in plan.after_load
