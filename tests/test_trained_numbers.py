"""The numbers that train, counted from shapes, against peft's layers on a model without weights."""

import pytest
import torch
from transformers import AutoConfig

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.load import adapters
from cria_tricks.load.adapters import add_lora
from cria_tricks.load.model import built_empty
from cria_tricks.models.configs import KINDS
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import function_at
from tests.test_families import SMALL, config_of

ALL = "lora.target_modules=all-linear"
MORE = {
    "gpt2": {"n_embd": 64},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 48},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
CASES = [
    *((kind, (ALL,)) for kind in (*KINDS, *MORE)),
    *((kind, (ALL, "lora.dora=true", "lora.rslora=true")) for kind in ("llama", "phi3", "gpt2")),
    ("llama", ("lora.target_modules=q_proj,v_proj", "lora.r=3", "lora.dropout=0.1")),
    ("llama", ("lora.target_modules=0.self_attn.q_proj,embed_tokens",)),
    ("llama", ("lora.target_modules=embed_tokens,lm_head", "lora.dora=true")),
    ("lfm2", ("lora.target_modules=conv.conv,q_proj", "lora.r=64")),
    ("gemma", ("tricks.peft=head",)),
    ("gpt2", ("tricks.peft=head",)),
    ("gpt2", ("tricks.peft=prompt_tuning", "prompt.tokens=5")),
    ("qwen3", ("tricks.peft=prompt_tuning",)),
    ("qwen2", ("tricks.peft=side_network", "side.blocks=1")),
    ("olmo2", ("tricks.peft=side_network",)),
]


def empty(kind: str, settings: tuple[str, ...]):
    """A model without weights, and the plan for it."""
    fields = config_of(kind) if kind in KINDS else {**SMALL, "model_type": kind, **MORE[kind]}
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora", *settings]), T4)
    return built_empty(plan, AutoConfig.for_model(**fields), kind), plan


@pytest.mark.parametrize(
    ("kind", "settings"), CASES, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_the_count_is_what_peft_makes(kind, settings):
    counted = adapters.count(*empty(kind, settings))
    model, plan = empty(kind, settings)
    with torch.device("meta"):
        adapted = function_at(plan.after_load[0])(model, plan)
    assert counted == sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)


def test_no_layer_is_put_into_the_model():
    model, plan = empty("mixtral", (ALL,))
    before = {path: type(module) for path, module in model.named_modules()}
    adapters.count(model, plan)
    assert {path: type(module) for path, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("llama", ("lora.target_modules=input_layernorm",), "is a LlamaRMSNorm, which LoRA cannot adapt"),
        ("mixtral", (ALL, "lora.dora=true"), "several matrices in one tensor, without DoRA"),
        ("mixtral", (ALL, "lora.dropout=0.1"), "several matrices in one tensor, without DoRA"),
    ],
)
def test_what_peft_cannot_adapt_is_refused_before_weights_are_loaded(kind, settings, said):
    with pytest.raises(BadInput, match=f"lora.target_modules: .*{said}"):
        adapters.count(*empty(kind, settings))
    model, plan = empty(kind, settings)
    with pytest.raises((BadInput, ValueError)), torch.device("meta"):
        add_lora(model, plan)
