"""Figures and tables of the site are those of the committed results, to the byte."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plot

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
    assert adapter["cut_off"] == adapter["learnt_by_heart"] == 0
