"""Toggles as data: what each writes into the plan, what it refuses, and what it warns of. No GPU needed."""

import contextlib
import inspect
import json
from dataclasses import replace

import pytest

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve, still_off
from cria_tricks.step_plan import Plan, diff, function_at
from cria_tricks.switches import NEEDS, TECHNIQUES, technique_name
from cria_tricks.switches import lora as lora_switch
from cria_tricks.techniques import (
    CARD,
    INFERENCE,
    adamw_8bit,
    chunked_loss,
    code_of,
    compile,
    flash_attention,
    int8,
    lora,
    mixed_precision,
    nf4,
    paged_optimizer,
)
from cria_tricks.techniques import card as card_of

A100 = Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=40 * 2**30)
ADD_LORA, ADD_HEAD, ADD_PROMPT, ADD_SIDE, USUAL_CASTS = (
    f"load.adapters.{name}"
    for name in ("add_lora", "add_trained_head", "add_prompt", "add_side_network", "prepare_for_kbit_training")
)
UNCAST = "techniques.lean_preparation.leave_inputs_uncast"
NO_CACHE = "techniques.mixed_precision.cast_without_cache"
CHECKPOINT = "techniques.gradient_checkpointing.checkpoint_blocks"
COMPILE = "techniques.compile.compile_blocks"
KEEP = "techniques.keep_attention.contexts"
OFFLOADED, OVERLAPPED = "load.overlapped_offload.offloaded", "load.overlapped_offload.overlapped"
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
    capstone = resolve(recipes.capstone(T4), T4)
    assert capstone.model == {"dtype": "float16", "attn_implementation": "sdpa_expanded"}
    assert capstone.quantization == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float16",
    }
    assert capstone.training["fp16"] is True
    assert capstone.checkpointing == {"blocks": "all"}
    assert capstone.optimizer == {"bits": 8, "paged": True}
    assert capstone.after_load == (
        ADD_LORA,
        UNCAST,
        CHECKPOINT,
    )
    assert capstone.warnings == ()
    json.dumps(capstone.to_dict())


def test_the_capstone_repeats_keys_only_where_a_card_needs_it():
    newer = Device("cuda", "Ampere", (8, 0), real_bf16=True, memory_bytes=T4.memory_bytes)
    tricks = {device: recipes.kwanzaa(device).tricks for device in (T4, newer)}
    assert (tricks[T4].expand_kv, tricks[newer].expand_kv) == (True, False)
    assert tricks[T4].lean_preparation
    assert tricks[newer].lean_preparation
    assert resolve(recipes.kwanzaa(newer), newer).warnings == ()


