"""``cria eval`` as a user meets it: what it writes, what it prints, and what it refuses."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from cria_tricks import models
from cria_tricks.cli import main
from cria_tricks.hardware import this_device
from cria_tricks.hardware.device import pretend
from cria_tricks.recipe import with_settings
from cria_tricks.settings import BATCH, NEW_TOKENS
from tests.test_cli import QUICK, ROWS, few_rows  # noqa: F401 (a fixture)

SHORT = ["--data", str(ROWS), "--limit", "3", "--batch-size", "2", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """One LoRA step of the tiny model, as ``cria train`` leaves it."""
    from cria_tricks.recipe import Recipe
    from cria_tricks.run.train import train

    few = tmp_path_factory.mktemp("rows") / "few.jsonl"
    few.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:2]))
    settings = [s for s in QUICK if s != "--set"] + [f"data.train={few}", f"data.eval={few}", "train.max_steps=1"]
    out = tmp_path_factory.mktemp("run") / "tiny"
    return train(with_settings(Recipe(), settings), out)["adapter"]


def test_adapter_base_and_reference_side_by_side(adapter, run_cria, tmp_path):
    out = tmp_path / "eval"
    code, stdout, stderr = run_cria("eval", adapter, "--with-base", "--reference", *SHORT, "--out", out, "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found == {**json.loads((out / "eval.json").read_text()), "out": str(out)}
    assert list(found["systems"]) == ["adapter", "base", "reference"]
    assert (found["rows"], found["rows_in_data"], found["base"]) == (3, 8, "random:tiny")
    for scorer in ("format", "citations", "grounding", "refusal"):
        assert found["systems"]["reference"][scorer] == {"value": 1.0, "low": 1.0, "high": 1.0}
    loss = {name: found["systems"][name]["loss"]["value"] for name in ("adapter", "base")}
    difference = found["differences"]["loss"]
    assert difference["value"] == pytest.approx(loss["adapter"] - loss["base"])
    assert loss["adapter"] != loss["base"], "the adapter was on for one and off for the other"
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert "loss" not in found["systems"]["reference"]
    assert [list(row["systems"]) for row in found["answers"]] == [["adapter", "base", "reference"]] * 3
    assert "adapter    3/3 rows" in stderr
    text = (out / "eval.md").read_text()
    assert f"{loss['adapter']:.3f}" in text
    again = run_cria("eval", adapter, "--with-base", "--reference", *SHORT, "--out", out, "--json")
    assert json.loads(again[1]) == found, "the answers are greedy, and the draws are seeded"


def chat(*said: str) -> dict:
    turns = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)]
    return {"messages": turns}


def test_its_defaults_are_those_that_a_plan_counts_with():
    of_command = {option.name: option.default for option in get_command(main.app).commands["eval"].params}
    assert (of_command["batch_size"], of_command["max_new_tokens"]) == (BATCH, NEW_TOKENS)


KINDS = {
    "chat": chat("Who carved it?", "Ruth."),
    "two turns and a question": chat("Who?", "Ruth.", "When?", "In 1969.", "Where?"),
    "completion": {"prompt": "The mat lies", "completion": " below the corn."},
    "no prompt": {"prompt": "", "completion": "Alone."},
    "text": {"text": "Seven candles stand in the kinara. " * 40},
    "alpaca": {"instruction": "Name the third.", "input": "of seven", "output": "Ujima"},
}


def test_any_data_has_a_loss_a_perplexity_and_answers(adapter, run_cria, tmp_path):
    """Rows of every kind that trains, without the contract: the losses are those of the tokens that training labels."""
    from cria_tricks.adapter.opening import open_folder
    from cria_tricks.data.batches import PadToLongest
    from cria_tricks.data.rows import read_file
    from cria_tricks.data.tokens import tokenize, trained
    from cria_tricks.load.losses import full_loss_sum

    data, out = tmp_path / "any.jsonl", tmp_path / "eval"
    data.write_text("".join(json.dumps(row) + "\n" for row in KINDS.values()))
    arguments = ["--data", data, "--batch-size", "4", "--max-new-tokens", "3", "--out", out]
    code, stdout, stderr = run_cria("eval", adapter, "--with-base", *arguments, "--json")
    assert code == 0, stderr
    assert "note: The four scores (format, citations, grounding, refusal) need rows whose answers keep" in stderr
    found = json.loads(stdout)
    length = found["text_length"]
    assert length == 320, "of the adapter's own recipe"
    model, tokenizer = open_folder(adapter)
    rows = tokenize(read_file(data), tokenizer, length).rows
    assert len(rows) > len(KINDS), "the text takes several rows"
    with torch.no_grad():
        loss = sum(full_loss_sum(model, PadToLongest(0)([row])).item() for row in rows)
    loss /= sum(map(trained, rows))
    system = found["systems"]["adapter"]
    assert list(system) == ["loss", "perplexity", "cut_off"], "no scores"
    assert system["loss"]["value"] == pytest.approx(loss, rel=2e-3 if model.dtype == torch.bfloat16 else 1e-6)
    for end in ("value", "low", "high"):
        assert system["perplexity"][end] == pytest.approx(math.exp(system["loss"][end]))
    assert list(found["differences"]) == ["loss", "perplexity"]
    assert found["differences"]["perplexity"]["value"] == pytest.approx(
        system["perplexity"]["value"] - found["systems"]["base"]["perplexity"]["value"]
    )
    written = [row["systems"]["adapter"]["written"] for row in found["answers"]]
    tokens = {kind: entry["tokens"] for kind, entry in zip(KINDS, written, strict=True)}
    assert [kind for kind in KINDS if not tokens[kind]] == ["no prompt", "text"], "there is nothing to answer"
    asked = [row["query"] for row in found["answers"]]
    assert asked == ["Who carved it?", "When?", "The mat lies", "", "", "Name the third.\n\nof seven"]
    page = (out / "eval.md").read_text()
    assert "the contract kwanzaa.answer.v1, so they are left out" in page
    assert "A text is not answered; for its loss it is cut into rows of 320 tokens." in page
    assert "should refuse" not in page
    assert f"| perplexity of the reference, exp(loss) | {system['perplexity']['value']:.3f} [" in page


@pytest.mark.parametrize(("bf16", "apart"), [(False, 1e-6), (True, 2**-9)], ids=["fp32", "bf16"])
def test_the_loss_below_the_adapter_is_the_base_models(bf16, apart, adapter, run_cria, tmp_path):
    """In both dtypes that a CPU's answers are computed in.

    In fp32 a loss near 11 is the same but for sums in another order. In bf16 some processors round the same model in
    two ways, and by half a step at most, which is 2**-9 of a number.
    """
    from transformers import AutoModelForCausalLM

    from cria_tricks import models
    from cria_tricks.adapter.opening import open_folder
    from cria_tricks.data.rows import read_file
    from cria_tricks.kwanzaa.generate import reference_loss

    one = ["--data", str(ROWS), "--limit", "1", "--max-new-tokens", "1"]  # bf16 is slow where it is emulated
    with pretend(replace(this_device(), real_bf16=bf16)):
        code, stdout, stderr = run_cria("eval", adapter, "--with-base", *one, "--out", tmp_path, "--json")
        assert code == 0, stderr
        adapted, tokenizer = open_folder(adapter)
    assert adapted.dtype == (torch.bfloat16 if bf16 else torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(models.find("random:tiny").path, dtype=adapted.dtype).eval()
    loss, tokens = reference_loss(plain, tokenizer, read_file(ROWS)[0])
    assert json.loads(stdout)["systems"]["base"]["loss"]["value"] == pytest.approx(loss / tokens, rel=apart)


def test_without_out_it_stands_beside_the_adapter_and_prints_a_table(adapter, run_cria, monkeypatch):
    from pathlib import Path

    from cria_tricks.cli import app

    monkeypatch.setattr(app.screen, "_width", 160)
    code, stdout, stderr = run_cria("eval", adapter, *SHORT)
    assert code == 0, stderr
    beside = Path(adapter).parent / "eval"
    assert (beside / "eval.md").is_file()
    assert str(beside / "eval.md") in stdout
    assert "format compliance" in stdout


def test_a_whole_model_is_evaluated_without_a_base_and_options_that_need_one_are_refused(run_cria, tokenizer, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(models.find("random:tiny").path, whole)
    tokenizer.save_pretrained(whole)
    for options in (["--with-base"], ["--base", tmp_path]):
        code, _, stderr = run_cria("eval", whole, *options, *SHORT, "--out", tmp_path / "eval")
        assert (code, f"{whole} is a whole model and has no base below it" in stderr) == (2, True)
    code, stdout, stderr = run_cria("eval", whole, *SHORT, "--out", tmp_path / "eval", "--json")
    assert code == 0, stderr
    assert list(json.loads(stdout)["systems"]) == ["adapter"]


def test_a_tokenizer_of_another_model_is_one_line(run_cria, tiny_model, tokenizer, tmp_path):
    """Its tokens have no embedding in the small vocabulary."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    tokenizer.save_pretrained(folder)
    code, _, stderr = run_cria("eval", folder, *SHORT, "--out", tmp_path / "eval")
    assert (code, "its vocabulary has 512; the two do not belong together" in stderr) == (2, True)
    code, _, stderr = run_cria("chat", folder, "--prompt", "unbelievable", "--max-new-tokens", 1)
    assert (code, "the two do not belong together" in stderr) == (2, True)


