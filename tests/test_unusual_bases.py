"""Bases that are stored in few bits already, or end at some position."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

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


def test_answers_end_where_a_table_of_positions_ends(tmp_path):
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=64, vocab_size=49152)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert pretrained.room(model, 60, 100) == 4
    with pytest.raises(BadInput, match="the prompt has 64 tokens, and the model 64 positions"):
        pretrained.room(model, 64, 1)


@pytest.mark.parametrize(("kind", "known"), [("gpt2", 1024), ("opt", 2048), ("gptj", 2048), ("biogpt", 1024)])
def test_tables_of_positions_are_found(kind, known):
    from transformers import AutoConfig

    with torch.device("meta"):
        assert pretrained.positions(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))) == known
        assert pretrained.positions(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama"))) > 10**9
