"""Figures and tables of the site are those of the committed results, to the byte."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cria_tricks.bench import results
from cria_tricks.common.figures import save
from cria_tricks.common.themes import THEMES
from cria_tricks.data.lengths import row_lengths
from tests.measured_cards import made_up, written
from tests.test_results import OFF, case
from tools import compared, figures, tables

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    subprocess.run([sys.executable, "-m", "tools.figures", "--into", str(folder)], check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize("page", figures.PAGES, ids=str)
def test_the_tables_are_those_of_the_results(drawn, page):
    assert (drawn / page).read_text() == (ROOT / page).read_text(), "run: make figures"


def test_drawing_measures_nothing():
    code = "import sys, tools.figures; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_block_of_a_page_is_filled():
    found = figures.blocks(results.read(results.COMMITTED))
    for page in figures.PAGES:
        text = (ROOT / page).read_text()
        for name in re.findall(r"<!-- table: (\w+) -->", text):
            assert name in found, name
            assert f"<!-- end of {name} -->" in text


def test_the_figures_are_those_of_the_results(drawn):
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("matplotlib==")
    )
    if importlib.metadata.version("matplotlib") != pinned["matplotlib"]:
        pytest.skip(f"other versions than matplotlib {pinned['matplotlib']} draw other paths")
    made = {path.name: path.read_bytes() for path in (drawn / figures.ASSETS).iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / figures.ASSETS).iterdir()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run: make figures"


def test_every_figure_of_the_page_is_there():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in figures.SAYS:
        for theme in THEMES:
            link = f"assets/benchmarks/{name}-{theme}.svg"
            assert (link in text) == (ROOT / "docs" / link).exists(), link


def test_the_page_shows_each_figure_with_its_words():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, sentence in figures.SAYS.items():
        if f"{name}-light.svg" in page:
            assert figures.picture(f"assets/benchmarks/{name}", sentence) in page, name


def test_the_measured_ladder_goes_from_step_to_step():
    text = tables.ladder_steps(
        case(bench="together", name=name, against=before)
        for name, before in (("ladder_b", "ladder_a"), ("ladder_a", "off"), ("off", ""), ("alone_b", "off"))
    )
    assert [line.split("|")[1].strip() for line in text.splitlines() if "together" in line] == [
        "`together` off", "`together` + a", "`together` + b",
    ]  # fmt: skip


def test_a_frontier_that_was_stopped_early_can_be_drawn():
    points = {
        "small": {"way": "ours", "speeds": {"0": 3.0}, "peak_bytes": 100},
        "TRL as small": {"way": "trl", "speeds": {}, "peak_bytes": 200},
        "fast": {"way": "ours", "speeds": {"0": 6.0}, "bytes_of": "small"},
    }
    text = tables.frontier({"points": points})
    assert "| TRL as small |  | 200 B |  | 0.50 |" in text
    assert "| fast | 6.0 | 100 B (as the line small) |  |  |" in text
    assert save(figures.frontier({"points": points, "trl": "1.16.0"}), "light")


def test_an_exponent_is_the_power():
    squares = compared.Curve("", [1, 2, 4, 8], [3, 12, 48, 192])
    assert squares.exponent == pytest.approx(2)


def test_growth_is_read_off_names_and_labels():
    cases = [
        case(bench="growth", name=f"kept-tokens-{n}", against="", tokens_per_row=n, seconds=[n / 64]) for n in (64, 128)
    ]
    (curve,) = compared.measured(cases, "tokens", compared.STEP)
    assert curve == ("kept, tiny, NVIDIA H200 as T4", [64, 128], [1, 2])
    assert compared.measured(cases, "rows", compared.STEP) == []
    (line,) = compared.counted({"kept tokens=512": {"peak_bytes": 7}, "kept rows=2": {"peak_bytes": 9}}, "tokens")
    assert line == ("kept, llama-3.2-1b, on a T4", [512], [7])


def test_a_removed_toggle_is_turned_round():
    """Its case is the one without: both say what switching it on does."""
    whole = case(bench="together", name="ladder_compile", against="", peak_allocated_bytes=100)
    less = case(bench="together", name="removed_peft", against="ladder_compile", peak_allocated_bytes=400)
    (pair,) = compared.capstone_pairs([whole, less])
    assert (pair.label, pair.on, pair.off) == ("peft", whole, less)
    assert "| `peft` | 0.25 | 1.00 |" in tables.toggles([pair])


@pytest.mark.parametrize("theme", THEMES)
def test_a_figure_is_the_same_bytes_every_time(theme):
    drawing = figures.of_cases([OFF, case()], {})["tricks"]
    assert save(drawing, theme) == save(drawing, theme)


def test_cases_of_a_reader_are_drawn_beside_the_committed_ones(tmp_path, monkeypatch):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"cria_tricks": [one.model_dump(mode="json") for one in (OFF, case())]}))
    card = written(made_up(), tmp_path, "measured_card.json")
    monkeypatch.setattr(sys, "argv", ["figures", "--into", str(tmp_path / "out"), "--mine", str(mine), str(card)])
    figures.main()
    text = (tmp_path / "out" / "docs" / "benchmarks.md").read_text()
    assert "**NVIDIA H200 as T4 (mine)**" in text
    assert "| `nf4` on | 1.0 MiB | off | 0.25 | +25.00 % | 1.2 MiB | 94 | 2.00 |" in text
    assert "**Tesla T4 (measured_card)**" in text
    for device in results.by_device(results.read(results.COMMITTED)):
        assert device in text
    assert (tmp_path / "out" / figures.ASSETS / "tricks-dark.svg").read_text().startswith("<?xml")


def test_cases_of_a_reader_are_never_among_the_committed_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["figures", "--mine", "mine.json"])
    with pytest.raises(SystemExit):
        figures.main()
    assert "name a folder with --into" in capsys.readouterr().err


def test_what_the_guide_says_of_the_curated_run_is_what_was_measured():
    found = results.study("kwanzaa_curated_small")["evaluations"]["history_notes"]
    adapter, base, trivial = (found["systems"][name] for name in ("adapter", "base", "trivial"))
    told, differs = adapter["confusion"], found["differences"]["refusal"]
    should, may = (found["kinds"][kind]["rows"] for kind in ("refusal", "answer"))
    text = " ".join((ROOT / "docs/guide/evaluate.md").read_text().split())
    for said in (
        f"{round(adapter['format']['value'] * found['rows'])} of {found['rows']} answers keep the contract",
        f"in {adapter['same_documents']:.0%} of the rows".replace("%", " %"),
        f"an answer without a model in {trivial['same_documents']:.0%}".replace("%", " %"),
        f"It refuses {told['refused_rightly']} of the {should} questions that should be refused, and the base "
        f"{base['confusion']['refused_rightly']}.",
        f"it also refuses {told['refused_wrongly']} of the {may} that have an answer",
        f"with {adapter['refusal']['value']:.2f}, and over all rows",
        f"a difference of {differs['value']:.2f}, from {differs['low']:.2f} to {differs['high']:.2f}",
    ):
        assert said in text, said
    assert base["format"]["value"] == base["confusion"]["refused_wrongly"] == 0
    assert adapter["grounding"]["value"] == 1
    assert adapter["cut_off"] == 0


def test_what_the_pages_say_of_the_run_on_real_rows_is_what_was_measured():
    study = results.study("kwanzaa_small")
    as_trained, shown = study["evaluations"].values()
    adapter, base = (as_trained["systems"][name] for name in ("adapter", "base"))
    rows, kinds, differs = as_trained["rows"], as_trained["kinds"], as_trained["differences"]
    measured = [entry["eval_loss"] for entry in study["run"]["history"] if "eval_loss" in entry]
    hours, minutes = divmod(round(study["run"]["seconds"] / 60), 60)
    took = f"{hours} hour {minutes} minutes"
    peak = f"{study['run']['peak_bytes'] / 2**30:.1f} GiB"
    answers = [trained for _, trained in row_lengths("train")]
    longer = sum(trained > 1024 for _, trained in row_lengths("eval"))
    cut_off = shown["systems"]["adapter"]["cut_off"]
    has_json = {name: _has_json(system, rows) for name, system in as_trained["systems"].items()}
    says = {
        "docs/guide/evaluate.md": [
            f"none of its {rows} answers keeps the contract",
            f"falls from {base['loss']['value']:.2f} to {adapter['loss']['value']:.2f}",
            f"{adapter['cut_off']} answers are cut off at 1,024 new tokens",
            f"took {took}, with the evaluations of the loss, and a peak of {peak}",
            *(f"({kinds[kind]['rows']} rows)" for kind in ("placeholder", "refusal", "answer")),
            f"{adapter['placeholders']} of its {rows} answers hold the data's",
            f"refusal score of {adapter['refusal']['value']:.2f} over all rows",
            f"citations {_interval(differs['citations'])}, grounding {_interval(differs['grounding'])}",
            f"has {sum(answers) / len(answers):,.0f} tokens in the mean",
            f"to {longer} of the {rows} questions is longer than 1,024",
            f"{has_json['adapter']} of its answers have the start of a JSON object, of the base's {has_json['base']}",
            f"All {rows} answers begin as JSON, {cut_off} are cut off, and none is valid",
            f"above the base's by {_interval(shown['differences']['refusal'])}",
            f"leaves {shown['systems']['base']['confusion']['no_text']} answers empty",
        ],
        "docs/guide/train.md": [f"from {measured[0]:.4f} to {measured[-1]:.4f} (two AMD EPYC cores", took],
        "docs/guide/where_to_train.md": [f"took {took} for its {study['run']['steps']} steps"],
        "lessons/kwanzaa.py": [
            f"from {measured[0]:.2f} to {measured[-1]:.2f}, {adapter['placeholders']} of its {rows} answers held"
        ],
    }
    for page, sentences in says.items():
        text = " ".join((ROOT / page).read_text().replace("\n#", " ").split())
        assert [said for said in sentences if said not in text] == [], page
    for found in (adapter, shown["systems"]["adapter"]):
        assert found["format"]["value"] == found["confusion"]["refused_rightly"] == 0
    assert kinds["answer"]["systems"]["adapter"]["citations"]["value"] == 0
    assert _has_json(shown["systems"]["adapter"], rows) == rows


def _has_json(system: dict[str, Any], rows: int) -> int:
    return rows - round(system["violations"].get("no JSON object", 0) * rows)


def _interval(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
