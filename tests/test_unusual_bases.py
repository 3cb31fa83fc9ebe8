"""Bases that are stored in few bits already, pad beyond their vocabulary, or end at some position."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.load.model import load_tokenizer
from cria_tricks.models import pretrained

TINY = "random:tiny"
STORED = {
    "nf4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        ("tricks.quantization=nf4", "tricks.double_quantization=false"),
    ),
    "nf4 twice": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        ("tricks.quantization=nf4", "tricks.double_quantization=true"),
    ),
    "int8": ({"load_in_8bit": True}, ("tricks.quantization=int8",)),
}


def sets(*settings):
    return [part for one in settings for part in ("--set", one)]


@pytest.mark.parametrize("settings", [("tricks.quantization=none",), ("tricks.quantization=nf4",)], ids=" ".join)
def test_a_base_with_nan_ends_in_one_line_and_nothing_is_lost(settings, run_cria, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(models.find(TINY).path, base)
    load_tokenizer(models.find(TINY)).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    out = tmp_path / "run"
    asked = ("train", "smoke", *sets(f"model={base}", "train.max_steps=1", "tricks.peft=lora", *settings))
    code, _, said = run_cria(*asked, "--out", out)
    assert (code, said.count("error: ")) == (2, 1)
    assert f"model {base}: {name} in model.safetensors holds NaN or infinity" in said
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert not [*out.rglob("checkpoint-*"), *out.rglob("adapter*"), *out.rglob("report*")]
    code, _, said = run_cria("chat", base, "--prompt", "a", "--max-new-tokens", 1)
    assert code == 1
    assert said.splitlines()[-1].startswith("error: the model's logits are NaN: its weights hold NaN or infinity")


@pytest.mark.parametrize("name", STORED)
def test_a_base_of_few_bits_is_trained_as_it_is_and_all_works_over_it(name, run_cria, tmp_path):
    config, settings = STORED[name]
    packed = BitsAndBytesConfig(**config)
    model = AutoModelForCausalLM.from_pretrained(
        models.find(TINY).path, quantization_config=packed, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "base")
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "base")
    asked = ("train", "smoke", *sets(f"model={tmp_path / 'base'}", "train.max_steps=1", "tricks.peft=lora"))
    for other in ("none", "int8" if name != "int8" else "nf4"):
        code, _, said = run_cria(*asked, *sets(f"tricks.quantization={other}"), "--out", tmp_path / "other")
        assert code == 2
        assert f"already, and in no other way; set {' and '.join(settings)}" in re.sub(r"\s+", " ", said)
        assert not (tmp_path / "other").exists()
    code, *said = run_cria(*asked, *sets(*settings), "--out", tmp_path / "run")
    assert code == 0, said
    adapter = tmp_path / "run" / "adapter"
    for command in (
        ("chat", adapter, "--prompt", "a", "--max-new-tokens", 1),
        ("chat", adapter, "--packed", "--prompt", "a", "--max-new-tokens", 1),
        ("merge", adapter),
        ("chat", tmp_path / "run" / "merged", "--prompt", "a", "--max-new-tokens", 1),
    ):
        code, *said = run_cria(*command)
        assert (code, "warning: transformers" in " ".join(said)) == (0, False), said


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen2_5_vl", "idefics3"])
def test_a_model_of_more_than_text_is_refused_by_name_in_plan_and_training(kind, run_cria, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": kind, "text_config": {}}))
    (tmp_path / "base" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "base")
    for command in (
        ("plan", "smoke", "--gpu", "t4", *sets(f"model={tmp_path / 'base'}")),
        ("train", "smoke", *sets(f"model={tmp_path / 'base'}"), "--out", tmp_path / "run"),
    ):
        code, _, said = run_cria(*command)
        assert (code, f"{kind} takes more than text" in re.sub(r"\s+", " ", said)) == (2, True), said
    assert not (tmp_path / "run").exists()


def test_the_overflow_of_fp16_names_its_limit_and_the_cure(tmp_path, run_cria):
    model = AutoModelForCausalLM.from_pretrained(models.find(TINY).path)
    model.get_input_embeddings().weight.data *= 1e5
    model.save_pretrained(tmp_path / "base")
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "base")
    asked = ("train", "smoke", *sets(f"model={tmp_path / 'base'}", "train.max_steps=1", "tricks.quantization=none"))
    code, _, said = run_cria(*asked, *sets("tricks.precision=fp16"), "--out", tmp_path / "run")
    assert code == 1, said
    assert re.search("No weight has moved yet. fp16 ends at 65,504: try tricks.precision=(bf16 or )?fp32", said), said
    assert run_cria(*asked, *sets("tricks.precision=fp32"), "--out", tmp_path / "cured")[0] == 0


def test_padding_beyond_the_vocabulary_is_refused(run_cria, tmp_path):
    AutoModelForCausalLM.from_pretrained(models.find(TINY).path).save_pretrained(tmp_path / "base")
    tokenizer = load_tokenizer(models.find(TINY))
    tokenizer.add_special_tokens({"pad_token": "<pad beyond>"})
    tokenizer.save_pretrained(tmp_path / "base")
    said = run_cria("train", "smoke", *sets(f"model={tmp_path / 'base'}"), "--out", tmp_path / "run")
    assert said[0] == 2, said
    assert "its tokenizer pads with token 49152, and its vocabulary has 49152" in re.sub(r"\s+", " ", said[2])
    assert not (tmp_path / "run").exists()


def test_rows_beyond_a_table_of_positions_are_refused_and_answers_end_there(run_cria, tmp_path):
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=64, vocab_size=49152)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "base")
    settings = sets(f"model={tmp_path / 'base'}", "lora.target_modules=all-linear", "tricks.attention=eager")
    said = run_cria("train", "smoke", *settings, "--out", tmp_path / "run")
    assert said[0] == 2, said
    assert re.search(
        r"has 64 positions for rows, and they may have \d+ tokens; set data.max_length=64", re.sub(r"\s+", " ", said[2])
    )
    assert not (tmp_path / "run").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert pretrained.room(model, 60, 100) == 4
    with pytest.raises(BadInput, match="the prompt has 64 tokens, and the model 64 positions"):
        pretrained.room(model, 64, 1)
    assert AutoTokenizer.from_pretrained(tmp_path / "base").chat_template


@pytest.mark.parametrize(("kind", "known"), [("gpt2", 1024), ("opt", 2048), ("gptj", 2048), ("biogpt", 1024)])
def test_tables_of_positions_are_found(kind, known):
    from transformers import AutoConfig

    with torch.device("meta"):
        assert pretrained.positions(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))) == known
        assert pretrained.positions(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama"))) > 10**9
