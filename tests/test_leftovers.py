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
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

@pytest.fixture
def until_later():
    yield
    (HERE / "runs" / "smoke").mkdir(parents=True)
    (HERE / "runs" / "smoke" / "report.json").write_text("{}")

def test_new(until_later): pass
def test_changed(): (HERE / "kept.txt").write_text("b")
def test_moved(): (HERE / "kept.txt").rename(HERE / "moved.txt")
def test_gone(): (HERE / "moved.txt").unlink()
def test_relative(): Path("runs").mkdir()
def test_relative_of_another_process(): subprocess.run([sys.executable, "-c", "open('a', 'w')"], check=True)

def test_good(tmp_path): (tmp_path / "mine.txt").write_text("a")
def test_tidied():
    (HERE / "mine.txt").write_text("a")
    (HERE / "mine.txt").unlink()
def test_read(): assert (HERE / "conftest.py").read_text()
def test_in_outputs():
    (HERE / "build").mkdir()
    (HERE / "build" / "kept.txt").write_text("a")
def test_away(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
def test_another_process(): subprocess.run([sys.executable, "-c", f"open({str(HERE / 'theirs')!r}, 'w')"], check=True)
"""
GUILTY = ["new", "changed", "moved", "gone", "relative", "relative_of_another_process"]


@pytest.fixture
def planted(tmp_path):
    """Runs tests in a folder that nobody may change."""
    (tmp_path / "conftest.py").write_text(GUARD)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "kept.txt").write_text("a")
    (tmp_path / "runs").mkdir()  # was there before, as `make train` leaves it
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def run(*options: str, **environment: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", *options, str(tmp_path)]
        environment = alone | {"PYTHONPATH": str(ROOT)} | environment
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2", "--dist", "loadfile")], ids=["alone", "side by side"])
def test_each_guilty_test_fails_and_no_other(options, planted):
    done = planted(*options)
    errors = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("ERROR test_")]
    assert errors == [f"test_planted.py::test_{name}" for name in GUILTY], done.stdout + done.stderr
    assert done.returncode == 1
    left = "left files that are new, changed or gone in the"
    assert f"test_new {left} checkout: runs/smoke, runs/smoke/report.json. Write to tmp_path." in done.stdout
    assert f"test_moved {left} checkout: kept.txt, moved.txt." in done.stdout
    assert f"test_relative {left} working folder: runs." in done.stdout
    changed = "kept.txt, runs/smoke/report.json, theirs"
    assert f"changed in the checkout while the tests ran: {changed}\n" in done.stdout


@pytest.mark.parametrize(("wanted", "code"), [("", 0), ("unchanged", 1)])
def test_what_another_process_left_is_said_and_fails_the_run_where_that_is_asked(wanted, code, planted):
    done = planted("-k", "test_another_process", CRIA_CHECKOUT=wanted)
    assert "1 passed" in done.stdout
    assert "changed in the checkout while the tests ran: theirs\n" in done.stdout
    assert done.returncode == code
