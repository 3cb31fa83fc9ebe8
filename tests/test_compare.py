"""Runs side by side: what differs is told, what is the same is not, and what is missing is a cell and no error."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cria_tricks.kwanzaa.summary import Scored, Written, summarise
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report.compare import ABSENT, compare, read_all, table_lines
from tests.kwanzaa import made

MIB = 2**20
LINES = {"weights": 60 * MIB, "saved activations": 30 * MIB}
ROWS = [made.row(), made.row(refuses=True), made.row(query="What does Ujima ask?"), made.row(query="Who came?")]


def report(losses: tuple[float, ...] = (3.0, 2.0), lines: dict[str, int] = LINES, **changed: Any) -> dict[str, Any]:
    """A report with an evaluation before each training step and one at the end, a tenth above the training's loss."""
    history: list[dict[str, Any]] = [{"step": 0, "eval_loss": losses[0] + 0.1}]
    for step, loss in enumerate(losses, 1):
        history += [{"step": step, "loss": loss}, {"step": step, "eval_loss": loss + 0.1}]
    total = sum(lines.values())
    return {
        "history": history,
        "data": {"eval": "held out", "eval_rows": 4, "eval_tokens": 900, "eval_trained_tokens": 500},
        "base": {"tokenizer": {"tokenizer.json": "abc"}},
        "steps": len(losses),
        "planned_steps": len(losses),
        "train_loss": sum(losses) / len(losses),
        "eval_loss_before": history[0]["eval_loss"],
        "eval_loss_after": history[-1]["eval_loss"],
        "seconds": 90.0,
        "step_seconds": {"measured": 1.25},
        "tokens_per_second": 1234.4,
        "estimated_peak_bytes": total,
        "estimate": {"lines": [{"name": name, "bytes": size, "why": ""} for name, size in lines.items()]}
        | {"measured_bytes": total - MIB},
        "peak_bytes": total,
        "parameters": {"trainable": 1000, "total": 5000},
        "device": "a card",
        "warnings": [],
        **changed,
    }


def run(
    folder: Path, *settings: str, reported: dict[str, Any] | None = None, texts: tuple[str, ...] = (), data: str = "d"
) -> Path:
    """Write the folder of a run; with texts, as it is evaluated on :data:`ROWS`."""
    folder.mkdir(parents=True)
    recipe = Recipe(name=re.sub(r"\W", "-", folder.name))
    (folder / "recipe.toml").write_text(with_settings(recipe, settings).to_toml())
    (folder / "run.json").write_text("{}")
    if reported:
        (folder / "report.json").write_text(json.dumps(reported))
    if texts:
        place = folder / "eval"
        place.mkdir()
        written = {place: Written(text, 7, True, 10.0 + len(text), 20) for place, text in enumerate(texts)}
        scored = [Scored(ROWS[n], made.reply(text), written[n]) for n, text in enumerate(texts)]
        found = summarise({"adapter": scored}, {"data": data, "rows": len(texts), "rows_in_data": 4})
        (place / "eval.json").write_text(json.dumps(found))
    return folder


GOOD = (made.GOOD, made.REFUSAL, made.GOOD, made.GOOD)
BAD = ("It was carved in 1923 [9].", made.GOOD, made.GOOD, made.REFUSAL)


@pytest.fixture
def two(tmp_path) -> list[Path]:
    return [
        run(tmp_path / "one", "lora.r=8", reported=report(), texts=GOOD),
        run(tmp_path / "two", "lora.r=16", "train.seed=3", reported=report((3.0, 1.5, 1.75)), texts=BAD),
    ]


def compared(folders: list[Path]) -> dict[str, Any]:
    return compare(read_all(folders))