OFF = {
    "model": {"dtype": "float32", "attn_implementation": "eager"},
    "quantization": {}, "peft": {}, "collator": {}, "checkpointing": {}, "streaming": {},
    "training": {"gradient_accumulation_steps": 1},
    "optimizer": {"bits": 32, "paged": False}, "loss": {"kind": "full"}, "parallel": {"strategy": "none", "data": 1},
    "after_load": (), "step_context": (), "warnings": (),
}  # fmt: skip
LORA = {
    "kind": "lora", "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
ADAPTER = {"peft": LORA, "after_load": (ADD_LORA,)}
SLOW_BF16 = "precision=bf16: this CPU emulates bf16, so it saves memory but is slower than fp32"
SLOW_FP16 = "precision=fp16: this CPU emulates fp16, so it saves memory but is far slower than fp32"


def card(major: int, minor: int) -> Device:
    """A card of another compute capability, that has bf16 from 8.0 on."""
    return Device("cuda", "a card", (major, minor), real_bf16=major >= 8, memory_bytes=2**34)


def model(dtype: str = "float32", attention: str = "eager") -> dict:
    return {"model": {"dtype": dtype, "attn_implementation": attention}}


def four_bits(kind: str = "nf4", double: bool = False, dtype: str = "float32") -> dict:
    return {
        "quantization": {
            "load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double,
            "bnb_4bit_compute_dtype": dtype,
        },
        "peft": LORA, "after_load": (USUAL_CASTS, ADD_LORA),
    }  # fmt: skip


def training(**more) -> dict:
    return {"training": {"gradient_accumulation_steps": 1, **more}}


def whole_matrices(**precision: bool) -> dict:
    """All weights train in 16 bits: autocast's cache is off."""
    return training(**precision) | {"after_load": (NO_CACHE,)}


PLANS = [
    (CPU, "", {}),
    (T4, "gradient_accumulation=8", {"training": {"gradient_accumulation_steps": 8}}),
    (T4, "precision=fp16", whole_matrices(fp16=True)),
    (T4, "precision=fp16 peft=lora", training(fp16=True) | model("float16") | ADAPTER),
    (A100, "precision=bf16 peft=head", training(bf16=True) | model("bfloat16")
     | {"peft": {"kind": "head"}, "after_load": (ADD_HEAD,)}),
    (CPU, "precision=bf16", whole_matrices(bf16=True) | {"warnings": (SLOW_BF16,)}),
    (replace(CPU, real_bf16=True), "precision=bf16", whole_matrices(bf16=True)),
    (CPU, "precision=fp16", whole_matrices(fp16=True) | {"warnings": (SLOW_FP16,)}),
    (T4, "quantization=int8 peft=lora", ADAPTER | {"quantization": {"load_in_8bit": True},
     "after_load": (USUAL_CASTS, ADD_LORA)}),
    (A100, "quantization=int8 peft=lora precision=bf16", training(bf16=True) | model("bfloat16") | ADAPTER
     | {"quantization": {"load_in_8bit": True}, "after_load": (USUAL_CASTS, ADD_LORA),
        "warnings": ("quantization=int8 computes its outlier columns in fp16, also with precision=bf16",)}),
    (replace(CPU, real_bf16=True), "quantization=int8 peft=lora precision=bf16", training(bf16=True)
     | model("bfloat16") | ADAPTER
     | {"quantization": {"load_in_8bit": True}, "after_load": (USUAL_CASTS, ADD_LORA)}),
    (CPU, "quantization=nf4 peft=lora", four_bits()),
    (CPU, "quantization=fp4 double_quantization=true peft=lora", four_bits("fp4", True)),
    (T4, "quantization=nf4 peft=lora precision=fp16", four_bits(dtype="float16") | training(fp16=True)
     | model("float16")),
    (CPU, "double_quantization=true", {"warnings": (
        "double_quantization has no effect: it packs the scales of 4-bit weights, and quantization is none",)}),
    (CPU, "peft=prompt_tuning", {"peft": {"kind": "prompt_tuning", "num_virtual_tokens": 16},
     "after_load": (ADD_PROMPT,)}),
    (CPU, "peft=side_network", {"peft": {"kind": "side_network", "blocks": 2}, "after_load": (ADD_SIDE,)}),
    (T4, "lean_preparation=true peft=lora precision=fp16 quantization=nf4", four_bits(dtype="float16")
     | training(fp16=True) | model("float16") | {"after_load": (ADD_LORA, UNCAST)}),
    (T4, "lean_preparation=true peft=lora", ADAPTER | {"warnings": (
        "lean_preparation has no effect: it avoids fp32 copies around LoRA in 16-bit arithmetic, and precision is "
        "fp32, peft lora",)}),
    (T4, "lean_preparation=true precision=fp16", whole_matrices(fp16=True) | {"warnings": (
        "lean_preparation has no effect: it avoids fp32 copies around LoRA in 16-bit arithmetic, and precision is "
        "fp16, peft none",)}),
    (CPU, "attention=sdpa", model(attention="sdpa")),
    (card(8, 0), "attention=flash_attention_2 precision=bf16", whole_matrices(bf16=True)
     | model(attention="flash_attention_2")),
    (card(7, 9), "attention=sdpa expand_kv=true precision=fp16", whole_matrices(fp16=True)
     | model(attention="sdpa_expanded")),
    (card(8, 0), "attention=sdpa expand_kv=true precision=fp16", whole_matrices(fp16=True)
     | model(attention="sdpa_expanded")
     | {"warnings": ("expand_kv gains nothing on a card: its flash kernel takes grouped heads as they are",)}),
    (card(8, 0), "attention=sdpa expand_kv=true", model(attention="sdpa_expanded")),
    (CPU, "attention=sdpa expand_kv=true", model(attention="sdpa_expanded") | {"warnings": (
        "expand_kv gains nothing without CUDA: the CPU's flash kernel takes grouped heads as they are",)}),
    (T4, "expand_kv=true", {"warnings": ("expand_kv has no effect: attention=eager needs no equal heads from outside; "
     "it acts on tricks.attention=sdpa",)}),
    (T4, "gradient_checkpointing=true", {"checkpointing": {"blocks": "all"}, "after_load": (CHECKPOINT,)}),
    (T4, "gradient_checkpointing=1", {"checkpointing": {"blocks": 1}, "after_load": (CHECKPOINT,)}),
    (T4, "gradient_checkpointing=0", {}),
    (CPU, "gradient_checkpointing=true attention=sdpa keep_attention=true", model(attention="sdpa") | {
     "checkpointing": {"blocks": "all", "keep_attention": KEEP, "masked": False},
     "after_load": (CHECKPOINT,)}),
    (CPU, "peft=head gradient_checkpointing=true keep_attention=true", {"peft": {"kind": "head"},
     "after_load": (ADD_HEAD,), "warnings": (
        "gradient_checkpointing has no effect: with peft=head no block below the head keeps activations",)}),
    (T4, "gradient_checkpointing=true peft=head", {"peft": {"kind": "head"}, "after_load": (ADD_HEAD,),
     "warnings": (
        "gradient_checkpointing has no effect: with peft=head no block below the head keeps activations",)}),
    (T4, "activation_offload=true", {"step_context": (OFFLOADED,)}),
    (CPU, "activation_offload=true", {"step_context": (OFFLOADED,), "warnings": (
        "activation_offload gains nothing without CUDA, and costs a copy: activations are in host memory already",)}),
    (T4, "gradient_checkpointing=true activation_offload=overlapped", {
     "step_context": (OVERLAPPED,), "checkpointing": {"blocks": "all"},
     "after_load": (CHECKPOINT,)}),
    (T4, "peft=head activation_offload=overlapped", {"peft": {"kind": "head"}, "after_load": (ADD_HEAD,),
     "warnings": ("activation_offload has no effect: with peft=head no block below the head keeps activations",)}),
    (card(7, 0), "compile=true", {"after_load": (COMPILE,)}),
    (card(7, 0), "compile=true peft=lora", ADAPTER | {"after_load": (ADD_LORA, COMPILE)}),
    (CPU, "packing=true", {"collator": {"packed_length": 2048}}),
    (CPU, "packing=true attention=sdpa", model(attention="sdpa_by_document") | {"collator": {"packed_length": 2048}}),
    (T4, "chunked_loss=true peft=lora", ADAPTER | {"loss": {"kind": "chunked", "tokens_per_chunk": 256}}),
    (T4, "optimizer=adamw_8bit", {"optimizer": {"bits": 8, "paged": False}}),
    (T4, "optimizer=adamw_8bit paged_optimizer=true", {"optimizer": {"bits": 8, "paged": True}}),
    (T4, "optimizer_in_backward=clip", {"optimizer": {"bits": 32, "paged": False, "in_backward": "clip"}}),
    (CPU, "paged_optimizer=true", {"warnings": (
        "paged_optimizer has no effect without CUDA: the states are in host memory already",)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "settings", "differs"), PLANS, ids=lambda value: value if value == str(value) else ""
)
def test_the_whole_plan_of_some_toggles(device, settings, differs):
    found = plan(device, *settings.split()).to_dict()
    del found["device"]
    assert found == OFF | differs


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (card(7, 9), "attention=flash_attention_2 precision=fp16",
         "tricks.attention=flash_attention_2: it needs compute "
         "capability 8.0, and a card has 7.9; use tricks.attention=sdpa"),
        (card(6, 9), "compile=true",
         "tricks.compile=true: Triton needs compute capability 7.0, and a card has 6.9; set "
         "tricks.compile=false"),
        (card(7, 9), "precision=bf16",
         "tricks.precision=bf16: a card (compute capability 7.9) has no bf16 units and only "
         "emulates it; use tricks.precision=fp16"),
        (CPU, "gradient_checkpointing=3 peft=side_network",
         "tricks.gradient_checkpointing=3: side_network has its copies beside the last blocks, which the first blocks "
         "are not; set tricks.gradient_checkpointing=true"),
        (CPU, "keep_attention=true attention=sdpa",
         "tricks.keep_attention=true: blocks keep everything without checkpointing; set "
         "tricks.gradient_checkpointing=true"),
        (CPU, "keep_attention=true gradient_checkpointing=true",
         "tricks.keep_attention=true: eager attention is many operations, not one that can be kept; set "
         "tricks.attention=sdpa"),
        (card(8, 0), "keep_attention=true gradient_checkpointing=true attention=flash_attention_2 precision=bf16",
         "tricks.keep_attention=true: it keeps what torch's own kernels return; set tricks.attention=sdpa, the same "
         "algorithm"),
        (T4, "keep_attention=true gradient_checkpointing=true attention=sdpa compile=true",
         "tricks.keep_attention=true: a compiled block chooses itself what it keeps; set tricks.compile=false"),
        (CPU, "packing=true peft=prompt_tuning",
         "tricks.packing=true with tricks.peft=prompt_tuning: peft drops the position ids, so "
         "the documents of a row would see each other; set tricks.packing=false"),
        (CPU, "chunked_loss=true peft=prompt_tuning",
         "tricks.chunked_loss=true with tricks.peft=prompt_tuning: it calls "
         "the model below the learnt prompt; set tricks.chunked_loss=false"),
        (CPU, "quantization=fp4",
         "tricks.quantization=fp4 with tricks.peft=none: quantised weights are frozen, so "
         "nothing would train; set tricks.peft=lora (or head)"),
        (T4, "optimizer_in_backward=true",
         "tricks.optimizer_in_backward=true with train.max_grad_norm=1: the norm of all gradients is known only when "
         "every weight has taken its step, so it cannot limit the step; set train.max_grad_norm=0 for no limit, or "
         "tricks.optimizer_in_backward=clip, which limits the gradient of each weight by itself"),
        (CPU, "optimizer_in_backward=clip gradient_accumulation=2",
         "tricks.optimizer_in_backward=clip with tricks.gradient_accumulation=2: a gradient must stay until the "
         "last micro-batch of its window, and here it is freed at once; set tricks.gradient_accumulation=1"),
    ],
)  # fmt: skip
def test_a_refusal_is_this_line(device, settings, said):
    with pytest.raises(BadInput) as caught:
        plan(device, *settings.split())
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("group", "setting"), [("lora", "lora.r=8"), ("prompt", "prompt.tokens=3"), ("side", "side.blocks=1")]
)
def test_settings_of_an_adapter_that_is_not_there_are_a_warning(group, setting):
    said = f"the {group}.* settings have no effect: tricks.peft is head"
    assert resolve(with_settings(Recipe(), [setting, "tricks.peft=head"]), CPU).warnings == (said,)