def test_results_are_not_written_into_the_adapter(adapter, run_cria):
    before = sorted(path.name for path in Path(adapter).iterdir())
    code, _, stderr = run_cria("eval", adapter, *SHORT, "--out", adapter)
    assert (code, "holds an adapter or a model" in stderr) == (2, True)
    assert sorted(path.name for path in Path(adapter).iterdir()) == before


def test_the_reference_alone_loads_nothing_heavy(tmp_path):
    code = (
        f"import sys; sys.argv = ['cria', 'eval', '--reference', '--data', {str(ROWS)!r}, '--json']\n"
        "from cria_tricks.cli.main import main\n"
        "main()\n"
        "print([m for m in ('transformers', 'peft', 'bitsandbytes') if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr == "[]\n"
    assert json.loads(done.stdout)["systems"]["reference"]["confusion"]["refused_rightly"] == 2
    assert (tmp_path / "runs" / "eval" / "eval.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "--reference", "--data", ""], "--data: is empty; name a file, a folder or a data set"),
        (["eval", "--reference", "--data", "pairs.jsonl"], "--reference: pairs.jsonl:1: the row does not end with"),
        (
            ["eval", "--reference", "--data", "prose.jsonl"],
            "prose.jsonl:2: the row does not end with an answer of the contract",
        ),
        (
            ["eval", "--reference", "--data", str(ROWS), "--out", "prose.jsonl"],
            "--out prose.jsonl: cannot be made: File exists",
        ),
        (["eval", "--reference", "--data", str(ROWS), "--out", "prose.jsonl/x"], "cannot be made: Not a directory"),
    ],
)
def test_bad_input_is_one_line(arguments, said, run_cria, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "prose.jsonl").write_text(ROWS.read_text().splitlines(keepends=True)[0] + json.dumps(chat) + "\n")
    code, stdout, stderr = run_cria(*arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert stderr.startswith("error: ")
    assert said in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "prose.jsonl"]
