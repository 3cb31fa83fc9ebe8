"""Which tests ``make test`` runs: all but those that ``tiers.toml`` leaves to ``make test-all``, with its reasons."""

import collections
import math
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT = tomllib.loads((ROOT / "tests" / "tiers.toml").read_text(encoding="utf-8"))["left"]
KEEP: dict[str, float] = {test: theme.get("keep", 0) for theme in LEFT for test in theme["tests"]}
KEEP |= {test: math.inf for theme in LEFT for test in theme.get("but", ())}
"""Of what ``tiers.toml`` names, how many cases of each function stay in ``make test``."""


def entry(path: str, function: str = "", case: str = "") -> str | None:
    """Find the entry for a test or for a file of tests: a case's before its function's, its file's and its folder's."""
    names = [f"{path}::{case}", f"{path}::{function}", path, *(parent.as_posix() for parent in Path(path).parents)]
    return next((name for name in names if name in KEEP), None)


def keeps(path: str, function: str = "", case: str = "") -> float:
    """How many cases of a test's function stay."""
    found = entry(path, function, case)
    return math.inf if found is None else KEEP[found]


def stays(place: int, cases: int, keep: float) -> bool:
    """Whether one of a function's cases stays: so many of them, evenly spread."""
    return keep >= cases or (place * keep) // cases != ((place - 1) * keep) // cases


class Tiers:
    """A plugin that takes one tier.

    Args:
        tier: ``core``, which is ``make test``, or ``rest``, which is what it leaves to ``make test-all``.
    """

    def __init__(self, tier: str):
        self.tier, self.left = tier, False

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Do not even import a file of which nothing is wanted."""
        if collection_path.suffix != ".py":
            return None
        path = collection_path.relative_to(ROOT).as_posix()
        all_of_it = {keeps(path), *(keep for test, keep in KEEP.items() if test.startswith(f"{path}::"))}
        return all_of_it == ({0} if self.tier == "core" else {math.inf}) or None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests of the other tier."""
        functions: dict[tuple[str, str], list[pytest.Item]] = collections.defaultdict(list)
        for item in items:
            functions[item.nodeid.partition("::")[0], getattr(item, "originalname", item.name)].append(item)
        core = {
            item.nodeid
            for (path, function), cases in functions.items()
            for place, item in enumerate(cases)
            if stays(place, len(cases), keeps(path, function, item.name))
        }
        for case in KEEP:
            path, _, name = case.partition("::")
            cases = functions.get((path, name.partition("[")[0]), []) if "[" in name else []
            if cases and case not in {item.nodeid for item in cases}:
                raise pytest.UsageError(f"tests/tiers.toml: {case}: there is no such case")
        left = [item for item in items if (item.nodeid in core) != (self.tier == "core")]
        items[:] = [item for item in items if (item.nodeid in core) == (self.tier == "core")]
        if left:
            self.left = True
            config.hook.pytest_deselected(items=left)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A file of which nothing is in this tier is no failure."""
        if self.left and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was not run."""
        if self.tier == "core":
            terminalreporter.section("not run here, but by `make test-all`")
            for theme in LEFT:
                terminalreporter.write_line(theme["theme"])
            terminalreporter.write_line(
                "and by `make check-all`: all cases of each sweep, other processors, other versions of the libraries, "
                "and mistakes that are put into the package on purpose, which tests must notice"
            )
