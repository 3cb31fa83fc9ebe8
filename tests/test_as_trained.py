"""An adapter is used over the base that it learnt beside: rounded, if that was rounded."""

import functools
from pathlib import Path

import pytest
import torch

from cria_tricks import models
from cria_tricks.adapter.card_code import HERE
from cria_tricks.adapter.merge import CPU, merge
from cria_tricks.adapter.opening import open_folder, quantization_of
from cria_tricks.data.rows import read_jsonl
from cria_tricks.kwanzaa.generate import reference_loss
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.run import train
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An adapter of a kind, and the report of its training; it is trained once."""
    return functools.cache(lambda kind: _trained(tmp_path_factory.mktemp(kind), *KINDS[kind]))


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
    losses = [reference_loss(model, tokenizer, chat) for chat in read_jsonl(folder.parents[1] / "few.jsonl")]
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


def test_the_merged_model_is_the_trained_one(trained):
    from transformers import AutoModelForCausalLM

    folder, report = trained("double")
    merge(folder)
    whole = AutoModelForCausalLM.from_pretrained(folder.with_name("merged"), dtype=torch.float32).eval()
    _, tokenizer = open_folder(folder, CPU, torch.float32)
    assert not hasattr(whole.config, "quantization_config")
    assert loss_of(whole, tokenizer, folder) == pytest.approx(report["eval_loss_after"], abs=5e-3)


def test_the_card_loads_it_so_with_plain_peft(trained):
    folder, report = trained("double")
    text = (folder / "README.md").read_text()
    assert 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)' in text
    code = text.split("```python\n")[1].split("```")[0]
    code = code.replace('"random:tiny"', repr(models.find("random:tiny").path)).replace(f'"{HERE}"', repr(str(folder)))
    found: dict = {}
    exec(code, found)
    assert loss_of(found["model"].eval(), found["tokenizer"], folder) == pytest.approx(
        report["eval_loss_after"], abs=0.02
    )  # its products are in fp16 or fp32, as bitsandbytes chooses


def test_what_was_rounded_is_read_from_the_recipe(tmp_path):
    assert quantization_of(tmp_path).quantization == "none"
    (tmp_path / "recipe.toml").write_text('[tricks]\nquantization = "int8"\npeft = "lora"\n')
    assert quantization_of(tmp_path).quantization == "none", "a whole model, such as a merged one"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert quantization_of(tmp_path).quantization == "int8"
    assert quantization_of(tmp_path).peft == "none"
