"""A run continues from a trained adapter: its numbers at the start, its settings, and what is refused."""

import json
import re
import shutil

import pytest
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import cria_tricks
from cria_tricks import models
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.load.model import load_tokenizer
from cria_tricks.recipe import Recipe, from_toml, with_settings
from cria_tricks.run import ready

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
    cria_tricks.train("smoke", out, settings=[f"model={TINY}", *SMALL, *FAST])
    return out


def report(run):
    return json.loads((run / "report.json").read_text())


def test_it_begins_where_the_adapter_ended_and_says_so(first, run_cria, tmp_path):
    adapter = first / "adapter"
    code, said = train(run_cria, tmp_path / "run", f"model={adapter}", "tricks.quantization=none", *FAST, "lr=1e-9")
    assert code == 0, said
    assert f"beginning with the adapter {adapter}" in said
    before, after = report(first), report(tmp_path / "run")
    assert after["eval_loss_before"] == pytest.approx(before["eval_loss_after"], rel=1e-6)
    assert before["eval_loss_after"] < before["eval_loss_before"] - 1e-3, "else this test would show nothing"
    assert after["recipe"]["model"] == TINY
    old, new = numbers(adapter), numbers(tmp_path / "run" / "adapter")
    assert {name: tensor.shape for name, tensor in old.items()} == {name: tensor.shape for name, tensor in new.items()}
    assert all((old[name] - new[name]).abs().max() < 1e-7 for name in old), "two steps of 1e-9"
    made = json.loads((tmp_path / "run" / "adapter" / "provenance.json").read_text())
    assert made["continued_from"]["folder"] == str(adapter)
    (digest,) = made["continued_from"]["weights"].values()
    assert digest in (tmp_path / "run" / "adapter" / "README.md").read_text()


def test_other_rows_and_another_rate_train_it_further_and_a_resume_is_the_same(first, run_cria, tmp_path):
    settings = (f"model={first / 'adapter'}", "tricks.quantization=none", *FAST, "train.save_steps=1")
    assert train(run_cria, tmp_path / "whole", *settings)[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("adapter", "report.json", "report.md", "report.png", "checkpoints/checkpoint-2"):
        path = tmp_path / "cut" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    # On another machine the adapter is not there; the run's own recipe needs it no more.
    (first / "adapter").rename(first / "away")
    try:
        code, _, said = run_cria("train", tmp_path / "cut" / "recipe.toml", "--resume", "--out", tmp_path / "cut")
    finally:
        (first / "away").rename(first / "adapter")
    assert code == 0, said
    whole, cut = numbers(tmp_path / "whole" / "adapter"), numbers(tmp_path / "cut" / "adapter")
    assert all((whole[name] == cut[name]).all() for name in whole)
    assert any((whole[name] != number).any() for name, number in numbers(first / "adapter").items())
    made = [json.loads((tmp_path / run / "adapter" / "provenance.json").read_text()) for run in ("whole", "cut")]
    assert made[0]["continued_from"] == made[1]["continued_from"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("lora.r=5", "has r=3, and the recipe 5; set lora.r=3"),
        ("lora.alpha=7", "has alpha=6.0, and the recipe 7.0; set lora.alpha=6.0"),
        ("lora.rslora=true", "has rslora=False, and the recipe True; set lora.rslora=false"),
        ("lora.target_modules=q_proj", "v_proj.lora_A.weight has the shape .* and none in this run"),
        ("lora.init=loftq", "says where B A starts; set lora.init=default"),
        ("tricks.peft=none", "it is for LoRA; set tricks.peft=lora"),
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
    assert "was trained over a base in 16 or 32 bits, and this run's is in 4-bit NF4" in said


def adapter_of_peft(folder, config, **changes):
    base = models.find(TINY)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base.path), config).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": TINY} | changes))
    return folder


def test_a_run_continues_from_plain_pefts_adapter(run_cria, tmp_path):
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
        (
            LoraConfig(r=4, target_modules=["q_proj"]),
            {"init_lora_weights": "pissa_niter_4"},
            "began as pissa.*cria merge",
        ),
        (
            LoraConfig(r=4, target_modules=["q_proj"]),
            {"base_model_name_or_path": None},
            "names no base; write its name",
        ),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), {}, "of kind PROMPT_TUNING.* set model=rand"),
    ],
)
def test_an_adapter_that_no_run_here_could_train_is_refused(config, changes, says, run_cria, tmp_path):
    adapter = adapter_of_peft(tmp_path / "a", config, **changes)
    code, said = train(run_cria, tmp_path / "run", f"model={adapter}", "tricks.quantization=none", *FAST)
    assert code == 2, said
    assert re.search(says, said), said
    assert not (tmp_path / "run").exists()


def test_nan_in_the_adapter_is_refused(first, run_cria, tmp_path):
    shutil.copytree(first / "adapter", tmp_path / "a")
    for ours in ("manifest.json", "provenance.json", "recipe.toml"):
        (tmp_path / "a" / ours).unlink()
    found = numbers(tmp_path / "a")
    next(iter(found.values()))[0, 0] = float("nan")
    save_file(found, tmp_path / "a" / "adapter_model.safetensors", {"format": "pt"})
    code, said = train(run_cria, tmp_path / "run", f"model={tmp_path / 'a'}", "tricks.quantization=none", *FAST)
    assert code == 2, said
    assert "holds NaN or infinity" in said