def test_the_sizes_of_an_adapter_reach_its_library():
    sets = ["lora.r=3", "lora.alpha=5", "lora.dropout=0.5", "lora.rslora=true", "lora.dora=true",
            "lora.target_modules=q_proj"]  # fmt: skip
    assert resolve(with_settings(Recipe(), ["tricks.peft=lora", *sets]), CPU).peft == {
        "kind": "lora", "r": 3, "lora_alpha": 5.0, "lora_dropout": 0.5, "use_rslora": True, "use_dora": True,
        "target_modules": ["q_proj"],
    }  # fmt: skip


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch):
    asked = []
    monkeypatch.setattr("shutil.which", lambda name: asked.append(name))
    for platform, compiler in (("linux", "g++"), ("darwin", "clang++")):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr("sys.platform", platform)
        with pytest.raises(BadInput) as caught:
            plan(CPU, "compile=true")
        assert str(caught.value) == (
            f"tricks.compile=true: no C++ compiler {compiler} here; install it, or set tricks.compile=false"
        )
    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(BadInput, match=r"no C\+\+ compiler mine here"):
        plan(CPU, "compile=true")
    assert plan(card(7, 5), "compile=true").compiled, "a card has Triton"
    assert asked == ["g++", "clang++", "mine"]
    monkeypatch.setattr("shutil.which", lambda name: name)
    found = plan(CPU, "compile=true")
    assert (found.after_load, found.compiled, plan(CPU).compiled) == ((COMPILE,), True, False)
    assert found.warnings == (
        "compile: on a CPU the bytes of compiled kernels cannot be counted, so every peak is the whole process's",
    )


