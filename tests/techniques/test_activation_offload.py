"""Activation offload: the same bits, and as many bytes on their way as the card says; weights stay where they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks.hardware import T4
from cria_tricks.load import overlapped_offload
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.activation_offload import Offloaded
from cria_tricks.techniques.gradient_checkpointing import checkpointed
from tests.helpers import prepare, train, trained_weights
from tests.techniques.test_gradient_checkpointing import KINDS, L, kept, stack

CHECKPOINTING = pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])


def forward(blocks: nn.ModuleList, x: torch.Tensor, checkpointing: bool) -> torch.Tensor:
    for block in blocks:
        x = checkpointed(block, x) if checkpointing else block(x)
    return x


@KINDS
@CHECKPOINTING
def test_math(kind, checkpointing):
    """Dropout is on; loss and gradients equal the plain ones and torch's save_on_cpu, bit for bit."""
    found = []
    for context in (None, Offloaded(), torch.autograd.graph.save_on_cpu()):
        blocks, x = stack(kind)
        if context is None:
            loss = forward(blocks, x, False).sum()
        else:
            with context:
                loss = forward(blocks, x, checkpointing).sum()
        loss.backward()
        found.append([loss.detach(), x.grad, *(p.grad for p in blocks.parameters() if p.requires_grad)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_the_layout_comes_back_too():
    """A transposed tensor stays one: in another layout its product might take another kernel, and round otherwise."""
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    with Offloaded():
        product = x.t() * y.expand(4, 3)
    assert product.grad_fn._saved_self.stride() == (1, 4)
    assert torch.equal(product.grad_fn._saved_self, x.t())
    assert torch.equal(product.grad_fn._saved_other, y.expand(4, 3))


def test_an_expanded_tensor_travels_once():
    """A mask that is the same for all heads; rows that were padded for their kernel stay where they were."""
    scores, mask = torch.randn(2, 8, 5, 5, requires_grad=True), torch.randn(2, 1, 5, 16)[..., :5]
    expanded = mask.expand(2, 8, 5, 5)
    with (there := Offloaded([scores])):
        product = scores * expanded
    own = expanded.storage_offset() + 2 * 5 * 16 - 11  # up to its last number, in fp32
    assert there.bytes_to_host == 4 * own
    back = product.grad_fn._saved_other
    assert there.bytes_to_device == back.untyped_storage().nbytes() == 4 * own
    assert back.stride() == expanded.stride()
    assert torch.equal(back, expanded)


def test_what_takes_a_freed_weights_address_travels():
    """Bitsandbytes casts a bias in its first forward pass; the old one's address is soon an activation's."""
    weights = [torch.randn(64) for _ in range(32)]
    with (there := Offloaded(weights)):
        for weight in weights:
            weight.data = weight.data.double()
        kept = [torch.randn(64, requires_grad=True).sin() for _ in range(64)]
    assert there.bytes_to_host == sum(x.nbytes for x in kept)


@KINDS
@CHECKPOINTING
def test_mechanism(kind, checkpointing):
    """Of L blocks, L (s + a) bytes travel each way, with checkpointing L s; nothing of them stays."""
    s, a = kept(kind)
    blocks, x = stack(kind)
    there = Offloaded(blocks.parameters())
    alive = LiveBytes()
    for tensor in (x, *blocks.parameters()):
        alive.track(tensor)
    before = alive.live
    with alive:
        with there:
            y = forward(blocks, x, checkpointing)
        assert there.bytes_to_host == L * (s if checkpointing else s + a)
        assert there.bytes_to_device == 0
        assert alive.live - before - there.bytes_to_host == y.nbytes, "the output is all that is left on the device"
        y.sum().backward()
    assert there.bytes_to_device == there.bytes_to_host, "each byte came back once"


def test_mechanism_open_block():
    """What a block keeps while it is recomputed does not travel: the backward pass is not inside the context."""
    blocks, x = stack("lora")
    with (there := Offloaded(blocks.parameters())):
        y = forward(blocks, x, True)
    out = there.bytes_to_host
    y.sum().backward()
    assert there.bytes_to_host == out


def test_weights_stay():
    """A frozen weight is kept by its product, and is on the device anyway; torch's version copies it along."""
    weight, x = torch.randn(64, 32), torch.randn(2, 32, requires_grad=True)
    for there, copied in ((Offloaded([weight]), 0), (Offloaded(), weight.nbytes)):
        with there:
            y = F.linear(x, weight)  # of a transposed view, which has the weight's storage
        assert there.bytes_to_host == copied
        y.sum().backward()
        assert there.bytes_to_device == copied


def test_a_tensor_that_three_products_read_travels_three_times():
    """The card's reason for checkpointing: each reader keeps a copy of its own, where plainly one tensor serves all."""
    x, weights = torch.randn(8, 32), [torch.randn(16, 32, requires_grad=True) for _ in range(3)]
    with (there := Offloaded(weights)):
        products = [F.linear(x, weight) for weight in weights]
    assert there.bytes_to_host == len(products) * x.nbytes


def test_switch(tiny_model, rows, tmp_path):
    """In the trainer: what the forward passes keep travels; the losses and weights are the plain ones bit for bit."""
    settings = ["tricks.peft=lora", "lora.r=4", "lora.dropout=0.1", "train.batch_size=2", "train.max_steps=4"]
    found = {}
    for name in ("", "tricks.gradient_checkpointing=true", "tricks.activation_offload=true", "both"):
        both = ["tricks.gradient_checkpointing=true", "tricks.activation_offload=true"]
        extra = both if name == "both" else [name] if name else []
        run, loaded = train(tiny_model, rows, tmp_path / f"run{name}", *settings, *extra)
        found[name] = ([entry["loss"] for entry in run.training], trained_weights(loaded))
    for losses, weights in found.values():
        assert losses == found[""][0]
        assert all(torch.equal(weights[key], value) for key, value in found[""][1].items())


def test_switch_in_a_step(tiny_model, monkeypatch, tmp_path, rows):
    """The context lies around every forward pass of the training, and around none of the evaluation."""
    made: list[Offloaded] = []

    def make(model, plan):
        made.append(Offloaded(model.parameters()))
        return made[-1]

    monkeypatch.setattr(overlapped_offload, "offloaded", make)
    settings = ["tricks.peft=lora", "lora.r=4", "train.max_steps=3", "tricks.activation_offload=true"]
    for extra in ("tricks.gradient_checkpointing=false", "tricks.gradient_checkpointing=true"):
        train(tiny_model, rows[:1], tmp_path / extra, *settings, extra, eval_rows=rows[:1])
    assert len(made) == 2 * 3
    plain, checkpointing = made[0], made[-1]
    s = 4 * 24 * 256  # 24 tokens, width 256
    assert 2 * s < checkpointing.bytes_to_host < plain.bytes_to_host / 3, "two blocks' inputs, and what the loss keeps"
    assert all(there.bytes_to_device == there.bytes_to_host for there in made)


def test_a_plan_for_a_t4_has_the_context_and_one_for_a_cpu_says_what_it_is_worth(tiny_model):
    recipe = with_settings(Recipe(), ["tricks.activation_offload=true"])
    assert resolve(recipe, T4).step_context == ("load.overlapped_offload.offloaded",)
    assert not resolve(recipe, T4).warnings
    _, plan, _ = prepare(tiny_model, "tricks.activation_offload=true")
    assert plan.step_context == ("load.overlapped_offload.offloaded",)
    assert "gains nothing without CUDA" in " ".join(plan.warnings)
