"""The guard of the checkout sees what a test leaves there, and in the folder that tests are started in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUARD = """
from pathlib import Path
from tests.leftovers import Leftovers
def pytest_configure(config):
    config.pluginmanager.register(Leftovers(Path(__file__).parent))
"""
PLANTED = """
import pytest
from pathlib import Path
HERE = Path(__file__).parent

@pytest.fixture
def until_later():
    yield
    (HERE / "runs" / "smoke").mkdir(parents=True)
    (HERE / "runs" / "smoke" / "report.json").write_text("{}")

def test_new(until_later): pass
def test_changed(): (HERE / "kept.txt").write_text("b")
def test_gone(): (HERE / "kept.txt").unlink()
def test_relative(): Path("runs").mkdir()
def test_good(tmp_path): (tmp_path / "mine.txt").write_text("a")
def test_in_outputs():
    (HERE / "build").mkdir()
    (HERE / "build" / "kept.txt").write_text("a")
def test_away(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_each_guilty_test_fails_and_no_other(processes, tmp_path):
    (tmp_path / "conftest.py").write_text(GUARD)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "kept.txt").write_text("a")
    (tmp_path / "runs").mkdir()  # was there before, as `make train` leaves it
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    side_by_side = ["--numprocesses", str(processes), "--dist", "loadfile"]  # one file: tests keep their order
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", *side_by_side, str(tmp_path)],
        cwd=tmp_path, env=alone | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    said = {
        line.split(" ")[1].rpartition("::")[2]: line
        for line in done.stdout.splitlines()
        if line.startswith("ERROR test_")
    }
    assert list(said) == ["test_new", "test_changed", "test_gone", "test_relative"], done.stdout + done.stderr
    assert done.returncode == 1
    left = "left files that are new, changed or gone in the"
    assert f"{left} checkout: {Path('runs/smoke/report.json')}. Write to tmp_path" in done.stdout
    assert done.stdout.count(f"{left} checkout: kept.txt.") >= 2
    assert f"{left} working folder: runs. Write" in done.stdout