def test_two_plans_differ_in_these_lines():
    before, after = plan(CPU), plan(T4, "gradient_accumulation=2", "peft=head", "activation_offload=true")
    assert diff(before, before) == ""
    assert diff(before, after).splitlines() == [
        "training.gradient_accumulation_steps: 1 -> 2",
        "after_load: () -> ('load.adapters.add_trained_head',)",
        "step_context: () -> ('load.overlapped_offload.offloaded',)",
        "peft.kind: not set -> head",
    ]
    assert diff(after, before).splitlines()[0] == "peft.kind: head -> not set"


def test_edits_are_appended_and_dropped_by_address():
    found = Plan(CPU).then("a").then("b").then("a").around("x").around("x").warn("one").warn("two")
    assert (found.after_load, found.step_context, found.warnings) == (("a", "b", "a"), ("x", "x"), ("one", "two"))
    assert found.without("a").after_load == ("b",)
    assert found.without("c") == found


@pytest.mark.parametrize("switch", [switch for module in TECHNIQUES for switch in module.TECHNIQUE.switches])
def test_each_address_in_a_plan_is_that_of_a_function_of_a_model_and_a_plan(switch):
    """With all that the switch needs, on the first of three machines that takes it."""
    needs = NEEDS.get(switch, "").replace("{half}", "fp16").split()
    recipe = with_settings(Recipe(), [n if "." in n else f"tricks.{n}" for n in ("precision=fp16", *needs, switch)])
    for device in (T4, A100, CPU):
        with contextlib.suppress(BadInput):
            found = resolve(recipe, device)
            break
    for address in (*found.after_load, *found.step_context):
        assert list(inspect.signature(function_at(address)).parameters)[:2] == ["model", "plan"], address
    if "keep_attention" in found.checkpointing:
        assert callable(function_at(found.checkpointing["keep_attention"]))


