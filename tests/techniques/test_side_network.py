"""Side network: the base at first, bit for bit; a copy that learns beside frozen blocks; saved like an adapter."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cria_tricks.adapter import folder
from cria_tricks.adapter.opening import open_folder
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.techniques.side_network import SideBlock
from tests.helpers import difference, prepare, train, trained_weights

D = 16
SIDE = ["tricks.peft=side_network", "side.blocks=1", "train.learning_rate=1e-3"]


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


def test_math():
    """Eq. 2 without a second condition: y = F(x) + Z(F'(x)). At first that is F(x); then Z learns, and after it F'."""
    side, x = SideBlock(block(), D), torch.randn(3, 5, D)
    assert torch.equal(side(x), block()(x))
    optimizer = torch.optim.SGD([p for p in side.parameters() if p.requires_grad], lr=0.1)
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        side(x).square().sum().backward()
        gradients.append((side.join.weight.grad.norm().item(), side.copy[0].weight.grad.norm().item()))
        optimizer.step()
    assert gradients[0][0] > 0, "zeros learn: their gradient is made of what the copy gives"
    assert gradients[0][1] == 0, "but nothing passes through them yet"
    assert gradients[1][1] > 0
    assert all(p.grad is None for p in side.block.parameters())
    assert torch.equal(side.block[0].weight, block()[0].weight), "the frozen block is what it was"
    expected = side.block(x) + side.copy(x) @ side.join.weight.t()
    torch.testing.assert_close(side(x), expected, rtol=0, atol=1e-6)


def test_mechanism(tiny_model):
    """What trains: the copied block's weights and one D x D join; with random numbers in both, what runs is eq. 2."""
    _, _, loaded = prepare(tiny_model, *SIDE)
    attention, mlp, norms = 2 * 256 * 256 + 2 * 256 * 128, 3 * 256 * 512, 2 * 256
    assert sum(p.numel() for p in loaded.model.parameters() if p.requires_grad) == attention + mlp + norms + 256 * 256
    side = loaded.model.model.layers[1]
    assert isinstance(side, SideBlock)
    nn.init.normal_(side.join.weight, std=0.1)
    seen = {}
    for name in ("block", "copy"):
        getattr(side, name).register_forward_hook(lambda m, a, out, name=name: seen.update({name: out}))
    side.register_forward_hook(lambda m, a, out: seen.update(both=out))
    loaded.model(input_ids=torch.arange(3, 20)[None])
    assert torch.equal(seen["both"], seen["block"] + side.join(seen["copy"]))
    assert torch.equal(seen["block"], seen["copy"]), "a copy, as long as it has not learnt"


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
def test_switch(quantization, tiny_model, tokenizer, rows, tmp_path):
    """Identical to the base at step 0, learns, and comes back from its folder: only what trained is in it."""
    quantised = [f"tricks.quantization={quantization}"]
    ids = torch.arange(3, 40)[None]
    base = prepare(tiny_model, "tricks.peft=head", *quantised)[2].model.eval()(input_ids=ids).logits
    _, _, loaded = prepare(tiny_model, *SIDE, *quantised)
    side, seen = loaded.model.model.layers[1], {}
    for name in ("block", "copy"):
        getattr(side, name).register_forward_hook(lambda m, a, out, name=name: seen.update({name: out}))
    assert torch.equal(loaded.model.eval()(input_ids=ids).logits, base)
    # int8 rounds inputs too, which the unpacked copy does not.
    assert difference(seen["copy"], seen["block"]) < (1e-2 if quantization == "int8" else 1e-6)
    run, loaded = train(tiny_model, rows, tmp_path / "run", *SIDE, *quantised, "train.epochs=3")
    assert run.training[-1]["loss"] < run.training[0]["loss"]
    folder.save(tmp_path / "adapter", loaded.model, tokenizer, str(tiny_model), "", Recipe())
    saved = load_file(tmp_path / "adapter" / "side_network.safetensors")
    assert saved.keys() == trained_weights(loaded).keys()
    assert not list((tmp_path / "adapter").glob("model*.safetensors")), "no base weights"
    again, _ = open_folder(tmp_path / "adapter", dtype=torch.float32)  # a CPU with real bf16 would take that
    restored = {name: p for name, p in again.named_parameters() if name in saved}
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
    if quantization == "none":
        expected = loaded.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=0, atol=1e-5)  # sdpa against eager


def test_resumed_it_is_the_uninterrupted_run(tiny_model, rows, tmp_path):
    from tests.helpers import At, Killed, kill

    settings = [*SIDE, "train.max_steps=4", "train.save_steps=1"]
    _, whole = train(tiny_model, rows, tmp_path / "whole", *settings)
    with pytest.raises(Killed):
        train(tiny_model, rows, tmp_path / "cut", *settings, callbacks=[At(3, kill)])
    _, resumed = train(tiny_model, rows, tmp_path / "cut", *settings, resume=True)
    found = trained_weights(resumed)
    assert all(torch.equal(found[name], weight) for name, weight in trained_weights(whole).items())
    assert not list((tmp_path / "cut").rglob("model*.safetensors")), "checkpoints hold no base weights"


def test_more_blocks_than_there_are_are_refused(tiny_model):
    with pytest.raises(BadInput, match=r"side\.blocks=3: .* has 2"):
        prepare(tiny_model, "tricks.peft=side_network", "side.blocks=3")
