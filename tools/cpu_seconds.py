"""A plugin of pytest: which tests take most CPU, their child processes included: ``pytest -p tools.cpu_seconds``.

Seconds of a clock depend on what else runs on a machine, and CPU seconds hardly do. Leave out ``-n``: the processes of
xdist report nothing. A fixture counts for the test that asks for it first.
"""

import collections
import os
from collections.abc import Iterator
from typing import Any

import pytest

MOST = 10
"""How many files and how many tests are listed."""
TAKEN: dict[str, float] = {}
"""CPU seconds of each test [s]."""


def so_far() -> float:
    """CPU seconds of this process, and of the child processes that have ended [s]."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Count one test, with its fixtures."""
    before = so_far()
    done = yield
    TAKEN[item.nodeid] = so_far() - before
    return done


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the most expensive files and tests."""
    files: dict[str, float] = collections.defaultdict(float)
    for name, seconds in TAKEN.items():
        files[name.partition("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds: {so_far():.0f}, of which {sum(TAKEN.values()):.0f} in {len(TAKEN)} tests")
    for counted in (files, TAKEN):
        for name, seconds in sorted(counted.items(), key=lambda one: -one[1])[:MOST]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
