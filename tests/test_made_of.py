"""A lesson is executed again when what it used has changed, and not for a comment."""

import os
import sys

import pytest

from tools import made_of


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name, place in (("ROOT", ""), ("PACKAGE", "cria_tricks"), ("RESULTS", "benchmarks/results")):
        monkeypatch.setattr(made_of, name, tmp_path / place)
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(made_of, "_read", set())
    (tmp_path / "cria_tricks" / "one.py").write_text("x = 1\n")
    (tmp_path / "benchmarks" / "results" / "one.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        ("cria_tricks/one.py", "# why\nx = 1  # so\n", False),
        ("cria_tricks/one.py", "x = 2\n", True),
        ("benchmarks/results/one.json", "{ }", True),
        ("benchmarks/results/two.json", "{}", True),
        ("benchmarks/results/card/two.json", "{}", True),
    ],
)
def test_what_changes_the_hash(root, file, text, changes):
    names = ["cria_tricks/one.py", "benchmarks/results", "benchmarks/results/one.json"]
    before = made_of.digest(names), made_of.digest([made_of.EVERYTHING])
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text)
    os.utime(root / file, ns=(1, 1))
    after = made_of.digest(names), made_of.digest([made_of.EVERYTHING])
    assert [a != b for a, b in zip(after, before, strict=True)] == [changes] * 2


def test_comments_count_where_a_page_shows_lines(root):
    before = made_of.digest(["cria_tricks/one.py"]), made_of.digest([made_of.EVERYTHING], lines=True)
    (root / "cria_tricks" / "one.py").write_text("# why\nx = 1\n")
    os.utime(root / "cria_tricks" / "one.py", ns=(1, 1))
    assert made_of.digest(["cria_tricks/one.py"]) == before[0]
    assert made_of.digest([made_of.EVERYTHING], lines=True) != before[1]


def test_a_file_that_is_gone_changes_it_too(root):
    before = made_of.digest(["cria_tricks/one.py"])
    (root / "cria_tricks" / "one.py").unlink()
    assert made_of.digest(["cria_tricks/one.py"]) != before


@pytest.mark.parametrize(
    ("event", "arguments", "notes"),
    [
        ("open", ["benchmarks/results/one.json", "r", 0], ["benchmarks/results/one.json"]),
        ("os.scandir", ["benchmarks/results"], ["benchmarks/results"]),
        ("os.listdir", ["cria_tricks"], []),
        ("open", ["cria_tricks/one.py", "r", 0], []),
        ("open", ["build/other.json", "r", 0], []),
        ("subprocess.Popen", ["nvidia-smi", ["nvidia-smi", "-L"], None, None], []),
        ("subprocess.Popen", [sys.executable, [sys.executable, "-m", "cria_tricks"], None, None], [made_of.EVERYTHING]),
        ("subprocess.Popen", ["/bin/sh", ["/bin/sh", "-c", "cd x && cria plan"], None, None], [made_of.EVERYTHING]),
        ("os.system", [b"python -m cria_tricks"], [made_of.EVERYTHING]),
        ("os.fork", [], [made_of.EVERYTHING]),
    ],
)
def test_what_is_noted(root, event, arguments, notes):
    if event in ("open", "os.scandir", "os.listdir"):
        arguments[0] = str(root / arguments[0])
    made_of._hear(event, tuple(arguments))
    assert sorted(made_of._read) == notes


def test_the_modules_that_are_imported_are_used(monkeypatch):
    monkeypatch.setattr(made_of, "_read", set())
    monkeypatch.delitem(sys.modules, made_of.SPAWNS, raising=False)
    assert {"tools/made_of.py", "tests/test_made_of.py"} <= set(made_of.used())
    made_of._hear("os.fork", ())
    assert made_of.used() == [made_of.EVERYTHING]
    made_of._read.clear()
    monkeypatch.setitem(sys.modules, made_of.SPAWNS, None)
    assert made_of.used() == [made_of.EVERYTHING]
