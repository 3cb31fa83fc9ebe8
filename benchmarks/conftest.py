"""What `pytest --benchmark-only` takes, and how a case comes into its table.

pytest --benchmark-only                                        # all, on whatever is here
pytest --benchmark-only --profile t4                           # a CUDA card held to what a T4 can do
pytest --benchmark-only -k nf4 --shape smollm2 --tokens 512
pytest --benchmark-only --benchmark-json mine.json; python -m tools.figures --mine mine.json --into mine
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cria_tricks.bench import results, tables
from cria_tricks.bench.results import Case
from cria_tricks.bill.bill import WORKSPACE_CONFIG
from cria_tricks.common.errors import BadInput

CASES = pytest.StashKey[list[Case]]()


def pytest_configure(config):
    """Begin with no case, and with cuBLAS' workspaces as a T4 has them by default, since the bill counts those."""
    config.stash[CASES] = []
    if not config.getoption("benchmark_only"):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE_CONFIG)
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("benchmarks run one after the other: leave out -n")


class ReplayedClock:
    """pytest-benchmark's clock, moved on by the trainer's own times.

    A step of the real trainer cannot be called on its own, so a case trains all its steps in one run, and each round
    then takes exactly what the trainer measured for it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def round(self, seconds: Iterator[float]) -> None:
        """Let one round pass."""
        self.now += next(seconds)


clock = ReplayedClock()


def pytest_collection_modifyitems(items):
    """Every benchmark is timed by that clock."""
    for item in items:
        if item.path.name.startswith("bench_"):
            item.add_marker(pytest.mark.benchmark(timer=clock))


@pytest.fixture(scope="session")
def setup(request) -> Iterator[Any]:
    """The session's setup, on the device that the session is about."""
    from cria_tricks import hardware

    given = {name: request.config.getoption(name) for name in ("shape", "tokens", "rounds")}
    profile = request.config.getoption("profile")
    try:
        with hardware.profile(profile) if profile else contextlib.nullcontext():
            # here, because a profile is refused before these take seconds
            from cria_tricks.bench.case import default_setup
            from cria_tricks.load.model import quiet_libraries

            quiet_libraries()
            yield replace(default_setup(), **{name: value for name, value in given.items() if value})
    except BadInput as refused:
        pytest.exit(str(refused), returncode=2)


@pytest.fixture
def step(request, benchmark, setup) -> Callable[..., Case]:
    """Measure a case of a bench, and hand its rounds to pytest-benchmark.

    All but ``off`` are held against ``off``, unless they say another.
    """
    from cria_tricks.bench.case import measure

    def run(
        bench: str, name: str, words: str, against: str = "off", lengths: Sequence[int] = (), **changes: Any
    ) -> Case:
        against = "" if name == "off" else against
        case = measure(bench, name, words, replace(setup, **changes), against, lengths)
        return keep(request.config, benchmark, case)

    return run


def keep(config: Any, benchmark: Any, case: Case) -> Case:
    """Put a case into pytest-benchmark's table and JSON, and into the results."""
    config.stash[CASES].append(case)
    benchmark.group = case.bench
    if folder := config.getoption("results"):
        results.write(case, folder)
    benchmark.extra_info.update(case.model_dump(mode="json", exclude={"seconds", "versions", "bench", "name", "date"}))
    if not case.seconds:
        pytest.skip(f"{case.status}: {case.why}")  # nothing was timed, and pytest-benchmark's table has no row for that
    benchmark.pedantic(clock.round, args=(iter(case.seconds),), rounds=len(case.seconds))
    return case


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """All cases, those without a time included, for ``tools/figures.py``."""
    output_json[results.IN_BENCHMARK_JSON] = [case.model_dump(mode="json") for case in config.stash[CASES]]


def pytest_terminal_summary(terminalreporter, config):
    """Bytes beside seconds, which pytest-benchmark's own table has not."""
    cases = config.stash[CASES]
    if not cases:
        return
    terminalreporter.section("bytes and tokens")
    for case in cases:
        terminalreporter.write_line(tables.line(case))
