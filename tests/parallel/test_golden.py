"""What each of several processes holds, and when more of them stop helping: every figure as it was written down.

One that differs is either a mistake or meant; then ``python -m tests.figures`` writes them anew.
The commit says why.
"""

import pytest

from tests import figures


@pytest.mark.parametrize(
    ("name", "case"),
    [*((name, case) for name in ("processes", "doublings") for case in figures.FILES[name][1]), ("tables", "links")],
)
def test_the_figures_are_those_that_were_written_down(name, case):
    assert figures.computed(name, case) == figures.kept(name)[case]
