"""The ladder that films and home show: every step is lower than the one before."""

import itertools
import re
from pathlib import Path

from cria_tricks.common.figures import GIB
from cria_tricks.common.themes import PARTS, THEMES
from cria_tricks.course.job import CAPSTONE
from cria_tricks.predict import toggles
from tools import ladder
from tools.fit import show

ROOT = Path(__file__).parents[1]


def test_every_rung_is_lower():
    for (_, before), (label, after) in itertools.pairwise(ladder.bills().items()):
        assert before.peak_bytes - after.peak_bytes > 0.5 * GIB, f"{label}: nobody would see it"


def test_the_ladder_begins_with_nothing_and_ends_with_the_capstone():
    fields = list(itertools.chain(*ladder.LADDER_STEPS.values()))
    assert fields == toggles.switched_on(CAPSTONE), "not in the order of the lessons"
    *_, last = ladder.bills().values()
    assert last == toggles.Target(last.step.shape, last.step.device).memory(CAPSTONE)


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
