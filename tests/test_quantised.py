"""Models whose weights are quantised already: refused by name, or planned as they are stored."""

import json

import pytest

from cria_tricks import models, recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = NF4 | {"bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"]}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
OTHERS = {
    "Qwen3-8B-FP8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "Qwen3-8B-GPTQ-Int4": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    "Qwen3-8B-AWQ": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "Qwen3-8B-quantized.w4a16": {"quantization_config": {"quant_method": "compressed-tensors"}},
    "Qwen3-8B-w8a8": {"compression_config": {"quant_method": "compressed-tensors"}},
    "Qwen3-8B-MXFP4": {"quantization_config": {"quant_method": "mxfp4"}},
    "Qwen3-8B-NVFP4": {"quantization_config": {"quant_algo": "NVFP4"}},
    "Qwen3-8B-hqq-4bit": {"quantization_config": {"quant_method": "hqq"}},
    "Qwen3-8B-4bit": {"quantization": {"group_size": 64, "bits": 4}},
}


@pytest.fixture
def folder(tmp_path):
    """A function that makes a model's folder with these fields in its config."""

    def make(name: str, **fields) -> str:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIGS["qwen3-8b"] | fields))
        return str(path)

    return make


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_are_refused_in_one_line(run_cria, folder, name):
    path = folder(name, **OTHERS[name])
    for command in (("plan", "kwanzaa", "--gpu", "t4", "--model", path), ("train", "smoke", "--set", f"model={path}")):
        code, stdout, stderr = run_cria(*command)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1)
        assert f"model {path}: its weights are quantised already (" in stderr
        assert "take the model that it was made from, and set tricks.quantization=nf4" in stderr


def test_plain_models_are_not_refused(folder):
    for number, nothing in enumerate(({}, {"quantization_config": None}, {"quantization_config": {}})):
        path = folder(f"plain{number}", **nothing)
        models.refuse_out_of_reach(path)
        assert find_shape(path).stored_by == ()


@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        (NF4, ["tricks.quantization=nf4", "tricks.double_quantization=false"]),
        (DOUBLE, ["tricks.quantization=nf4", "tricks.double_quantization=true"]),
        (INT8, ["tricks.quantization=int8"]),
    ],
)
def test_weights_of_bitsandbytes_are_planned_as_they_are_stored_and_not_otherwise(folder, stored, settings):
    path = folder("stored", quantization_config=stored)
    models.refuse_out_of_reach(path)
    device = find_gpu("rtx3090").device
    recipe = with_settings(recipes.get("kwanzaa", device), [f"model={path}", "tricks.double_quantization=false"])
    bills = []
    for shape in (find_shape(path), find_shape("qwen3-8b")):
        bills.append(plan_data.bill(Target(shape, device), with_settings(recipe, settings)).lines)
    assert bills[0] == bills[1], "the bytes of the plain model with the same setting"
    with pytest.raises(BadInput) as caught:
        plan_data.bill(Target(find_shape(path), device), with_settings(recipe, ["tricks.quantization=none"]))
    assert str(caught.value).endswith("plan it with " + " ".join(f"--set {setting}" for setting in settings))


def test_what_the_refusal_says_works(run_cria, folder):
    path = folder("stored", quantization_config=INT8)
    code, _, stderr = run_cria("plan", "kwanzaa", "--gpu", "h100", "--model", path, "--rows-full")
    assert code == 2
    options = stderr.strip().partition("plan it with ")[2].split()
    assert options == ["--set", "tricks.quantization=int8"]
    assert run_cria("plan", "kwanzaa", "--gpu", "h100", "--model", path, "--rows-full", *options)[0] in (0, 3)


def test_a_model_that_is_quantised_in_part_is_refused(folder):
    in_part = DOUBLE | {"llm_int8_skip_modules": ["lm_head", "model.layers.3.mlp"]}
    path = folder("Qwen3-8B-unsloth-bnb-4bit", quantization_config=in_part)
    with pytest.raises(BadInput, match=r"\(model.layers.3.mlp is not\).*take the model that it was made from"):
        find_shape(path)