def lines(found: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The cells of the table by the name of their line."""
    return {name: tuple(cells) for name, *cells in table_lines(found)}


def test_only_the_fields_that_differ_are_told(two):
    found = compared(two)
    assert found["recipe"] == {"lora.r": [8, 16], "train.seed": [42, 3]}, "and not the name"
    assert list(lines(found).items())[:2] == [("lora.r", ("8", "16")), ("train.seed", ("42", "3"))]


def test_one_block_is_not_all_blocks_and_a_field_may_be_missing(tmp_path):
    one = run(tmp_path / "one", "tricks.gradient_checkpointing=1")
    two = run(tmp_path / "two", "tricks.gradient_checkpointing=true")
    text = (two / "recipe.toml").read_text()
    (two / "recipe.toml").write_text(text.replace("expand_kv = false\n", ""))
    found = compared([one, two])["recipe"]
    assert found == {"tricks.gradient_checkpointing": [1, True], "tricks.expand_kv": [False, ABSENT]}


def test_equal_recipes_are_said_to_be_equal(tmp_path, run_cria):
    folders = [run(tmp_path / "one"), run(tmp_path / "two")]
    assert compared(folders)["recipe"] == {}
    assert "The recipes are the same." in run_cria("compare", *folders)[1]


def test_losses_times_and_peaks(two):
    edited = json.loads((two[1] / "report.json").read_text()) | {"planned_steps": 4}
    (two[1] / "report.json").write_text(json.dumps(edited))
    found = lines(compared(two))
    assert found["optimizer steps"] == ("2", "3")
    assert found["planned steps"] == ("2", "4")
    assert found["evaluation loss, first"] == ("3.1000", "3.1000")
    assert found["evaluation loss, last"] == ("2.1000", "1.8500")
    assert found["evaluation loss, best"] == ("2.1000", "1.6000")
    assert found["training loss, mean over steps"] == ("2.5000", "2.0833")
    assert found["time, with loading"] == ("1.5 min", "1.5 min")
    assert found["seconds of a step"] == ("1.25", "1.25")
    assert found["trainable parameters"] == ("1,000", "1,000")
    assert found["tokens per second"] == ("1,234", "1,234")
    assert found["peak of a step, predicted"] == ("90.0 MiB", "90.0 MiB")
    assert found["peak of a step, measured"] == ("89.0 MiB", "89.0 MiB")
    assert not any(name.startswith("memory: ") for name in found), "the bills are equal"


def test_the_bill_has_only_the_parts_that_differ(tmp_path):
    other = {"weights": 60 * MIB, "saved activations": 8 * MIB, "logits": 5 * MIB}
    folders = [
        run(tmp_path / "one", reported=report()),
        run(tmp_path / "two", reported=report(lines=other)),
        run(tmp_path / "three", reported=report(estimate=None, estimated_peak_bytes=None)),
        run(tmp_path / "four"),
    ]
    found = compared(folders)
    assert found["bill"] == {
        "saved activations": [30 * MIB, 8 * MIB, None, None],
        "logits": [0, 5 * MIB, None, None],
    }
    assert lines(found)["memory: logits"] == ("0 B", "5.0 MiB", "-", "-")
    assert lines(found)["peak of a step, predicted"][2:] == ("-", "-")


def test_the_verdict_names_the_lowest_loss_only_if_losses_compare(tmp_path, two):
    assert compared(two)["verdict"] == ("2 runs; two has the lowest evaluation loss at the end: 1.8500 (one: 2.1000)")
    alike = run(tmp_path / "alike", reported=report())
    assert "2.1000, of alike and one alike" in compared([two[0], alike])["verdict"]
    changed = report()
    changed["data"] |= {"eval_tokens": 901}
    other = run(tmp_path / "other", reported=changed)
    found = compared([two[0], other])
    assert found["verdict"].endswith("so they do not compare")
    another = run(tmp_path / "another", reported=report(base={"tokenizer": {"tokenizer.json": "xyz"}}))
    assert not compared([two[0], another])["same_eval_rows"], "another tokenizer"
    unfinished = run(tmp_path / "unfinished")
    assert "fewer than two" in compared([two[0], unfinished])["verdict"]


def test_scores_have_intervals_and_what_is_missing_is_a_dash(tmp_path, two):
    unfinished = run(tmp_path / "unfinished")
    finished = run(tmp_path / "finished", reported=report())
    found = compared([unfinished, *two, finished])
    assert lines(found)["optimizer steps"] == ("-", "2", "3", "2")
    assert lines(found)["cria eval: format"] == ("-", "1.000 [1.000, 1.000]", "1.000 [1.000, 1.000]", "-")
    refusal = found["scores"]["refusal"]
    assert [score and score["value"] for score in refusal] == [None, 1.0, 0.5, None]
    assert refusal[2]["low"] < 0.5 < refusal[2]["high"]
    assert list(found["scores"]) == ["format", "citations", "grounding", "refusal", "loss", "perplexity"]
    assert found["same_scored_rows"]
    assert not any(name.startswith("cria eval") for name in lines(compared([unfinished, finished])))


def test_runs_that_answered_other_rows_are_said_not_to_compare(tmp_path, two, run_cria):
    other = run(tmp_path / "other", reported=report(), texts=GOOD, data="other rows")
    fewer = run(tmp_path / "fewer", reported=report(), texts=GOOD[:3])
    for third in (other, fewer):
        assert "The runs answered different rows" in run_cria("compare", two[0], third)[1]


def broken(folder: Path, file: str, text: str) -> Path:
    (folder / file).write_text(text)
    return folder


def test_a_folder_that_is_no_run_is_one_line(tmp_path, two, run_cria):
    (tmp_path / "empty").mkdir()
    adapter = two[0] / "adapter"
    adapter.mkdir()
    shutil.copy(two[0] / "recipe.toml", adapter)  # an adapter has a recipe, too
    cases = [
        ([two[0], tmp_path / "none"], "there is no such folder"),
        ([two[0], tmp_path / "empty"], "holds neither run.json nor report.json, so it is no run"),
        ([two[0], adapter], f"did you mean {two[0]}?"),
        ([two[0]], "at least two runs"),
        ([*two, two[0]], "is named twice"),
        ([*two, "--page", "x.html"], "No such option: --page"),
        ([two[0], broken(run(tmp_path / "a"), "report.json", "{")], "report.json: cannot be read as JSON"),
        ([two[0], broken(run(tmp_path / "b"), "report.json", "[]")], "must hold a JSON object"),
        ([two[0], broken(run(tmp_path / "c"), "report.json", "{}")], "lacks history, data"),
        ([two[0], broken(run(tmp_path / "d"), "recipe.toml", "x")], "recipe.toml: cannot be read as TOML"),
    ]
    for arguments, said in cases:
        code, stdout, stderr = run_cria("compare", *arguments)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
        assert said in stderr


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    folders = [run(tmp_path / "here" / "smoke"), run(tmp_path / "there" / "smoke"), run(tmp_path / "mine")]
    assert [each.name for each in read_all(folders)] == [str(folders[0]), str(folders[1]), "mine"]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_to_the_width_and_nothing_is_cut(tmp_path, two, run_cria, monkeypatch, width):
    others = [run(tmp_path / f"a_run_with_a_long_name_{n}", reported=report(), texts=GOOD) for n in range(4)]
    monkeypatch.setenv("COLUMNS", str(width))
    code, stdout, _ = run_cria("compare", *two, *others)
    assert code == 0
    assert "…" not in stdout
    assert max(map(len, stdout.splitlines())) <= width


def test_the_command_gives_one_document(two, run_cria):
    code, stdout, stderr = run_cria("compare", *two)
    assert (code, stderr) == (0, "")
    assert stdout.startswith("2 runs; two has the lowest evaluation loss at the end: 1.8500")
    assert json.loads(run_cria("compare", *two, "--json")[1]) == json.loads(json.dumps(compared(two)))


def test_brackets_in_names_and_cells_are_no_markup(tmp_path, run_cria):
    one = run(tmp_path / "one[red]", "model=./a[bold]b", reported=report())
    stdout = run_cria("compare", one, run(tmp_path / "two", reported=report((2.0, 1.0))))[1]
    assert "(one[red]: 2.1000)" in stdout
    assert stdout.count(" one[red] ") == 1, "the head of the table"
    assert "./a[bold]b" in stdout


def test_a_real_run_is_read(trained, tmp_path, run_cria):
    """The folder that ``cria train`` wrote, beside a copy of it that did not finish."""
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("recipe.toml", "run.json"):
        shutil.copy(trained / name, cut)
    found = compared([trained, cut])
    kept = json.loads((trained / "report.json").read_text())
    assert found["recipe"] == {}
    figures = found["figures"]
    assert figures["eval_loss_after"] == [kept["eval_loss_after"], None]
    assert figures["estimated_peak_bytes"] == [kept["estimated_peak_bytes"], None]
    assert None not in [each[0] for each in figures.values()]
    assert lines(found)["optimizer steps"] == ("2", "-")