def test_a_finer_choice_replaces_only_what_it_names():
    first = replace(Plan(CPU), _technique="one").with_("model", dtype="float16", attn_implementation="sdpa")
    other = replace(first, _technique="another").refine("model", attn_implementation="sdpa_expanded")
    assert other.model == {"dtype": "float16", "attn_implementation": "sdpa_expanded"}
    with pytest.raises(
        BadInput, match="one and third cannot be combined: model.dtype would have to be both 'float16' and"
    ):
        replace(other, _technique="third").with_("model", dtype="bfloat16")
    with pytest.raises(BadInput, match="another and third cannot be combined: model.attn_implementation"):
        replace(other, _technique="third").with_("model", attn_implementation="sdpa")


def test_what_is_still_off_and_would_work():
    found = still_off(with_settings(Recipe(), ["tricks.peft=lora", "tricks.precision=fp16"]), T4)
    known = [
        "tricks.quantization=int8 or nf4 or fp4",
        "tricks.lean_preparation=true",
        "tricks.fused_lora=true",
        "tricks.fused_blocks=true or triton",
        "tricks.tiled_mlp=true",
        "tricks.attention=sdpa",
        "tricks.gradient_checkpointing=true",
        "tricks.activation_offload=true",
        "tricks.compile=true",
        "tricks.packing=true",
        "tricks.chunked_loss=true",
        "tricks.optimizer=adamw_8bit",
        "tricks.paged_optimizer=true",
        "tricks.optimizer_in_backward=clip",
    ]
    assert [one for one in found if one in known] == known, "in the order of switching on"
    no_effect = {"double_quantization", "expand_kv", "keep_attention", "stream_layers", "layer_by_layer"}
    assert not no_effect & {one.removeprefix("tricks.").partition("=")[0] for one in found}
    several = still_off(
        with_settings(Recipe(), ["tricks.peft=lora", "tricks.precision=fp16", "train.batch_size=2"]), T4
    )
    behind = found.index("tricks.chunked_loss=true") + 1
    assert several == [*found[:behind], "tricks.gradient_accumulation=8", *found[behind:]]


