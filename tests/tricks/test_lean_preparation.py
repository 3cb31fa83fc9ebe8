"""Lean preparation: bytes against peft's usual preparation, the loss it costs, and what really changes."""

import pytest
import torch

from cria_tricks.counting import SavedBytes
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
    assert "prepare_for_kbit_training" not in plan.after_load
    assert lean.model.get_input_embeddings().weight.dtype == torch.bfloat16
    switched = [m.cast_input_dtype_enabled for m in lean.model.modules() if hasattr(m, "cast_input_dtype_enabled")]
    assert switched == [False] * 14
    assert {p.dtype for p in trained_weights(lean).values()} == {torch.float32}


@pytest.mark.parametrize("setting", ["tricks.precision=fp32", "tricks.peft=head"])
def test_where_there_is_nothing_to_save_it_says_so(setting, tiny_model):
    _, plan, _ = prepare(tiny_model, *HALF, LEAN, setting)
    assert "lean_preparation has no effect" in " ".join(plan.warnings)
