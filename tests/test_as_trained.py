"""An adapter is used over the base that it learnt beside: rounded, if that was rounded."""

import functools
import json
from pathlib import Path

import pytest
import torch

from cria_tricks import models, recipes
from cria_tricks.adapter.merge import CPU, merge
from cria_tricks.adapter.opening import open_folder, quantization_of
from cria_tricks.common.errors import BadInput
from cria_tricks.data.lengths import full
from cria_tricks.data.rows import read_file
from cria_tricks.hardware import T4, Device
from cria_tricks.kwanzaa.generate import reference_loss
from cria_tricks.load import answering_memory
from cria_tricks.load.answering import answer_batch
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, from_toml, with_settings
from cria_tricks.run.train import train
from cria_tricks.settings import Tricks

ROWS = Path(__file__).parents[1] / "cria_tricks" / "data" / "nguzo_saba_eval.jsonl"
NF4 = ("tricks.quantization=nf4", "tricks.peft=lora")
KINDS = {
    "nf4": NF4,
    "loftq": (*NF4, "lora.init=loftq"),
    "double": (*NF4, "tricks.double_quantization=true"),
    "fp4": ("tricks.quantization=fp4", "tricks.peft=lora"),
    "side": ("tricks.quantization=nf4", "tricks.peft=side_network"),
}

PACKED = {**KINDS, "int8": ("tricks.quantization=int8", "tricks.peft=lora")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An adapter of a kind, and the report of its training; it is trained once."""
    return functools.cache(lambda kind: _trained(tmp_path_factory.mktemp(kind), *PACKED[kind]))


def _trained(tmp_path, *more: str) -> tuple[Path, dict]:
    """An adapter that has moved far, and the report of its training; no row is cut."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:2]))
    settings = [
        "model=random:tiny", "train.max_steps=3", "train.learning_rate=0.01", "train.warmup_ratio=0", "lora.r=4",
        f"data.train={few}", f"data.eval={few}", *more,
    ]  # fmt: skip
    report = train(with_settings(Recipe(name="rounded"), settings), tmp_path / "run")
    return tmp_path / "run" / "adapter", report


def loss_of(model, tokenizer, folder: Path) -> float:
    """Over the rows that the adapter in this folder was trained on."""
    losses = [reference_loss(model, tokenizer, chat) for chat in read_file(folder.parents[1] / "few.jsonl")]
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)