def test_what_takes_memory_is_no_advice():
    """Kept attention would work here, but it buys time with memory."""
    on = ["tricks.peft=lora", "tricks.attention=sdpa", "tricks.gradient_checkpointing=true"]
    assert "keep_attention" not in " ".join(still_off(with_settings(Recipe(), on), CPU))


def test_what_is_still_off_is_asked_of_as_many_processes():
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.gradient_accumulation=2", "parallel.strategy=ddp"])
    assert "tricks.attention=sdpa" in still_off(recipe, T4, 2)


def test_full_fine_tuning_in_16_bits_keeps_fp32_master_weights():
    assert plan(T4, "precision=fp16").model["dtype"] == "float32"
    assert plan(T4, "precision=fp16", "peft=lora").model["dtype"] == "float16"


def test_lean_preparation_leaves_the_upcast_out():
    lean = plan(T4, "precision=fp16", "quantization=nf4", "peft=lora", "lean_preparation=true")
    assert lean.after_load == (ADD_LORA, UNCAST)


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (CPU, ["attention=flash_attention_2"], "CUDA cards only; use tricks.attention=sdpa"),
        (A100, ["attention=flash_attention_2"], "16 bits only"),
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
    monkeypatch.setattr("cria_tricks.switches.flash_attention.this_device", lambda: A100)
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


def test_two_tricks_that_disagree_are_both_named():
    first = replace(Plan(CPU), _technique="one_trick").with_("model", dtype="float16")
    other = replace(first, _technique="another_trick")
    assert other.with_("model", dtype="float16") == replace(
        first, _technique="another_trick", _set_by=other.with_("model", dtype="float16")._set_by
    )
    with pytest.raises(BadInput, match="one_trick and another_trick cannot be combined: model.dtype"):
        other.with_("model", dtype="bfloat16")


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (flash_attention.flash_attention, {"causal": True, "tile": 128}),
        (chunked_loss.chunked_cross_entropy, {"chunk": 256}),
        (compile.fused, {"tile": 1024}),
        (int8.linear_8bit, {"threshold": 6.0}),
        (nf4.quantize, {"double_quantization": False}),
        (lora.LoraLinear, {"rslora": False, "dora": False}),
        (lora_switch.trained_weights, {"dora": False}),
        (mixed_precision.LossScale, {"scale": 65536.0, "growth_interval": 2000}),
        (adamw_8bit.quantize_blocks, {"block": 256}),
        (adamw_8bit.dequantize_blocks, {"block": 256}),
        (adamw_8bit.AdamW8bit, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        (paged_optimizer.PagedAdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}),
        (paged_optimizer.Pager, {"device": "cpu"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_left_out_has_the_papers_value_or_the_librarys(function, defaults):
    parameters = inspect.signature(function).parameters.values()
    assert {one.name: one.default for one in parameters if one.default is not one.empty} == defaults


def test_each_card_is_read_whole():
    for trick in (*TECHNIQUES, *INFERENCE):
        found = card_of(trick)
        assert tuple(found) == ("title", "Saves", "Costs", "Claim", "Needs", "Breaks", "Sources", "Ours", "Shapes")
        assert found["title"] == code_of(trick).__doc__.splitlines()[0]
        said = " ".join(code_of(trick).__doc__.partition("\n\n")[2].split()).replace("Shapes: ", "Shapes ")
        assert " ".join(f"{name} {found[name]}" for name in CARD) == said
        assert technique_name(trick) == trick.__file__.rpartition("/")[2].removesuffix(".py")
