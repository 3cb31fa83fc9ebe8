"""Figures and tables of the site are those of the committed results, to the byte."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from cria_tricks.data.kwanzaa_lengths import row_lengths

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    subprocess.run([sys.executable, "-m", "benchmarks.plot", "--into", str(folder)], check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize("page", plot.PAGES, ids=str)
def test_the_tables_are_those_of_the_results(drawn, page):
    assert (drawn / page).read_text() == (ROOT / page).read_text(), "run: make figures"


def test_drawing_measures_nothing():
    code = "import sys, benchmarks.plot; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_block_of_a_page_is_filled():
    found = plot.blocks(plot.results.read(plot.HERE / "results"))
    for page in plot.PAGES:
        text = (ROOT / page).read_text()
        for name in plot.re.findall(r"<!-- table: (\w+) -->", text):
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
    made = {path.name: path.read_bytes() for path in (drawn / plot.ASSETS).iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / plot.ASSETS).iterdir()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run: make figures"


def test_every_figure_of_the_page_is_there():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in plot.style.SAYS:
        for theme in plot.style.THEMES:
            link = f"assets/benchmarks/{name}-{theme}.svg"
            assert (link in text) == (ROOT / "docs" / link).exists(), link


def test_the_page_shows_each_figure_with_its_words():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name, sentence in plot.style.SAYS.items():
        if f"{name}-light.svg" in page:
            assert plot.style.picture(f"assets/benchmarks/{name}", sentence) in page, name


def test_what_the_guide_says_of_the_curated_run_is_what_was_measured():
    found = plot.study("kwanzaa_curated_small")["evaluations"]["history_notes"]
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
    study = plot.study("kwanzaa_small")
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
