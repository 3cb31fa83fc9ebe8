"""Run the tests that need a CUDA card, from a checkout or from an installed package, and read how they went."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
IN_PACKAGE = PACKAGE / "gpu_tests"
"""Where the wheel has its copy of the tests; a checkout has them beside the package."""
FOLDER = (IN_PACKAGE if IN_PACKAGE.is_dir() else PACKAGE.parent) / "tests" / "gpu"


class Outcome(NamedTuple):
    """How the tests went.

    Attributes:
        passed: how many.
        failed: how many, errors included.
        skipped: how many.
        last_lines: the end of pytest's output.
    """

    passed: int
    failed: int
    skipped: int
    last_lines: tuple[str, ...]


def missing() -> str:
    """Say why the tests cannot run here; empty if they can."""
    if not FOLDER.is_dir():
        return f"the tests are not in {FOLDER}"
    if importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    return ""


def run() -> Outcome:
    """Run the tests in a process of their own, which may fail without harm to this one."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    found = outcome(done.stdout)
    if not (found.passed or found.failed or found.skipped):  # pytest did not come so far as to run one
        last_lines = tuple((done.stdout + done.stderr).strip().splitlines()[-5:])
        found = found._replace(failed=1, last_lines=last_lines)
    return found


def outcome(text: str) -> Outcome:
    """Read the outcome of pytest off its output."""
    lines = text.strip().splitlines()
    words = " ".join(lines[-1:]).replace(",", "").split()
    counts = {word: int(number) for number, word in itertools.pairwise(words) if number.isdigit()}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return Outcome(counts.get("passed", 0), failed, counts.get("skipped", 0), tuple(lines[-5:]))
