"""Toggles as data: what each writes into the plan, what it refuses, and what it warns of. No GPU needed."""

import json
from dataclasses import replace

import pytest

from cria_tricks import recipes
from cria_tricks.errors import BadInput
from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import flash_attention, resolve

A100 = Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=40 * 2**30)
CPU = Device("cpu", "some CPU", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)


def plan(device: Device, *settings: str) -> Plan:
    return resolve(with_settings(Recipe(), [f"tricks.{s}" for s in settings]), device)


def test_all_off_is_plain_fp32():
    off = plan(CPU)
    assert off.model == {"dtype": "float32", "attn_implementation": "eager"}
    assert off.training == {"gradient_accumulation_steps": 1}
    assert not off.quantization
    assert not off.peft
    assert off.optimizer == {"bits": 32, "paged": False}
    assert off.loss == {"kind": "full"}
    assert off.after_load == off.warnings == ()


def test_the_capstone_on_a_t4():
    capstone = resolve(recipes.kwanzaa(T4), T4)
    assert capstone.model == {"dtype": "float16", "attn_implementation": "sdpa_expanded"}
    assert capstone.quantization == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float16",
    }
    assert capstone.training["fp16"] is True
    assert capstone.training["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert capstone.optimizer == {"bits": 8, "paged": True}
    assert capstone.after_load == ("add_adapter", "adapter_inputs_uncast")
    assert capstone.warnings == ()
    json.dumps(capstone.to_dict())


def test_the_capstone_repeats_keys_only_where_a_card_needs_it():
    newer = Device("cuda", "Ampere", (8, 0), real_bf16=True, memory_bytes=T4.memory_bytes)
    tricks = {device: recipes.kwanzaa(device).tricks for device in (T4, newer)}
    assert (tricks[T4].expand_kv, tricks[newer].expand_kv) == (True, False)
    assert tricks[T4].lean_preparation
    assert tricks[newer].lean_preparation
    assert resolve(recipes.kwanzaa(newer), newer).warnings == ()


def test_full_fine_tuning_in_16_bits_keeps_fp32_master_weights():
    assert plan(T4, "precision=fp16").model["dtype"] == "float32"
    assert plan(T4, "precision=fp16", "peft=lora").model["dtype"] == "float16"


def test_lean_preparation_leaves_the_upcast_out():
    lean = plan(T4, "precision=fp16", "quantization=nf4", "peft=lora", "lean_preparation=true")
    assert lean.after_load == ("add_adapter", "adapter_inputs_uncast")


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (T4, ["precision=bf16"], "Tesla T4 (compute capability 7.5) has no bf16 units"),
        (T4, ["precision=bf16"], "use tricks.precision=fp16"),
        (T4, ["attention=flash_attention_2", "precision=fp16"], "needs compute capability 8.0, and Tesla T4 has 7.5"),
        (CPU, ["attention=flash_attention_2"], "CUDA cards only; use tricks.attention=sdpa"),
        (A100, ["attention=flash_attention_2"], "16 bits only"),
        (CPU, ["quantization=nf4"], "set tricks.peft=lora"),
        (CPU, ["quantization=int8"], "set tricks.peft=lora"),
        (CPU, ["chunked_loss=true"], "set tricks.peft=lora"),
        (CPU, ["chunked_loss=true", "peft=head"], "peft=head trains the head"),
    ],
)
def test_what_cannot_work_says_why_and_what_instead(device, settings, said):
    with pytest.raises(BadInput) as caught:
        plan(device, *settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flash_attention_2_without_its_package(monkeypatch):
    """It is missed on this machine, and not in a plan for another one."""
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plan(A100, "attention=flash_attention_2", "precision=bf16").warnings == ()
    monkeypatch.setattr(flash_attention, "this_device", lambda: A100)
    with pytest.raises(BadInput, match="flash-attn is missing; pip install"):
        plan(A100, "attention=flash_attention_2", "precision=bf16")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert plan(A100, "attention=flash_attention_2", "precision=bf16").model["attn_implementation"] == (
        "flash_attention_2"
    )


def test_chunked_loss_refuses_an_adapted_head():
    recipe = with_settings(
        Recipe(), ["tricks.peft=lora", "tricks.chunked_loss=true", "lora.target_modules=q_proj,lm_head"]
    )
    with pytest.raises(BadInput, match="frozen head"):
        resolve(recipe, CPU)


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (CPU, ["paged_optimizer=true"], "no effect without CUDA"),
        (CPU, ["double_quantization=true"], "double_quantization has no effect"),
        (CPU, ["lean_preparation=true", "peft=lora"], "lean_preparation has no effect"),
        (CPU, ["gradient_checkpointing=true", "peft=head"], "gradient_checkpointing has no effect"),
        (CPU, ["precision=bf16"], "emulates bf16"),
        (CPU, ["precision=fp16"], "emulate fp16"),
        (A100, ["precision=bf16", "quantization=int8", "peft=lora"], "fp16"),
    ],
)
def test_a_setting_without_effect_is_a_warning(device, settings, said):
    warnings = plan(device, *settings).warnings
    assert len(warnings) == 1
    assert said in warnings[0]


def test_lora_settings_without_lora_are_a_warning():
    assert "lora.* settings have no effect" in resolve(with_settings(Recipe(), ["lora.r=8"]), CPU).warnings[0]


def test_two_tricks_that_disagree_are_both_named():
    first = replace(Plan(CPU), _trick="one_trick").with_("model", dtype="float16")
    other = replace(first, _trick="another_trick")
    assert other.with_("model", dtype="float16") == replace(
        first, _trick="another_trick", _set_by=other.with_("model", dtype="float16")._set_by
    )
    with pytest.raises(BadInput, match="one_trick and another_trick cannot be combined: model.dtype"):
        other.with_("model", dtype="bfloat16")
