"""Lean preparation: bytes against peft's usual preparation, the loss it costs, and what really changes."""

import math
import re

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training
from cria_tricks.trainer.headroom import LargestActivation
from tests.helpers import prepare, train, trained_weights
from tests.tolerances import LEAN_LOSS

V, D = 512, 256
HALF = ["tricks.precision=bf16", "tricks.peft=lora", "lora.r=16", "tricks.quantization=nf4"]
LEAN = "tricks.lean_preparation=true"


def weights_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {p.data_ptr(): p for p in model.parameters()}.values())


def test_math(tiny_model, rows, tmp_path):
    """Adapters that multiply in 16 bits: the loss of every step is the usual preparation's within the stated bound."""
    settings = [*HALF, "train.max_steps=20", "train.learning_rate=1e-3"]
    usual, _ = train(tiny_model, rows, tmp_path / "usual", *settings)
    lean, _ = train(tiny_model, rows, tmp_path / "lean", *settings, LEAN)
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(usual.training, lean.training, strict=True)]
    print(f"largest {max(apart):.1e}, mean {sum(apart) / len(apart):.1e}, loss {lean.training[-1]['loss']:.3f}")
    assert 0 < max(apart) < LEAN_LOSS


def test_mechanism(tiny_model):
    """The fp32 copies: of the embedding 2 V D bytes, of the norms 2 D each; nothing else of the model changes size."""
    usual, lean = (prepare(tiny_model, *HALF, *extra)[2].model for extra in ([], [LEAN]))
    norms = 2 * 2 + 1
    assert weights_bytes(usual) - weights_bytes(lean) == 2 * V * D + norms * 2 * D


def test_mechanism_saved(tiny_model):
    """A cast input is kept a second time: with the usual preparation an adapter's input costs 2 B T D bytes more."""
    ids, kept = torch.arange(3, 31).view(2, 14), {}
    for name, extra in (("usual", []), ("lean", [LEAN])):
        model = prepare(tiny_model, *HALF, *extra)[2].model.train()
        with (
            SavedBytes(besides=[*model.parameters(), *model.buffers()]) as saved,
            torch.autocast("cpu", torch.bfloat16),
        ):
            hidden = model.get_base_model().model(ids).last_hidden_state
            kept[name] = saved.now
        assert hidden is not None
    print(kept)
    # In each of two blocks: of q, k, v one input, of o one, of gate and up one, of down one twice as wide.
    assert kept["usual"] - kept["lean"] >= 2 * 2 * (2 * 14) * (D + D + D + 2 * D)


def test_switch(tiny_model):
    """Adapters take their inputs as they come, the embedding stays in 16 bits, what trains is in fp32."""
    _, plan, lean = prepare(tiny_model, *HALF, LEAN)
    assert "load.adapters.prepare_for_kbit_training" not in plan.after_load
    assert lean.model.get_input_embeddings().weight.dtype == torch.bfloat16
    switched = [m.cast_input_dtype_enabled for m in lean.model.modules() if hasattr(m, "cast_input_dtype_enabled")]
    assert switched == [False] * 14
    assert {p.dtype for p in trained_weights(lean).values()} == {torch.float32}


@pytest.mark.parametrize("setting", ["tricks.precision=fp32", "tricks.peft=head"])
def test_where_there_is_nothing_to_save_it_says_so(setting, tiny_model):
    _, plan, _ = prepare(tiny_model, *HALF, LEAN, setting)
    assert "lean_preparation has no effect" in " ".join(plan.warnings)


def fp16_run(tiny_model, rows, out, large: float, *settings: str):
    """Two steps in fp16. One number of each hidden state is large, as in real models, and the norms leave it out."""
    fp16 = ["tricks.precision=fp16", "tricks.peft=lora", "train.max_steps=2"]
    recipe, plan, loaded = prepare(tiny_model, *fp16, *settings)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                weight[:, 0] = large
            elif "norm" in name:
                weight[0] = 0
    said: list[str] = []
    run = fit(training(loaded, plan, recipe.train, rows, rows[:2], Checkpoints(out, say=said.append), pad_id=2))
    return run, said


def test_the_headroom_of_a_stream_in_fp16_is_looked_at_before_it_is_trained(tiny_model, rows, tmp_path):
    """fp16 ends at 65,504: four times less is worth a word, more is refused, and nothing is said of what has room."""
    enough, said = fp16_run(tiny_model, rows, tmp_path / "enough", 16_000.0, LEAN)
    assert (enough.warnings, said) == ((), [])
    near, said = fp16_run(tiny_model, rows, tmp_path / "near", 30_000.0, LEAN)
    assert said == [f"warning: {near.warnings[0]}"]
    assert math.isfinite(near.training[0]["loss"])
    assert re.search(r"first batch is 30,0\d\d .* 2.2 times that would overflow", near.warnings[0])
    with pytest.raises(BadInput, match="activations of the first batch are larger .*lean_preparation=false"):
        fp16_run(tiny_model, rows, tmp_path / "beyond", 70_000.0, LEAN)


def test_a_stream_in_fp32_or_bf16_is_not_looked_at(tiny_model, rows, tmp_path):
    assert fp16_run(tiny_model, rows, tmp_path / "usual", 30_000.0)[1] == []
    assert fp16_run(tiny_model, rows, tmp_path / "bf16", 30_000.0, LEAN, "tricks.precision=bf16")[1] == []


def test_looking_changes_no_bit_of_the_run(tiny_model, rows, tmp_path, monkeypatch):
    settings = ["tricks.precision=fp16", "tricks.peft=lora", "lora.dropout=0.1", "train.max_steps=2", LEAN]
    looked, _ = train(tiny_model, rows, tmp_path / "looked", *settings)
    monkeypatch.setattr("cria_tricks.trainer.training.Training.look_at_the_first_batch", lambda *_: None)
    blind, _ = train(tiny_model, rows, tmp_path / "blind", *settings)
    assert [entry["loss"] for entry in looked.training] == [entry["loss"] for entry in blind.training]


def test_the_largest_activation_is_found_with_its_place():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Identity(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1.0, -50.0, 3.0, 0.0])))
        model[0].bias.zero_()
    with LargestActivation(model) as found:
        model(torch.ones(1, 4))
    assert (found.value, found.name) == (50.0, "0")
    with LargestActivation(model) as found:
        model(torch.full((1, 4), math.nan))
    assert found.value == math.inf
    assert not any(module._forward_hooks for module in model.modules())
