"""LoRA: the base at first, one merged matrix at the end, peft's numbers, and as many weights as the formula says."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cria_tricks import models
from cria_tricks.adapter import folder
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.recipe import Recipe
from cria_tricks.switches.lora import trained_weights
from cria_tricks.techniques.lora import LoraLinear
from tests.helpers import prepare, train
from tests.helpers import trained_weights as copies
from tests.tolerances import LORA

KINDS = pytest.mark.parametrize("kind", ["", "rslora", "dora"], ids=["lora", "rslora", "dora"])
LLAMA_1B = ((2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048))
"""(D_in, D_out) of the seven linears of a block of Llama-3.2-1B, which has 16 blocks."""


def adapted(kind: str, r: int = 4, trained: bool = True) -> LoraLinear:
    torch.manual_seed(0)
    made = LoraLinear(nn.Linear(24, 40), r, alpha=8, **({kind: True} if kind else {}))
    if trained:
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def pefts(ours: LoraLinear, kind: str) -> nn.Module:
    """peft's layer with the same numbers."""
    from peft import LoraConfig, get_peft_model

    base = nn.Sequential(nn.Linear(24, 40))
    base[0].load_state_dict(ours.base.state_dict())
    config = LoraConfig(r=len(ours.A), lora_alpha=8, target_modules=["0"], **({f"use_{kind}": True} if kind else {}))
    layer = get_peft_model(base, config).base_model.model[0]
    layer.lora_A["default"].weight.data = ours.A.detach().clone()
    layer.lora_B["default"].weight.data = ours.B.detach().clone()
    if ours.magnitude is not None:
        layer.lora_magnitude_vector["default"].weight.data = ours.magnitude.detach().clone()
    return layer


@KINDS
def test_math(kind):
    """Results and gradients are peft's, and the merged linear's; at step 0 they are the base's, bit for bit (DoRA: all
    but, because a length is divided by itself)."""
    ours, x = adapted(kind), torch.randn(3, 7, 24)
    layer = pefts(ours, kind)
    torch.testing.assert_close(ours(x), layer(x), rtol=0, atol=LORA)
    torch.testing.assert_close(ours(x), ours.merged()(x), rtol=0, atol=LORA)
    ours(x).square().sum().backward()
    layer(x).square().sum().backward()
    pairs = [(ours.A, layer.lora_A["default"].weight), (ours.B, layer.lora_B["default"].weight)]
    if kind == "dora":
        pairs.append((ours.magnitude, layer.lora_magnitude_vector["default"].weight))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=100 * LORA)
    assert ours.base.weight.grad is None
    assert ours.base.bias.grad is None
    fresh = adapted(kind, trained=False)
    if kind == "dora":
        torch.testing.assert_close(fresh(x), fresh.base(x), rtol=0, atol=LORA)
    else:
        assert torch.equal(fresh(x), fresh.base(x))
        wide, x = LoraLinear(nn.Linear(256, 256), 4, 8), torch.randn(21, 256)  # where a bias added apart rounds again
        assert torch.equal(wide(x), wide.base(x))


def test_the_scale_of_rslora_falls_with_the_root_of_the_rank():
    for r in (1, 4, 64):
        assert adapted("", r).scale == 8 / r
        assert adapted("rslora", r).scale == 8 / r**0.5


def test_mechanism():
    """Trained weights and bytes: the formula, Llama-3.2-1B's number, and the files that the seed calls 6 MB."""
    assert 16 * trained_weights(LLAMA_1B, 16) == 11_272_192
    assert 16 * trained_weights(LLAMA_1B, 16) * 4 == 45_088_768, "the adapter's file in fp32"
    assert 16 * trained_weights(LLAMA_1B, 16) * 2 == 22_544_384, "in 16 bits"
    # Only rank 4 in 16 bits comes near: 5.6 MB. Rank 16 on queries and values alone is 6.8 MB in fp32.
    assert 16 * trained_weights(LLAMA_1B, 4) * 2 == 5_636_096
    assert 16 * trained_weights((LLAMA_1B[0], LLAMA_1B[1]), 16) * 4 == 6_815_744
    ours = adapted("dora")
    trained = sum(p.numel() for p in ours.parameters() if p.requires_grad)
    assert trained == trained_weights([(24, 40)], 4, dora=True)


def test_mechanism_saved():
    """A frozen base keeps no input for itself: of a linear only what A and B read is kept, x and r numbers a token."""
    x = torch.randn(5, 24, requires_grad=True)
    ours = adapted("")
    with SavedBytes(besides=[x, *ours.parameters()]) as saved:
        y = ours(x)
    assert saved.now == 4 * 5 * 4, "A x; x itself lives anyway"
    assert y.shape == (5, 40)


def test_the_formula_counts_the_capstones_model():
    """Against the real modules of Llama-3.2-1B's shape, built without weights."""
    from cria_tricks.load.model import count_trainable, refuse_unfit
    from cria_tricks.recipe import with_settings
    from cria_tricks.resolve import resolve

    recipe = with_settings(Recipe(), ["model=random:llama-3.2-1b", "tricks.peft=lora"])
    plan, weights = resolve(recipe), models.find(recipe.model)
    assert count_trainable(refuse_unfit(plan, weights), plan, weights) == 11_272_192


@KINDS
def test_switch(kind, tiny_model, tokenizer, rows, tmp_path):
    """peft's layers are there, train, and make the file that the formula says; the base stays, bit for bit."""
    from peft.tuners.lora import Linear

    settings = ["tricks.peft=lora", "lora.r=4", "train.max_steps=3", "train.learning_rate=1e-2"]
    settings += [f"lora.{kind}=true"] if kind else []
    before = {name: weight.clone() for name, weight in prepare(tiny_model)[2].model.named_parameters()}
    run, loaded = train(tiny_model, rows, tmp_path / "run", *settings)
    layers = [module for module in loaded.model.modules() if isinstance(module, Linear)]
    assert len(layers) == 2 * 7
    assert all(layer.scaling["default"] == 32 / (2 if kind == "rslora" else 4) for layer in layers), "alpha / r"
    assert all(layer.use_rslora["default"] == (kind == "rslora") for layer in layers)
    assert all(bool(layer.lora_magnitude_vector) == (kind == "dora") for layer in layers)
    after = {name.replace(".base_layer", "").replace("base_model.model.", ""): weight
             for name, weight in loaded.model.named_parameters() if not weight.requires_grad}  # fmt: skip
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    widths = 2 * ((256, 256), (256, 128), (256, 128), (256, 256), (256, 512), (256, 512), (512, 256))
    expected = trained_weights(widths, 4, dora=kind == "dora")
    assert sum(weight.numel() for weight in copies(loaded).values()) == expected
    folder.save(tmp_path / "adapter", loaded.model, tokenizer, str(tiny_model), "", Recipe())
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.nbytes for tensor in saved.values()) == 4 * expected
    assert run.training[-1]["loss"] < run.training[0]["loss"]


def test_merged_equals_unmerged(tiny_model, rows, tmp_path):
    """peft's merge, of a trained adapter over an unquantised base."""
    _, loaded = train(tiny_model, rows, tmp_path, "tricks.peft=lora", "lora.r=4", "train.max_steps=3")
    ids = torch.arange(3, 40)[None]
    unmerged = loaded.model.eval()(input_ids=ids).logits
    merged = loaded.model.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=10 * LORA)
