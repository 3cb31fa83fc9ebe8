"""A plugin of pytest: which tests take most CPU, their child processes included: ``pytest -p tools.cpu_seconds``.

Seconds of a clock depend on what else runs on a machine, and CPU seconds hardly do. A fixture counts for the test that
asks for it first. All tests and their seconds are left in ``build/cpu_seconds.json``.
"""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MOST = 10
"""How many tests are listed."""
TAKEN: dict[str, float] = {}
"""CPU seconds of each test [s]."""
FILE = Path(__file__).parents[1] / "build" / "cpu_seconds.json"
NAME = "CPU seconds"
"""Of the property by which a process of xdist tells them to the one that lists them."""
START = pytest.StashKey[float]()


def so_far() -> float:
    """CPU seconds of this process and of its child processes, those that have ended and those that run [s]."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _of_children(os.getpid())


def _of_children(process: int) -> float:
    """CPU seconds of all that run below a process [s]. Only Linux tells without a look at every process there is."""
    taken = 0.0
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # one has ended since, and its parent counts it
            for child in path.read_text().split():
                ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
                taken += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") + _of_children(int(child))
    return taken


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any) -> None:
    """Count one test, with its fixtures."""
    item.stash[START] = so_far()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Add the seconds to the last report of a test."""
    report = yield
    if call.when == "teardown":
        # less than nothing: a process has ended whose parent did not wait for it, so nobody counts its seconds any more
        report.user_properties.append((NAME, max(0.0, so_far() - item.stash[START])))
    return report


def pytest_runtest_logreport(report: Any) -> None:
    """Read them there."""
    if report.when == "teardown":
        TAKEN[report.nodeid] = dict(report.user_properties)[NAME]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the most expensive tests."""
    terminalreporter.section(f"{sum(TAKEN.values()):.0f} CPU seconds in {len(TAKEN)} tests; those that took most")
    for name, seconds in sorted(TAKEN.items(), key=lambda one: -one[1])[:MOST]:
        terminalreporter.write_line(f"{seconds:7.1f}  {name}")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({name: round(seconds, 2) for name, seconds in TAKEN.items()}, indent=0))