@pytest.mark.parametrize("settings", [["lora.r=16", "model=ADAPTER"], ["model=ADAPTER", "lora.r=16"]])
def test_a_setting_of_the_user_stays_in_any_order_and_although_it_is_the_default(settings, first):
    found = with_settings(Recipe(), [one.replace("ADAPTER", str(first / "adapter")) for one in settings])
    assert (found.lora.r, found.lora.alpha, found.model) == (16, 6, TINY)


def test_a_recipe_file_may_name_an_adapter_and_what_it_sets_stays(first, tmp_path):
    (tmp_path / "a.toml").write_text(f'model = "{first / "adapter"}"\n[lora]\nr = 16\n')
    found = from_toml(tmp_path / "a.toml")
    assert (found.lora.r, found.lora.alpha, found.lora.continue_from) == (16, 6, str(first / "adapter"))
    assert found.lora.target_modules == ("q_proj", "v_proj")


def test_what_an_old_config_leaves_out_is_pefts_default(first, tmp_path):
    config = {"base_model_name_or_path": TINY, "peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    lora = with_settings(Recipe(), [f"model={tmp_path}"]).lora
    assert (lora.r, lora.alpha, lora.rslora) == (4, LoraConfig().lora_alpha, LoraConfig().use_rslora)


def test_the_end_token_of_its_answers_is_taken_over(first, tmp_path):
    shutil.copytree(first / "adapter", tmp_path / "a")
    recipe = (tmp_path / "a" / "recipe.toml").read_text().replace('eos = ""', 'eos = "<|endoftext|>"')
    (tmp_path / "a" / "recipe.toml").write_text(recipe)
    assert with_settings(Recipe(), [f"model={tmp_path / 'a'}"]).data.eos == "<|endoftext|>"


@pytest.mark.parametrize("settings", [("lora.dora=true", "lora.rslora=true"), ("tricks.fused_lora=true",)])
def test_other_kinds_of_lora_continue_too(settings, run_cria, tmp_path):
    code, said = train(run_cria, tmp_path / "one", f"model={TINY}", *SMALL, *FAST, *settings)
    assert code == 0, said
    more = [one for one in settings if "fused" in one]
    asked = (f"model={tmp_path / 'one' / 'adapter'}", "tricks.quantization=none", *FAST, *more)
    code, said = train(run_cria, tmp_path / "two", *asked)
    assert code == 0, said
    assert report(tmp_path / "two")["eval_loss_before"] == pytest.approx(
        report(tmp_path / "one")["eval_loss_after"], rel=1e-5
    )


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_every_process_begins_with_it(strategy, first, run_cria, tmp_path):
    settings = (f"model={first / 'adapter'}", "tricks.quantization=none", *FAST, f"parallel.strategy={strategy}")
    words = [part for one in settings for part in ("--set", one)]
    code, *said = run_cria("launch", "smoke", "--on", "torchrun", "--nproc", 2, *words, "--out", tmp_path / "run")
    assert code == 0, said
    assert report(tmp_path / "run")["eval_loss_before"] == pytest.approx(report(first)["eval_loss_after"], rel=1e-6)


def test_an_adapter_of_gpt2_continues_though_its_matrices_lie_the_other_way(run_cria, tmp_path):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=1024, vocab_size=49152)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "base")
    more = ("tricks.attention=eager", "tricks.chunked_loss=false", "tricks.quantization=none", *FAST)
    asked = (f"model={tmp_path / 'base'}", "lora.target_modules=c_attn", "lora.r=2", *more)
    code, said = train(run_cria, tmp_path / "one", *asked)
    assert code == 0, said
    code, said = train(run_cria, tmp_path / "two", f"model={tmp_path / 'one' / 'adapter'}", *more)
    assert code == 0, said
    assert report(tmp_path / "two")["eval_loss_before"] == pytest.approx(
        report(tmp_path / "one")["eval_loss_after"], rel=1e-5
    )


@pytest.mark.parametrize(("model", "commit"), [("ADAPTER", "abc"), ("owner/other", "")])
def test_only_its_own_base_is_fetched_at_the_commit_of_then(model, commit, first, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(first / "adapter", folder)
    for name, group, field, value in (
        ("adapter_config.json", None, "base_model_name_or_path", "owner/name"),
        ("provenance.json", "base", "revision", "abc"),
    ):
        found = json.loads((folder / name).read_text())
        (found[group] if group else found)[field] = value
        (folder / name).write_text(json.dumps(found))
    (folder / "manifest.json").unlink()
    atomic_files.write_manifest(folder)
    asked = [f"model={folder}", f"model={model.replace('ADAPTER', str(folder))}"]
    assert ready.revision_of_start(with_settings(Recipe(), asked)) == commit


def test_a_broken_config_is_one_line(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(BadInput, match="adapter_config.json cannot be read; copy"):
        with_settings(Recipe(), [f"model={tmp_path}"])
