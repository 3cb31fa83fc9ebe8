"""The picture of README and home: it is drawn from the estimate, and every rung is lower than the one before."""

import importlib.metadata
import itertools
import re
from pathlib import Path

import pytest

from cria_tricks.bench.style import GIB
from cria_tricks.common.themes import PARTS, THEMES
from cria_tricks.course.job import CAPSTONE
from cria_tricks.predict import toggles
from tools import ladder
from tools.fit import show

ROOT = Path(__file__).parents[1]


def test_the_pictures_are_drawn_from_the_estimate():
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    if importlib.metadata.version("matplotlib") != pinned:
        pytest.skip(f"other versions than matplotlib {pinned} draw other paths")
    kept = {path.name: path.read_bytes() for path in ladder.FOLDER.iterdir()}
    assert kept == ladder.pictures(), "run: python -m tools.ladder"


def test_every_rung_is_lower_and_no_byte_is_lost():
    rungs, bills = ladder.rungs(), ladder.bills()
    assert [rung.peak for rung in rungs] == [bill.peak_bytes for bill in bills.values()]
    for before, after in itertools.pairwise(rungs):
        assert before.peak - after.peak > 0.5 * GIB, f"{after.label}: nobody would see it"


def test_the_ladder_begins_with_nothing_and_ends_with_the_capstone():
    fields = list(itertools.chain(*ladder.RUNGS.values()))
    assert sorted(fields) == sorted(toggles.switched_on(CAPSTONE))
    *_, last = ladder.bills().values()
    assert last == toggles.Target(last.facts.shape, last.facts.device).memory(CAPSTONE)


def test_a_part_of_the_memory_has_one_colour_in_pictures_and_on_the_page():
    """The page's groups have the same order, and the classes g0 to g4."""
    css = (ROOT / "docs/assets/fit.css").read_text(encoding="utf-8")
    assert show.GROUPS[: len(PARTS)] == PARTS
    names = {line.name for bill in ladder.bills().values() for moment in bill.moments for line in moment.lines}
    for name in names - {"batch"}:
        assert show.group_of(name) == ladder.group_of(name), name
    for theme, start in (("light", ".fit {"), ("dark", '[data-md-color-scheme="slate"] .fit {')):
        rule = next(line for line in css.splitlines() if line.startswith(f"{start} --c0"))
        assert re.findall(r"--c[0-4]: (#\w+)", rule) == list(THEMES[theme].parts)
