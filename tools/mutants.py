"""Change one operator, number or word of the package at a time, and see whether its tests notice.

The changes are cosmic-ray's. A seed draws the sample: places first, then one of the changes possible there, so that a
place with twelve possible operators counts no more than a place with a single number. Type hints are left out, because
a change there is a failed import and not a wrong number. Results are kept in ``build/mutants``, and a second call
continues with them.

Use:
    python -m tools.mutants --seed 1 --count 300
    python -m tools.mutants --count 40 --of bill tricks trainer data --tier core    # by the tests of `make test` alone
    python -m tools.mutants --count 40 --of bill tricks trainer data --tier rest    # its survivors, by `make test-all`
"""

import argparse
import fnmatch
import itertools
import random
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, WorkItem, WorkResult

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "mutants"
SETTINGS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))
SECONDS = 600
"""After which the tests of a mutant are stopped; a mutant that never ends counts as noticed."""
HINTS = "BitOr"
"""The operator of type hints, which nothing else in the package uses but sets and flags."""


def tests_of(module: str) -> list[str]:
    """List the tests that concern a module of the package, by ``tests/mutants.toml``; none if it is left out."""
    for pattern, tests in SETTINGS["tests"].items():
        if fnmatch.fnmatch(module, pattern):
            named = [test.format(name=Path(module).stem) for test in tests]
            return [test for test in named if (ROOT / test.partition("::")[0]).exists()]
    return []


def draw(seed: int, count: int, of: Sequence[str] = ()) -> list[MutationSpec]:
    """Draw a sample of the possible changes; it is the same for the same seed and the same package.

    Args:
        seed: of the draw.
        count: how many.
        of: folders of the package; none for all of it.
    """
    package = ROOT / "cria_tricks"
    chosen = [package / folder for folder in of] or [package]
    modules = sorted(
        path for folder in chosen for path in folder.rglob("*.py") if tests_of(path.relative_to(package).as_posix())
    )
    possible: dict[tuple[str, tuple[int, int]], list[MutationSpec]] = defaultdict(list)
    everything = WorkDB(":memory:", WorkDB.Mode.create)
    init(modules, everything, {})
    for item in everything.work_items:
        (mutation,) = item.mutations
        if HINTS not in mutation.operator_name:
            possible[str(mutation.module_path), mutation.start_pos].append(mutation)
    of_seed = random.Random(seed)
    places = of_seed.sample(sorted(possible), min(count, len(possible)))
    return [of_seed.choice(sorted(possible[place], key=lambda m: (m.operator_name, m.occurrence))) for place in places]


def session(seed: int, count: int, of: Sequence[str] = (), tier: str = "") -> Path:
    """Find the database of a sample, or make it if it is not there yet."""
    found = _file(seed, count, of, tier)
    if not found.exists():
        drawn = survivors(_file(seed, count, of, "core")) if tier == "rest" else draw(seed, count, of)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with use_db(found) as database:
            for number, mutation in enumerate(drawn):
                database.add_work_item(WorkItem.single(f"{number:04}", mutation))
    return found


def _file(seed: int, count: int, of: Sequence[str], tier: str) -> Path:
    return FOLDER / f"{'-'.join(filter(None, ['seed', str(seed), str(count), *of, tier]))}.sqlite"


def survivors(session: Path) -> list[MutationSpec]:
    """List the mutants of a sample that its tests did not notice.

    Raises:
        SystemExit: if not all of them were tried.
    """
    if not session.exists():
        sys.exit("try them with --tier core first")
    with use_db(session) as database:
        if any(database.pending_work_items):
            sys.exit("some were not tried yet; run --tier core to its end first")
        done = sorted(database.completed_work_items, key=lambda pair: pair[0].job_id)
        return [item.mutations[0] for item, result in done if not result.is_killed]


