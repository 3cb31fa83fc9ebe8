"""A run goes on from a trained adapter: same numbers at its start, its settings, and what is refused."""

import json
import re
import shutil

import pytest
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import api

TINY = "random:tiny"
SMALL = ("lora.r=3", "lora.alpha=6", "lora.target_modules=q_proj,v_proj", "tricks.quantization=none")
FAST = ("train.max_steps=2", "train.learning_rate=0.01", "tricks.precision=fp32", "train.eval_steps=0")


def train(run_cria, out, *settings):
    words = [part for one in settings for part in ("--set", one)]
    code, _, said = run_cria("train", "smoke", *words, "--out", out)
    return code, re.sub(r"\s+", " ", said)


def numbers(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run on the tiny shape; its adapter has a rank and targets of its own."""
    out = tmp_path_factory.mktemp("first") / "run"
    api.train("smoke", out, settings=[f"model={TINY}", *SMALL, *FAST])
    return out


def report(run):
    return json.loads((run / "report.json").read_text())


def test_it_begins_where_the_adapter_ended_and_says_so(first, run_cria, tmp_path):
    adapter = first / "adapter"
    code, said = train(run_cria, tmp_path / "run", f"model={adapter}", "tricks.quantization=none", *FAST, "lr=1e-9")
    assert code == 0, said
    assert f"going on from {adapter}" in said
    before, after = report(first), report(tmp_path / "run")
    assert after["eval_loss_before"] == pytest.approx(before["eval_loss_after"], rel=1e-6)
    assert before["eval_loss_after"] < before["eval_loss_before"] - 1e-3, "else this test would show nothing"
    assert after["recipe"]["model"] == TINY
    old, new = numbers(adapter), numbers(tmp_path / "run" / "adapter")
    assert {name: tensor.shape for name, tensor in old.items()} == {name: tensor.shape for name, tensor in new.items()}
    assert all((old[name] - new[name]).abs().max() < 1e-7 for name in old), "two steps of 1e-9"
    made = json.loads((tmp_path / "run" / "adapter" / "provenance.json").read_text())
    assert made["continues"]["folder"] == str(adapter)
    (digest,) = made["continues"]["weights"].values()
    assert digest in (tmp_path / "run" / "adapter" / "README.md").read_text()


def test_other_rows_and_another_rate_train_it_further_and_a_resume_is_the_same(first, run_cria, tmp_path):
    settings = (f"model={first / 'adapter'}", "tricks.quantization=none", *FAST, "train.save_steps=1")
    assert train(run_cria, tmp_path / "whole", *settings)[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("adapter", "report.json", "report.md", "report.png", "checkpoints/checkpoint-2"):
        path = tmp_path / "cut" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    words = [part for one in settings for part in ("--set", one)]
    code, _, said = run_cria("train", "smoke", *words, "--resume", "--out", tmp_path / "cut")
    assert code == 0, said
    whole, cut = numbers(tmp_path / "whole" / "adapter"), numbers(tmp_path / "cut" / "adapter")
    assert all((whole[name] == cut[name]).all() for name in whole)
    assert any((whole[name] != number).any() for name, number in numbers(first / "adapter").items())
    made = [json.loads((tmp_path / run / "adapter" / "provenance.json").read_text()) for run in ("whole", "cut")]
    assert made[0]["continues"] == made[1]["continues"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("lora.r=5", "has r=3, and this run 5; set lora.r=3"),
        ("lora.alpha=7", "has alpha=6.0, and this run 7.0; set lora.alpha=6.0"),
        ("lora.rslora=true", "has rslora=False, and this run True; set lora.rslora=false"),
        ("lora.target_modules=q_proj", "v_proj.lora_A.weight has the shape .* and in this run none"),
        ("lora.init=loftq", "says where B A starts; set lora.init=default"),
        ("tricks.peft=none", "is for LoRA; set tricks.peft=lora"),
        ("lora.continue_from=gone/adapter", "gone/adapter: there is no such folder"),
        ("model=smollm2", "is not the one that it was trained over"),
    ],
)
def test_what_contradicts_the_adapter_is_refused(setting, says, first, run_cria, tmp_path):
    settings = (f"model={first / 'adapter'}", "tricks.quantization=none", "tricks.chunked_loss=false", *FAST, setting)
    code, said = train(run_cria, tmp_path / "run", *settings)
    assert code == 2, said
    assert re.search(says, said), said
    assert not (tmp_path / "run").exists()


def test_another_rounding_of_the_base_is_a_warning(first, run_cria, tmp_path):
    code, said = train(run_cria, tmp_path / "run", f"model={first / 'adapter'}", "tricks.quantization=nf4", *FAST)
    assert code == 0, said
    assert "was trained over a base in none, and this run's is in nf4" in said


def adapter_of_peft(folder, config, **changes):
    base = models.find(TINY)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base.path), config).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": TINY} | changes))
    return folder


def test_plain_pefts_adapter_is_gone_on_from(run_cria, tmp_path):
    adapter = adapter_of_peft(tmp_path / "a", LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    code, said = train(run_cria, tmp_path / "run", f"model={adapter}", "tricks.quantization=none", *FAST)
    assert code == 0, said
    lora = report(tmp_path / "run")["recipe"]["lora"]
    assert (lora["r"], lora["alpha"], lora["target_modules"]) == (4, 8, ["q_proj"])


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), {}, "modules_to_save=.*cria merge"),
        (LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"0.self": 2}), {}, "rank_pattern=.*cria merge"),
        (LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[0]), {}, "layers_to_transform=.*cria merge"),
        (LoraConfig(r=4, target_modules=["q_proj"]), {"base_model_name_or_path": None}, "names no base"),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), {}, "of kind PROMPT_TUNING.* set model=rand"),
    ],
)
def test_an_adapter_that_no_run_here_could_train_is_refused(config, changes, says, run_cria, tmp_path):
    adapter = adapter_of_peft(tmp_path / "a", config, **changes)
    code, said = train(run_cria, tmp_path / "run", f"model={adapter}", "tricks.quantization=none", *FAST)
    assert code == 2, said
    assert re.search(says, said), said
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_none_are_refused(first, run_cria, tmp_path):
    shutil.copytree(first / "adapter", tmp_path / "a")
    for ours in ("manifest.json", "provenance.json", "recipe.toml"):
        (tmp_path / "a" / ours).unlink()
    found = numbers(tmp_path / "a")
    next(iter(found.values()))[0, 0] = float("nan")
    save_file(found, tmp_path / "a" / "adapter_model.safetensors", {"format": "pt"})
    code, said = train(run_cria, tmp_path / "run", f"model={tmp_path / 'a'}", "tricks.quantization=none", *FAST)
    assert code == 2, said
    assert "holds NaN or infinity" in said


def test_a_setting_of_the_user_is_not_overwritten(first):
    found = with_settings(Recipe(), ["lora.r=8", f"model={first / 'adapter'}"])
    assert (found.lora.r, found.lora.alpha, found.model) == (8, 6, TINY)


def test_a_broken_config_is_one_line(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read or names no base"):
        with_settings(Recipe(), [f"model={tmp_path}"])
