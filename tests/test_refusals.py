"""``cria plan`` and training refuse the same settings in the same words: models and toggles drawn by a seed.

A small sample runs each time; ``CRIA_ALL=1`` draws a hundred times as many.
"""

import contextlib
import os
import random
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.estimate_error import DEVICES, PEFT, TOGGLES
from cria_tricks.common.errors import BadInput
from cria_tricks.load import model as load
from cria_tricks.load.adapters import add_lora
from cria_tricks.load.model import built_empty
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.configs import KINDS
from cria_tricks.models.shape import GENERATES, facts_of, shape_of
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import function_at
from cria_tricks.switches.lora import ALL_LINEAR
from tests.memory.cases import A100

CASES = 4000 if os.environ.get("CRIA_ALL") else 40
SMALL = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 160,
    "pad_token_id": 0,
}
SMALL_KINDS = {kind: {**SMALL, "model_type": kind} for kind in KINDS}
MODELS = {
    # The catalogue's models with their own heads and options, two blocks of them, and every kind as small as it gets.
    **{name: {**config, "num_hidden_layers": 2} for name, config in CONFIGS.items()},
    **SMALL_KINDS,
    "capped-qwen": {**SMALL_KINDS["qwen2"], "final_logit_softcapping": 20.0},
    "scaled-llama": {**SMALL_KINDS["llama"], "logits_scaling": 8.0},
    "uncapped-gemma": {**SMALL_KINDS["gemma3_text"], "final_logit_softcapping": None},
    "odd-heads": {**SMALL_KINDS["mistral"], "num_attention_heads": 9, "num_key_value_heads": 3},
}
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj", "gate_proj", "c_attn", "wq", "qkv_proj", "gate_up_proj",
           "lm_head", "self_attn.q_proj", "1.self_attn.q_proj", "9.self_attn.q_proj", "proj", "mlp")  # fmt: skip
NO_ESTIMATE = re.compile(r"lora\.target_modules(=(?P<target>\S+))?: no estimate for (?P<module>[^\s;]+)")
"""What only a plan says: of modules that can be trained, and that its formulas do not know."""


def setting(number: int) -> tuple[str, str, int, Recipe]:
    """A model, a device, a number of processes, and a recipe whose toggles go together there."""
    draw = random.Random(f"refusals {number}")
    model, device, peft = draw.choice(tuple(MODELS)), draw.choice(tuple(DEVICES)), draw.choice(PEFT)
    processes, strategy = draw.choice([(1, "none")] * 3 + [(2, "ddp"), (2, "tensor"), (4, "tensor")])
    while True:
        toggles = {"peft": peft, **{name: draw.choice(values) for name, values in TOGGLES.items()}}
        if strategy == "tensor":
            toggles |= {"quantization": "none", "optimizer": "adamw", "paged_optimizer": False,
                        "peft": draw.choice(("none", "lora")), "precision": "fp32"}  # fmt: skip
        targets = draw.choice((["all-linear"], draw.sample(TARGETS[:5], 2), draw.sample(TARGETS, 2)))
        sets = [f"tricks.{name}={value}" for name, value in toggles.items()]
        sets += [f"lora.target_modules={','.join(targets)}", f"side.blocks={draw.choice((1, 2, 3, 5))}"]
        sets += [f"parallel.strategy={strategy}", "train.batch_size=1", "data.max_length=64"]
        recipe = with_settings(Recipe(), sets)
        with contextlib.suppress(BadInput):
            resolve(recipe, DEVICES[device], processes)
            return model, device, processes, recipe


def said(call) -> str:
    try:
        call()
    except BadInput as error:
        return str(error)
    return ""


def by_plan(model: str, device: str, processes: int, recipe: Recipe) -> str:
    """What ``cria plan`` says, from the config alone."""

    def plan() -> None:
        target = Target(shape_of(MODELS[model], model), DEVICES[device], processes)
        target.resolve(recipe)
        target.bill(recipe)

    return said(plan)


def by_training(model: str, device: str, processes: int, recipe: Recipe) -> str:
    """What training and the dry run say, from the modules."""

    def build() -> None:
        plan = resolve(recipe, DEVICES[device], processes)
        made = built_empty(plan, AutoConfig.for_model(**MODELS[model]), model)
        with torch.device("meta"):
            for address in plan.after_load:
                if address.startswith("load.adapters.add_"):
                    function_at(address)(made, plan)

    return said(build)


def test_what_is_drawn_is_refused_by_both_in_the_same_words_or_by_neither(monkeypatch):
    refused, allowed = 0, 0
    for number in range(CASES):
        model, device, processes, recipe = one = setting(number)
        monkeypatch.setattr(load, "processes", lambda processes=processes: processes)
        planned, trained = by_plan(*one), by_training(*one)
        if found := NO_ESTIMATE.match(planned):
            target = found["target"] or found["module"]
            assert target == ALL_LINEAR or facts_of(shape_of(MODELS[model], model)).has(target), f"{number}: {planned}"
            assert "no module named" not in trained, f"{number}: {trained}"
            continue
        assert planned == trained, f"{number}: {model} on {device}, {processes} processes, {recipe}"
        refused, allowed = refused + bool(trained), allowed + (not trained)
    assert refused > CASES / 10
    assert allowed > CASES / 5


