"""A tiny twin shows which techniques are exact in a family, and a family in which one is not is refused."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cria_tricks.common.errors import BadInput
from cria_tricks.load import fused, twin
from cria_tricks.load.model import built_empty
from cria_tricks.models import weight_files
from cria_tricks.models.configs import KINDS
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from tests.sweeps import sample
from tools import families

PACKED_APART = "apertus cohere ctrl diffllama ernie4_5 glm gpt2 gpt_neox helium olmo phi seed_oss starcoder2".split()
"""Families that keep documents apart by their positions, of those that ``cria plan`` does not know."""
PACKED_TOGETHER = {  # what keeps them from it: recurrent blocks, positions of another kind, attention sinks
    "recurrent": "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 mamba mamba2 nemotron_h olmo_hybrid "
    "qwen3_5_text qwen3_next recurrent_gemma kimi_linear",
    "positions": "biogpt bloom mpt xglm",
    "attention": "afmoe gpt_oss opt",
}


PAGE = families.on_the_page()
"""The rows of the page, which the same check has made."""


def empty(kind: str, **fields):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **families.FIELDS.get(kind, {}) | fields))


def shown(kind: str, *techniques: str, **fields) -> dict[str, str]:
    model = empty(kind, **fields)
    attention = "eager"
    if model._supports_sdpa:
        attention = "sdpa_by_document" if "packing" in techniques else "sdpa"
    return twin.tried(model, attention, techniques)


def on_the_page(kind: str, technique: str) -> str:
    return PAGE[kind][1 + families.TECHNIQUES.index(technique)]


of_this_version = pytest.mark.skipif(
    families.VERSION not in families.PAGE.read_text(encoding="utf-8"), reason="the page is of another transformers"
)


@of_this_version
def test_the_page_has_every_family_of_transformers():
    assert list(PAGE) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "run: python -m tools.families"
    assert set(KINDS) == {kind for kind, cells in PAGE.items() if cells[-1] == "billed"}


@of_this_version
@pytest.mark.parametrize("kind", sample(PAGE, 12))
def test_the_page_says_what_a_twin_shows(kind):
    assert families.row(kind) == PAGE[kind], "run: python -m tools.families"


@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_exact_in_the_families_that_are_billed(kind):
    assert shown(kind, "packing", "loss") == {"packing": "", "loss": ""}


@pytest.mark.parametrize("kind", PACKED_APART)
def test_packing_is_exact_where_positions_keep_documents_apart(kind):
    assert (on_the_page(kind, "packing"), on_the_page(kind, "loss")) == ("yes", "yes")


@pytest.mark.parametrize("kind", " ".join(PACKED_TOGETHER.values()).split())
def test_packing_is_refused_where_documents_see_each_other(kind):
    assert on_the_page(kind, "loss") == "yes", "such a family can be trained, without packing"
    assert on_the_page(kind, "packing") != "yes"


@pytest.mark.parametrize("kind", ["lfm2", "mamba", "gpt_oss", "bloom"])
def test_a_packed_row_that_sees_its_neighbour_is_found(kind):
    assert "logits of packed rows and of each row alone differ by" in shown(kind, "packing")["packing"]


@pytest.mark.parametrize("kind", ["bart", "blenderbot", "bigbird_pegasus"])
def test_a_head_that_ignores_the_count_of_tokens_is_found(kind):
    assert re.match(
        r"the loss is \d\.\d+ and not 1\d\d\.?\d*, the sum over the trained tokens", shown(kind, "loss")["loss"]
    )


@pytest.mark.parametrize("kind", ["bert", "electra", "roberta"])
def test_a_model_that_sees_later_tokens_is_found(kind):
    assert shown(kind, "loss")["loss"].startswith("logits before a token that changes differ by")


@pytest.mark.parametrize(("kind", "fields"), [("cohere", {}), ("gemma2", {}), ("granite", {"logits_scaling": 8.0})])
def test_a_head_that_does_more_than_a_product_has_no_chunked_loss(kind, fields):
    found = shown(kind, "loss", "chunked loss", **fields)
    assert found["loss"] == ""
    assert "the sum over the trained tokens" in found["chunked loss"]


def test_a_family_without_checkpointing_is_found():
    assert "does not support activation checkpointing" in shown("ctrl", "checkpointing")["checkpointing"]
    assert shown("llama", "checkpointing", "chunked loss") == {"checkpointing": "", "chunked loss": ""}


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("lfm2", "tricks.packing=true", "packing is not exact in models of kind lfm2: .* set tricks.packing=false"),
        ("bart", "tricks.packing=false", "loss is not exact in models of kind bart: .* take a model of another family"),
        (
            "ctrl",
            "tricks.gradient_checkpointing=true",
            "of kind ctrl: on a tiny one .*CTRLLMHeadModel does not support .*gradient_checkpointing=false",
        ),
    ],
)
def test_it_is_refused_in_one_line_before_any_weight_is_loaded(kind, settings, said):
    config = AutoConfig.for_model(kind, **families.FIELDS.get(kind, {}))
    attention = "sdpa" if empty(kind)._supports_sdpa else "eager"
    plan = resolve(
        with_settings(
            Recipe(), [settings, f"tricks.attention={attention}", "tricks.peft=lora", "lora.target_modules=all-linear"]
        )
    )
    with pytest.raises(BadInput, match=said) as raised:
        built_empty(plan, config, "this-one")
    assert "\n" not in str(raised.value)


def test_a_small_table_of_positions_and_a_routers_noise_are_no_fault_of_the_family():
    assert shown("gpt2", "packing", "loss", n_positions=16) == {"packing": "", "loss": ""}
    noise = {"router_jitter_noise": 0.1, "num_local_experts": 2, "num_experts_per_tok": 1}
    assert shown("mixtral", "checkpointing", **noise) == {"checkpointing": ""}


def test_a_routers_balance_is_no_part_of_the_loss():
    assert "the sum over the trained tokens" in shown("mixtral", "loss", output_router_logits=True)["loss"]


def test_each_kind_of_block_is_in_the_twin():
    model = empty("gemma3_text")
    assert model.config.layer_types[:6] == ["sliding_attention"] * 5 + ["full_attention"]
    blocks = twin._blocks_needed(model)
    small = twin.shrunk(model.config, blocks, 4)
    assert (blocks, small.layer_types) == (6, model.config.layer_types[:6])
    assert small.sliding_window < min(twin.LENGTHS), "a row is longer than a window"
    assert twin._blocks_needed(empty("llama")) == 2


@pytest.mark.parametrize("technique", ["fused adapters", "fused blocks"])
def test_a_fused_part_that_computes_something_else_is_found(technique, tmp_path, monkeypatch):
    assert shown("llama", technique) == {technique: ""}
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    honest = fused.products, fused.PLAIN.rms_norm
    monkeypatch.setattr(fused, "products", lambda x, matrices: [2 * y for y in honest[0](x, matrices)])
    wrong = fused.PLAIN._replace(rms_norm=lambda x, weight, epsilon: honest[1](x, weight, 1.0))
    monkeypatch.setitem(twin.TRIALS, "fused blocks", twin._fused(lambda model: fused.fuse_blocks(model, parts=wrong)))
    assert "gradients with and without it differ by" in shown("llama", technique)[technique]


def test_the_callers_random_state_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    before = torch.get_rng_state()
    assert set(shown("llama", *twin.TRIALS).values()) == {""}
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_shown_is_kept_and_sizes_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    assert shown("llama", "loss") == {"loss": ""}
    monkeypatch.setattr(twin, "_twin", lambda *given: pytest.fail("a twin is built again"))
    assert shown("llama", "loss", hidden_size=8192, num_attention_heads=64, num_hidden_layers=80) == {"loss": ""}
    (kept,) = (value for key, value in json.loads(weight_files._memory().read_text()).items() if "Llama" in key)
    assert kept == ["loss"]


def test_positions_that_do_not_begin_again_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    honest = twin.PackedRows

    def going_on(rows, capacity):
        (row,) = honest(rows, capacity)
        return [{**row, "position_ids": list(range(capacity))}]

    monkeypatch.setattr(twin, "PackedRows", going_on)
    assert "logits of packed rows" in shown("llama", "packing")["packing"]
    monkeypatch.setattr(twin, "PackedRows", honest)
    assert shown("llama", "packing") == {"packing": ""}, "what was wrong is tried again"