def copy_to(place: Path) -> Path:
    """Copy the files that git tracks into a folder in which one worker may change them."""
    shutil.rmtree(place, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def command(place: Path, tests: Iterable[str], workers: int = 0, tier: str = "") -> str:
    """Return a shell command that runs tests in a copy and stops at the first failure."""
    only = f"--tier {tier} " if tier else ""
    run = f"{sys.executable} -m pytest -x -n{workers} -q -p no:cacheprovider {only}{' '.join(tests)}"
    return f"env -C {place} PYTHONPATH={place} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= {run}"


def refuse_red_tests(place: Path, modules: set[str], workers: int, tier: str) -> None:
    """Stop if a test fails without any change, because it would seem to notice every mutant."""
    tests = sorted({test for module in modules for test in tests_of(module)})
    done = subprocess.run(command(place, tests, workers, tier).split(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"these tests fail without a mutant:\n{done.stdout[-2000:]}")


def work(place: Path, items: list[WorkItem], database: WorkDB, tier: str) -> None:
    """Try mutants one after the other in a copy of the checkout."""
    for item in items:
        (mutation,) = item.mutations
        module = mutation.module_path.relative_to(ROOT)
        tests = command(place, tests_of(module.relative_to("cria_tricks").as_posix()), tier=tier)
        here = MutationSpec(
            place / module, mutation.operator_name, mutation.occurrence, mutation.start_pos, mutation.end_pos
        )
        result = mutate_and_test([here], tests, SECONDS)
        database.set_result(item.job_id, result)
        print(f"{item.job_id} {result.test_outcome.value if result.test_outcome else '?':9} {module}", flush=True)


def reason_of(module: str, result: WorkResult) -> str:
    """Give the reason why a mutant is the same program, if ``tests/mutants.toml`` has one."""
    added = {line[1:].strip() for line in (result.diff or "").splitlines() if line[:1] == "+" and line[:3] != "+++"}
    for entry in SETTINGS.get("equivalent", ()):
        if entry["module"] == module and entry["change"].strip() in added:
            return str(entry["reason"])
    return ""


def report(database: WorkDB) -> str:
    """Write which mutants were not noticed, and how many were."""
    done = sorted(database.completed_work_items, key=lambda pair: pair[0].job_id)
    survivors: list[str] = []
    equivalent: list[str] = []
    for item, result in done:
        module = item.mutations[0].module_path.relative_to(ROOT / "cria_tricks").as_posix()
        if not result.is_killed:
            reason = reason_of(module, result)
            lines = (line for line in (result.diff or "").splitlines() if line[:1] in "+-" and line[1:2] != line[:1])
            where = f"{item.job_id} {module}:{item.mutations[0].start_pos[0]} {item.mutations[0].operator_name}"
            said = "\n".join([where, *lines])
            (equivalent if reason else survivors).append(f"{said}\nequivalent: {reason}" if reason else said)
    killed = len(done) - len(survivors) - len(equivalent)
    judged = max(1, len(done) - len(equivalent))
    counts = f"{killed} noticed, {len(survivors)} not, {len(equivalent)} equivalent"
    return "\n\n".join([*survivors, *equivalent, f"{len(done)} mutants: {counts}: {killed / judged:.1%}"])


def main() -> None:
    """Draw a sample, try the mutants that were not tried yet, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="mutants")
    parser.add_argument("--workers", type=int, default=2, help="side by side")
    parser.add_argument("--of", nargs="+", default=[], help="folders of the package, instead of all of it")
    parser.add_argument(
        "--tier",
        choices=("core", "rest"),
        default="",
        help="core: the tests of `make test`; rest: its survivors, by the others",
    )
    parser.add_argument("--show", action="store_true", help="print what was found, and try nothing")
    chosen = parser.parse_args()
    with use_db(session(chosen.seed, chosen.count, chosen.of, chosen.tier)) as database:
        pending = sorted(database.pending_work_items, key=lambda item: item.job_id)
        if pending and not chosen.show:
            places = [copy_to(FOLDER / f"copy-{n}") for n in range(chosen.workers)]
            refuse_red_tests(places[0], {_module(item) for item in pending}, chosen.workers, chosen.tier)
            with ThreadPoolExecutor(len(places)) as threads:
                parts = [pending[n :: len(places)] for n in range(len(places))]
                list(threads.map(work, places, parts, itertools.repeat(database), itertools.repeat(chosen.tier)))
        print(report(database))


def _module(item: WorkItem) -> str:
    return item.mutations[0].module_path.relative_to(ROOT / "cria_tricks").as_posix()


if __name__ == "__main__":
    main()
