"""Runs side by side: what differs is told, what is the same is not, and what is missing is a cell and no error."""

import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cria_tricks.common import interrupts
from cria_tricks.kwanzaa import compare_scores
from cria_tricks.kwanzaa.answers import Answers, Written
from cria_tricks.kwanzaa.bootstrap import mean, with_interval
from cria_tricks.kwanzaa.page import NAMES
from cria_tricks.kwanzaa.summary import Scored, summarise
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import compare_tables
from cria_tricks.report.compare import ABSENT, compare
from cria_tricks.report.runs import read_all
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
        Answers(place / "answers-adapter.jsonl", {"system": "adapter"}).add(written)
        scored = [Scored(ROWS[n], made.reply(text), written[n]) for n, text in enumerate(texts)]
        found = summarise({"adapter": scored}, {"data": data, "rows": len(texts), "rows_in_data": 4})
        (place / "eval.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(autouse=True)
def nothing_to_say(monkeypatch):
    monkeypatch.setattr(interrupts, "now_saved", lambda words: None)


GOOD = (made.GOOD, made.REFUSAL, made.GOOD, made.GOOD)
BAD = ("It was carved in 1923 [9].", made.GOOD, made.GOOD, made.REFUSAL)


@pytest.fixture
def two(tmp_path) -> list[Path]:
    return [
        run(tmp_path / "one", "lora.r=8", reported=report(), texts=GOOD),
        run(tmp_path / "two", "lora.r=16", "train.seed=3", reported=report((3.0, 1.5, 1.75)), texts=BAD),
    ]


def compared(folders: list[Path]) -> dict[str, Any]:
    runs = read_all(folders)
    found = compare(runs)
    found["evaluation"] = compare_scores.compare([each.evaluation for each in runs], [f / "eval" for f in folders])
    return found


def evaluations(folders: list[Path]) -> list[dict[str, Any]]:
    return [json.loads((folder / "eval" / "eval.json").read_text()) for folder in folders]


def lines(found: dict[str, Any], title: str) -> dict[str, tuple[str, ...]]:
    """The cells of a table by the name of their line; empty without this table."""
    for table in compare_tables.tables(found, NAMES):
        if table.title.startswith(title):
            return {name: tuple(cells) for name, *cells in table.lines}
    return {}


def test_only_the_fields_that_differ_are_told(two):
    found = compared(two)
    assert found["recipe"] == {"lora.r": [8, 16], "train.seed": [42, 3]}, "and not the name"
    assert lines(found, "What differs") == {"lora.r": ("8", "16"), "train.seed": ("42", "3")}


def test_one_block_is_not_all_blocks_and_a_field_may_be_missing(tmp_path):
    one = run(tmp_path / "one", "tricks.gradient_checkpointing=1")
    two = run(tmp_path / "two", "tricks.gradient_checkpointing=true")
    text = (two / "recipe.toml").read_text()
    (two / "recipe.toml").write_text(text.replace("expand_kv = false\n", ""))
    found = compared([one, two])["recipe"]
    assert found == {"tricks.gradient_checkpointing": [1, True], "tricks.expand_kv": [False, ABSENT]}


def test_equal_recipes_are_said_to_be_equal(tmp_path):
    found = compared([run(tmp_path / "one"), run(tmp_path / "two")])
    assert lines(found, "What differs") == {"no field": ("the same", "the same")}


def test_losses_times_and_peaks(two):
    found = lines(compared(two), "What came of it")
    assert found["optimizer steps"] == ("2 of 2", "3 of 3")
    assert found["evaluation loss, first"] == ("3.1000", "3.1000")
    assert found["evaluation loss, last"] == ("2.1000", "1.8500")
    assert found["evaluation loss, best"] == ("2.1000", "1.6000")
    assert found["best at step"] == ("2", "2")
    assert found["training loss, first step"] == ("3.0000", "3.0000")
    assert found["training loss, last step"] == ("2.0000", "1.7500")
    assert found["time, with loading"] == ("1.5 min", "1.5 min")
    assert found["tokens per second"] == ("1,234", "1,234")
    assert found["peak of a step, predicted"] == ("90.0 MiB", "90.0 MiB")
    assert found["peak of a step, measured"] == ("89.0 MiB", "89.0 MiB")


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
    assert lines(found, "Where the memory goes")["logits"] == ("0 B", "5.0 MiB", "no bill", "no bill")
    assert lines(found, "What came")["peak of a step, predicted"][2:] == ("not measured", "not finished")


def test_the_verdict_names_the_lowest_loss_only_if_losses_compare(tmp_path, two):
    assert compare_tables.verdict(compared(two)) == (
        "2 runs; two has the lowest evaluation loss at the end: 1.8500 (one: 2.1000)"
    )
    alike = run(tmp_path / "alike", reported=report())
    assert "2.1000, of alike and one alike" in compare_tables.verdict(compared([two[0], alike]))
    changed = report()
    changed["data"] |= {"eval_tokens": 901}
    other = run(tmp_path / "other", reported=changed)
    found = compared([two[0], other])
    assert compare_tables.verdict(found).endswith("so they do not compare")
    another = run(tmp_path / "another", reported=report(base={"tokenizer": {"tokenizer.json": "xyz"}}))
    assert not compared([two[0], another])["same_eval_rows"], "another tokenizer"
    unfinished = run(tmp_path / "unfinished")
    assert "fewer than two" in compare_tables.verdict(compared([two[0], unfinished]))


def test_scores_have_intervals_and_their_difference_is_paired(two):
    found = compared(two)["evaluation"]
    assert found["same_rows"]
    assert found["rows"] == [4, 4]
    assert found["scores"]["refusal"][0]["value"] == 1.0
    assert found["scores"]["refusal"][1]["value"] == 0.5
    assert found["differences"]["refusal"][0] is None, "the first is what the others are held against"
    right = [[each["refusal"]["value"] for each in read["answers"]["adapter"]] for read in evaluations(two)]
    paired = with_interval(mean, [[theirs - mine for mine, theirs in zip(*right, strict=True)]])
    assert found["differences"]["refusal"][1] == pytest.approx(paired), "as of one column of differences"
    assert paired["value"] == -0.5
    lengths = [[10 + len(text) for text in texts] for texts in (GOOD, BAD)]
    assert found["differences"]["loss"][1]["value"] == pytest.approx((sum(lengths[1]) - sum(lengths[0])) / 80)
    assert lines(compared(two), "Differences from one")["refusal accuracy"][0] == "-"


def test_scores_are_told_by_kind_of_row_with_their_number(two):
    found = lines(compared(two), "Scores by kind")
    assert found["answer: rows"] == ("3", "3")
    assert found["refusal: rows"] == ("1", "1")
    assert found["refusal: refusal accuracy"] == ("1.000\n1.000 to 1.000", "0.000\n0.000 to 0.000")


def test_runs_that_answered_other_rows_have_no_differences_and_no_answers_side_by_side(tmp_path, two):
    other = run(tmp_path / "other", reported=report(), texts=GOOD, data="other rows")
    fewer = run(tmp_path / "fewer", reported=report(), texts=GOOD[:3])
    for third in (other, fewer):
        found = compared([two[0], third])
        assert not found["evaluation"]["same_rows"]
        assert (found["evaluation"]["differences"], found["evaluation"]["answers"]) == ({}, [])
        notes = {table.title: table.note for table in compare_tables.tables(found, NAMES)}
        assert notes["Scores"].endswith("The runs answered different rows, so the scores do not compare.")


def test_losses_of_other_tokens_are_not_subtracted(two):
    file = two[1] / "eval" / "answers-adapter.jsonl"
    file.write_text(file.read_text().replace('"trained": 20', '"trained": 21', 1))
    assert "loss" not in compared(two)["evaluation"]["differences"]
    file.unlink()
    found = compared(two)["evaluation"]
    assert "loss" not in found["differences"]
    assert "format" in found["differences"], "the scores are in eval.json"


def test_what_is_missing_is_a_cell(tmp_path, two):
    unfinished = run(tmp_path / "unfinished")
    finished = run(tmp_path / "finished", reported=report())
    found = compared([unfinished, *two, finished])
    assert lines(found, "What came")["optimizer steps"] == ("not finished", "2 of 2", "3 of 3", "2 of 2")
    assert lines(found, "Scores")["rows"] == ("not evaluated", "4", "4", "not evaluated")
    differences = found["evaluation"]["differences"]["format"]
    assert [bool(each) for each in differences] == [False, False, True, False], "from the first that was evaluated"
    assert lines(found, "Differences from one")
    answers = found["evaluation"]["answers"][0]["answers"]
    assert [answer and answer["text"] for answer in answers] == [None, GOOD[0], BAD[0], None]
    assert lines(compared([unfinished, finished]), "Scores") == {}


def test_data_without_the_contract_has_a_loss_and_no_scores(tmp_path, two):
    for folder in two:
        file = folder / "eval" / "eval.json"
        found = json.loads(file.read_text())
        system = found["systems"]["adapter"]
        found["systems"]["adapter"] = {name: system[name] for name in ("loss", "perplexity", "tokens", "cut_off")}
        found["answers"] = {"adapter": [{"row": "made:1"}] * 4}
        found["kinds"] = {}
        file.write_text(json.dumps(found))
    found = compared(two)
    assert list(lines(found, "Scores")) == ["rows", NAMES["loss"], NAMES["perplexity"]]
    assert list(found["evaluation"]["differences"]) == ["loss"]


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
        ([*two, "--page", "x.pdf"], "must end with .html"),
        ([two[0], broken(run(tmp_path / "a"), "report.json", "{")], "report.json: not valid JSON"),
        ([two[0], broken(run(tmp_path / "b"), "report.json", "[]")], "must hold a JSON object"),
        ([two[0], broken(run(tmp_path / "c"), "report.json", "{}")], "lacks history, data"),
        ([two[0], broken(run(tmp_path / "d"), "recipe.toml", "x")], "recipe.toml: not valid TOML"),
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
    code, stdout, _ = run_cria("compare", *two, *others, "--rows", "2")
    assert code == 0
    assert "…" not in stdout
    assert max(map(len, stdout.splitlines())) <= width
    assert stdout.count("optimizer steps") == 2, "six runs take two tables"
    assert "[1]" in stdout, "brackets are no markup"


def test_the_command_shows_answers_and_gives_one_document(two, run_cria):
    code, stdout, stderr = run_cria("compare", *two, "--rows", "1")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("2 runs; two has the lowest evaluation loss at the end: 1.8500")
    assert stdout.count(made.QUERY) == 1
    assert f"two: {BAD[0]}" in stdout
    assert made.QUERY not in run_cria("compare", *two)[1], "none, if none is asked for"
    found = json.loads(run_cria("compare", *two, "--json")[1])
    assert found == json.loads(json.dumps(compared(two)))


def test_brackets_in_names_and_cells_are_no_markup(tmp_path, run_cria):
    one = run(tmp_path / "one[red]", "model=./a[bold]b", reported=report())
    stdout = run_cria("compare", one, run(tmp_path / "two", reported=report((2.0, 1.0))))[1]
    assert "(one[red]: 2.1000)" in stdout
    assert stdout.count(" one[red] ") == 2, "the heads of both tables"
    assert "./a[bold]b" in stdout


def test_without_a_second_evaluation_it_is_said_why_there_are_no_answers(tmp_path, two, run_cria):
    alone = run(tmp_path / "alone", reported=report())
    assert "no answers to compare: two runs must be evaluated" in run_cria("compare", two[0], alone, "--rows", "1")[1]


class Reader(html.parser.HTMLParser):
    """Reads a page: its open tags, which must all be closed, its links, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_no_other_file_and_escapes_what_it_quotes(tmp_path, run_cria):
    evil = "<script>alert(1)</script> & so on"
    one = run(tmp_path / "one", reported=report(), texts=GOOD)
    two = run(tmp_path / "two", reported=report((3.0, 1.0)), texts=(evil, *GOOD[1:]))
    page = tmp_path / "both.html"
    code, stdout, _ = run_cria("compare", one, two, "--page", page)
    assert code == 0
    assert f"page: {page}" in stdout
    reader = Reader()
    reader.feed(page.read_text())
    assert reader.open == [], "every tag is closed"
    assert [link[:22] for link in reader.links] == ["data:image/png;base64,"]
    assert "<script>" not in page.read_text()
    for said in ("two has the lowest evaluation loss", evil, "Differences from one", "Answers side by side"):
        assert said in reader.text
    assert reader.text.count("the data's own answer") == 4, "all rows that the evaluation shows"
    run_cria("compare", one, two, "--page", page, "--rows", "1")
    assert page.read_text().count("the data&#x27;s own answer") == 1


def test_a_page_of_runs_without_results_has_no_picture(tmp_path, run_cria):
    page = tmp_path / "both.html"
    assert run_cria("compare", run(tmp_path / "one"), run(tmp_path / "two"), "--page", page)[0] == 0
    assert "<img" not in page.read_text()


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
    assert figures["eval_loss_last"] == [kept["eval_loss_after"], None]
    assert figures["predicted_peak_bytes"] == [kept["estimated_peak_bytes"], None]
    assert None not in [each[0] for each in figures.values()]
    assert lines(found, "What came")["optimizer steps"] == ("2 of 2", "not finished")