@pytest.mark.parametrize("kind", KINDS)
def test_its_loss_is_the_one_that_training_ended_with(kind, trained, monkeypatch):
    folder, report = trained(kind)
    model, tokenizer = open_folder(folder, CPU, torch.float32)
    assert loss_of(model, tokenizer, folder) == pytest.approx(report["eval_loss_after"], abs=2e-4)
    monkeypatch.setattr("cria_tricks.adapter.opening.quantization_of", lambda folder: Tricks())
    other, _ = open_folder(folder, CPU, torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        apart = (model(ids).logits - other(ids).logits).abs().max()
    assert apart > 1e-2, "over the published matrices it is another model"
    half, _ = open_folder(folder, CPU, torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    frequencies = [{n: b for n, b in m.named_buffers() if "inv_freq" in n} for m in (half, model)]
    assert frequencies[1]
    for name, kept in frequencies[0].items():
        assert torch.equal(kept, frequencies[1][name]), f"{name}: other angles for distant tokens"


@pytest.mark.parametrize("kind", PACKED)
def test_over_a_packed_base_it_answers_as_in_training(kind, trained, monkeypatch):
    # On a processor with AVX512-BF16, bitsandbytes would repack each 4-bit weight at its first pass in eval mode.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    folder, report = trained(kind)
    packed, tokenizer = open_folder(folder, CPU, torch.float32, packed=True)
    unpacked, _ = open_folder(folder, CPU, torch.float32)
    codes = [(weight, weight.detach().clone()) for weight in packed.parameters() if not weight.is_floating_point()]
    assert codes, "its base is packed"
    assert loss_of(packed, tokenizer, folder) == pytest.approx(report["eval_loss_after"], abs=2e-4)
    assert all(torch.equal(weight, before) for weight, before in codes), "and stays as it was"
    assert sum(weight.nbytes for weight in packed.parameters()) < sum(weight.nbytes for weight in unpacked.parameters())
    if kind == "int8":  # its products round the activations, too, so it is another model than the unpacked one
        return
    prompts = [list(range(3, 40)), list(range(50, 60))]
    ids = torch.tensor(prompts[:1])
    with torch.no_grad():
        torch.testing.assert_close(packed(ids).logits, unpacked(ids).logits, atol=1e-4, rtol=1e-4)
    for model in (packed, unpacked):
        model.config.use_cache = kind != "side"
    assert answer_batch(packed, tokenizer, prompts, 8) == answer_batch(unpacked, tokenizer, prompts, 8)


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_answers_needs_what_was_predicted(packed, trained):
    folder, _ = trained("nf4")
    model, tokenizer = open_folder(folder, CPU, torch.float32, packed=packed)
    live = LiveBytes()
    live.track_all(every_tensor(model))
    with live:
        answer_batch(model, tokenizer, [[5] * 300, [7] * 290], 100)
    recipe = from_toml(folder / "recipe.toml")
    device = Device("cpu", "a processor", (0, 0), real_bf16=False, memory_bytes=2**30)
    bill = answering_memory.needed(recipe, find_shape("random:tiny"), device, 2, 300, 100, packed=packed)
    assert bill.peak_bytes == pytest.approx(live.peak, rel=0.05)


def test_commands_answer_over_a_packed_base_with_the_options_that_a_plan_suggests(trained, run_cria, tmp_path):
    of_result = answering_memory.of_result(
        with_settings(recipes.capstone(T4), ["model=qwen3-14b"]), find_shape("qwen3-14b"), T4, full(Recipe(), "")
    )
    options = {one.command: one.fitting.options for one in of_result}
    assert options == {"cria eval": ("--packed", "--batch-size 1"), "cria chat": ("--packed",)}
    assert [said.partition("with ")[2].partition(" it")[0] for one in of_result for said in one.in_words] == [
        " ".join(options[name]) for name in options
    ]
    folder, _ = trained("nf4")
    few = folder.parents[1] / "few.jsonl"
    more = {
        "cria eval": ["--data", str(few), "--out", str(tmp_path / "eval"), "--max-new-tokens", "3"],
        "cria chat": ["--prompt", "Who?", "--max-new-tokens", "3"],
    }
    for command, suggested in options.items():
        code, *_ = run_cria(command.split()[1], str(folder), *" ".join(suggested).split(), *more[command])
        assert code == 0
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["packed"] is True


def test_a_base_that_was_not_quantised_is_not_packed(tmp_path):
    folder, _ = _trained(tmp_path, "tricks.peft=lora")
    with pytest.raises(BadInput, match="--packed: .* was not trained over an NF4, .*leave --packed out"):
        open_folder(folder, CPU, packed=True)


def test_the_merged_model_is_the_trained_one(trained):
    from transformers import AutoModelForCausalLM

    folder, report = trained("double")
    merge(folder)
    whole = AutoModelForCausalLM.from_pretrained(folder.with_name("merged"), dtype=torch.float32).eval()
    _, tokenizer = open_folder(folder, CPU, torch.float32)
    assert not hasattr(whole.config, "quantization_config")
    assert loss_of(whole, tokenizer, folder) == pytest.approx(report["eval_loss_after"], abs=5e-3)


def test_plain_peft_loads_it_over_the_base_that_the_card_names(trained):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder, report = trained("double")
    assert "Load the base in 4-bit NF4 with double quantization, as in training" in (folder / "README.md").read_text()
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(models.find("random:tiny").path, quantization_config=packed)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    _, tokenizer = open_folder(folder, CPU, torch.float32)
    assert loss_of(model, tokenizer, folder) == pytest.approx(
        report["eval_loss_after"], abs=0.02
    )  # its products are in fp16 or fp32, as bitsandbytes chooses


def test_what_was_rounded_is_read_from_the_recipe(tmp_path):
    assert quantization_of(tmp_path).quantization == "none"
    (tmp_path / "recipe.toml").write_text('[tricks]\nquantization = "int8"\npeft = "lora"\n')
    assert quantization_of(tmp_path).quantization == "none", "a whole model, such as a merged one"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert quantization_of(tmp_path).quantization == "int8"
    assert quantization_of(tmp_path).peft == "none"
