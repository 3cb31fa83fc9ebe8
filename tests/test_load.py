"""What is really loaded: classes, dtypes, what trains; and the silent CPU bug that is kept out."""

import logging

import bitsandbytes as bnb
import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.load.model import load
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from tests.helpers import prepare, trained_weights


def test_lora_trains_fp32_matrices_over_a_frozen_16_bit_base(tiny_model):
    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "tricks.precision=bf16")
    assert {p.dtype for p in loaded.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in trained_weights(loaded).values()} == {torch.float32}
    assert all("lora_" in name for name in trained_weights(loaded))


def test_lora_has_the_parameters_of_the_formula(tiny_model):
    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "lora.r=4")
    d, kv, inner = 256, 128, 512
    per_layer = 4 * ((d + d) * 2 + (d + kv) * 2 + (d + inner) * 3)
    assert sum(p.numel() for p in trained_weights(loaded).values()) == 2 * per_layer


def test_head_only_trains_a_copy_and_leaves_the_tied_embedding_alone(tiny_model):
    _, _, loaded = prepare(tiny_model, "tricks.peft=head", "tricks.precision=fp16")
    (name, weight), *others = trained_weights(loaded).items()
    assert not others
    assert "lm_head" in name
    assert weight.shape == (512, 256)
    assert weight.dtype == torch.float32
    assert not loaded.model.get_input_embeddings().weight.requires_grad


def test_all_off_trains_everything_in_fp32(tiny_model):
    _, _, loaded = prepare(tiny_model)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.model.parameters())


@pytest.mark.parametrize(
    ("kind", "layer"), [("nf4", bnb.nn.Linear4bit), ("fp4", bnb.nn.Linear4bit), ("int8", bnb.nn.Linear8bitLt)]
)
def test_quantization_replaces_every_linear_but_the_head(kind, layer, tiny_model):
    _, plan, loaded = prepare(tiny_model, "tricks.peft=lora", f"tricks.quantization={kind}")
    assert sum(isinstance(m, layer) for m in loaded.model.modules()) == 2 * 7
    assert type(loaded.model.get_output_embeddings()) is torch.nn.Linear
    if kind != "int8":
        assert plan.quantization["bnb_4bit_quant_type"] == kind
        assert {m.quant_state.quant_type for m in loaded.model.modules() if isinstance(m, layer)} <= {kind}


def test_lean_preparation_keeps_16_bits_where_the_usual_one_makes_32(tiny_model):
    sets = ("tricks.peft=lora", "tricks.quantization=nf4", "tricks.precision=bf16")
    _, _, usual = prepare(tiny_model, *sets)
    _, _, lean = prepare(tiny_model, *sets, "tricks.lean_preparation=true")
    assert usual.model.get_input_embeddings().weight.dtype == torch.float32
    assert lean.model.get_input_embeddings().weight.dtype == torch.bfloat16
    switched = [m.cast_input_dtype_enabled for m in lean.model.modules() if hasattr(m, "cast_input_dtype_enabled")]
    assert len(switched) == 14
    assert not any(switched)
    assert {p.dtype for p in trained_weights(lean).values()} == {torch.float32}


def test_a_head_with_a_bias_is_refused_with_chunked_loss(tmp_path):
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    PhiForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="does more than one product .a bias"):
        prepare(tmp_path, "tricks.peft=lora", "tricks.chunked_loss=true", "lora.target_modules=q_proj")


def test_all_linear_is_pefts_word(tiny_model):
    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "lora.target_modules=all-linear")
    assert sum("lora_A" in name for name in trained_weights(loaded)) == 14


def test_a_target_that_is_no_linear_is_refused(tiny_model):
    with pytest.raises(BadInput, match="lora.target_modules: "):
        prepare(tiny_model, "tricks.peft=lora", "lora.target_modules=self_attn")


def test_a_model_that_is_not_there():
    plan = resolve(with_settings(Recipe(), ["model=owner/none"]))
    with pytest.raises(BadInput, match="model owner/none: cannot be loaded: .*--set model=DIR") as caught:
        load(plan, Weights("owner/none", "owner/none", None))
    assert "\n" not in str(caught.value)


def _gradients(loaded) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 35)[None]
    loaded.model.train()
    loaded.model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in loaded.model.named_parameters() if p.grad is not None}


def test_an_evaluation_does_not_change_the_gradients_after_it(tiny_model, monkeypatch):
    """bitsandbytes 0.50 on a CPU with AVX512-BF16 repacks 4-bit weights at the first forward in eval mode.

    From then on no gradient passes through the frozen base. Such a CPU is played here, so that the test bites on
    every machine: the repacking itself is plain Python and does not ask the CPU again.
    """
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    sets = ("tricks.peft=lora", "tricks.quantization=nf4")
    _, _, never_evaluated = prepare(tiny_model, *sets)
    _, _, evaluated = prepare(tiny_model, *sets)
    for loaded in (never_evaluated, evaluated):  # B = 0 hides the path through A: move both the same way
        with torch.no_grad():
            for name, p in loaded.model.named_parameters():
                if "lora_B" in name:
                    p.fill_(0.01)
    evaluated.model.eval()
    with torch.no_grad():
        evaluated.model(input_ids=torch.arange(3, 35)[None])
    layers = [m for m in evaluated.model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(layers) == 14
    assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)
    expected, found = _gradients(never_evaluated), _gradients(evaluated)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_bitsandbytes_does_not_tell_of_a_package_that_nothing_here_needs(caplog):
    caplog.set_level(logging.WARNING, "bitsandbytes")
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