@pytest.mark.parametrize("model", MODELS)
def test_a_shape_knows_the_modules_that_transformers_builds(model):
    config = MODELS[model]
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weightless = ("", "act_fn", "activation_fn", "resid_attn_dropout", "resid_mlp_dropout")
    theirs = {path for path, _ in made.named_modules() if path.rpartition(".")[2] not in weightless}
    assert set(shape_of(config, model).modules) == theirs
    assert shape_of(config, model).layers == len(made.model.layers)


@pytest.mark.parametrize(
    ("model", "sets", "words"),
    [
        ("mixtral-8x7b", ["tricks.peft=lora"], "no module named gate_proj; set lora.target_modules=all-linear for"),
        ("gemma2", ["tricks.attention=sdpa"], "gemma2 is not made for it; set tricks.attention=eager"),
        ("gemma2", ["tricks.peft=lora", "tricks.chunked_loss=true"], r"one product \(final_logit_softcapping\)"),
        ("scaled-llama", ["tricks.peft=lora", "tricks.chunked_loss=true"], r"one product \(logits_scaling\)"),
        ("smollm2", ["tricks.peft=side_network", "side.blocks=3"], "side.blocks=3: smollm2 has 2"),
    ],
)
def test_each_refusal_by_name(model, sets, words):
    recipe = with_settings(Recipe(), sets)
    for who in (by_plan, by_training):
        with pytest.raises(BadInput, match=words):
            raise BadInput(who(model, "a100", 1, recipe))


def test_a_mixtures_experts_have_no_estimate_and_its_attention_has():
    """peft adapts all experts in one tensor of its own shape, which the formulas do not know."""
    one = with_settings(Recipe(), ["tricks.peft=lora", "lora.target_modules=all-linear"])
    assert by_plan("mixtral", "a100", 1, one) == (
        "lora.target_modules=all-linear: no estimate for mixtral, all of whose experts peft adapts in one tensor; an "
        "estimate is there for lora.target_modules=q_proj,k_proj,v_proj,o_proj"
    )
    assert by_training("mixtral", "a100", 1, one) == ""
    other = with_settings(one, ["lora.target_modules=q_proj,k_proj,v_proj,o_proj"])
    assert by_plan("mixtral", "a100", 1, other) == by_training("mixtral", "a100", 1, other) == ""


def test_all_linear_stands_alone():
    """peft would look for a module of that name, find none, and adapt the others without a word."""
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "lora.target_modules=all-linear,q_proj"])
    assert said(lambda: resolve(recipe, A100)) == (
        "lora.target_modules=all-linear,q_proj: all-linear means every linear but the head; leave the other names out"
    )


def test_no_suggestion_is_one_that_the_model_refuses():
    from cria_tricks.predict.toggles import suggestions

    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.precision=bf16", "data.max_length=4096"])
    for model, refused in (("gemma", False), ("gemma2", True)):
        found = {change.set for change in suggestions(Target(shape_of(MODELS[model], model), A100), recipe)}
        assert bool(found & {"tricks.attention=sdpa", "tricks.chunked_loss=true"}) is not refused
        assert "tricks.gradient_checkpointing=true" in found


def test_a_config_of_a_classifier_is_no_language_model():
    assert set(GENERATES) <= load.CAUSAL
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in KINDS} <= set(GENERATES)
    for architecture, words in (
        ("LlamaForSequenceClassification", "is no causal language model but"),
        *((name, "") for name in GENERATES),
    ):
        config = {**MODELS["tiny"], "architectures": [architecture]}
        planned = said(lambda config=config: shape_of(config, "made-up"))
        trained = said(
            lambda config=config: built_empty(resolve(Recipe(), A100), AutoConfig.for_model(**config), "made-up")
        )
        assert planned == trained
        assert words in planned


@pytest.mark.parametrize(
    ("kind", "fields", "there"),
    [
        ("phi3", {}, "o_proj,down_proj"),
        ("gpt2", {"n_embd": 96}, ""),
        ("mixtral", {"num_local_experts": 2}, "q_proj,k_proj,v_proj,o_proj"),
    ],
)
def test_a_model_with_other_names_is_told_of_all_linear_which_trains_it(kind, fields, there):
    config = AutoConfig.for_model(**{**SMALL, "model_type": kind, **fields})
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora"]), A100)
    refused = said(lambda: built_empty(plan, config, "this-one"))
    assert re.fullmatch(
        r"lora\.target_modules: this-one has no module named \w+; set lora\.target_modules=all-linear for every linear "
        "but the head" + (f", or {there}, which it has" if there else ""),
        refused,
    )
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora", "lora.target_modules=all-linear"]), A100)
    with torch.device("meta"):
        adapted = add_lora(built_empty(plan, config, "this-one"), plan)
    assert any(p.requires_grad for p in adapted.parameters())
