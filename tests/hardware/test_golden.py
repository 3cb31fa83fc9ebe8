"""What a step costs, and the tables of cards and machines: every figure as it was written down.

One that differs is either a mistake or meant; then ``python -m tests.figures`` writes them anew.
The commit says why.
"""

import pytest

from tests import figures


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in ("steps", "tables") for case in figures.FILES[name][1]]
)
def test_the_figures_are_those_that_were_written_down(name, case):
    assert figures.computed(name, case) == figures.kept(name)[case]


@pytest.mark.parametrize("name", figures.FILES)
def test_a_file_has_the_cases_that_are_asked_for_and_no_others(name):
    assert list(figures.kept(name)) == list(figures.FILES[name][1])
