"""Lessons run from top to bottom in a real kernel, and the last as a plain script too, on the wheel alone."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
import torch
from nbclient import NotebookClient

from benchmarks.bench_techniques import BENCHES
from cria_tricks import course
from cria_tricks.bench.case import settings_of
from cria_tricks.hardware import T4
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import TECHNIQUES
from tools import executed, lesson_figures, notebooks
from tools.exercises import try_answers

CAPSTONE = notebooks.LESSONS / "kwanzaa.py"
UNSET = 'MIRROR = ""'
COLUMNS = 88
"""Of code: a page of the site shows so many without scrolling."""
LINES, CELLS = 170, 25
"""The most lines of code and cells that a first reading takes."""
VISIBLE = 295
"""The limit of lines for lessons that are not told anew yet."""
OURS = 2
"""So many imports of the package may the from-scratch part have."""


@pytest.fixture
def alone(tmp_path, monkeypatch, installed) -> Path:
    """A folder away from the repository, for a process that finds our package, no GPU and no network."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "of-jupyter" / name))
    (tmp_path / "drive").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path


def test_the_capstone_runs_as_a_script_and_goes_on_as_a_notebook_on_another_machine(alone, monkeypatch):
    mirror, run = alone / "drive" / "kwanzaa", alone / "work" / "kwanzaa-run"
    lesson = CAPSTONE.read_text(encoding="utf-8")
    assert lesson.count(UNSET) == 1
    (alone / "lesson.py").write_text(_solved(lesson).replace(UNSET, f'MIRROR = "{mirror}"'), encoding="utf-8")
    command = [sys.executable, str(alone / "lesson.py")]
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(command, cwd=alone / "work", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "starting from the beginning" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.endswith(": right")] == [
        "1: right",
        "2: right",
        "3: right",
    ]
    assert [path.name for path in (alone / "work").iterdir()] == ["kwanzaa-run"]  # the failures left nothing
    weights = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert {"base", "adapter", "trivial"} <= json.loads((run / "eval-2" / "eval.json").read_text())["systems"].keys()
    assert "Nothing was sent" in done.stdout
    done = subprocess.run(command, cwd=alone / "work", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]  # "Run all" once more

    shutil.rmtree(run)  # the machine is gone; the drive is not
    book = nbformat.read(notebooks.NOTEBOOKS / "kwanzaa.ipynb", as_version=4)
    settings = next(cell for cell in book.cells if UNSET in cell.source)
    settings.source = settings.source.replace(UNSET, f'MIRROR = "{mirror}"')
    NotebookClient(book, timeout=executed.SECONDS, resources={"metadata": {"path": str(alone / "work")}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert f"going on from {mirror / 'checkpoints' / 'checkpoint-2'}" in said
    assert "step    1/2" not in said
    assert "\x1b" not in said, "a progress bar, drawn over and over"
    assert said.count(": not yet") == 3
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 3
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == weights


LESSONS = [path for path in notebooks.lessons() if path != CAPSTONE]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_and_its_checks_tell_right_from_wrong(lesson):
    """In a fresh kernel, in an empty folder, without a network; the run is the one that its page shows."""
    book = executed.execute(lesson)
    said = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", ()))
    assert "no committed results" not in said
    found = dict(book.metadata[executed.FOUND])
    for bench, *both in found.pop("on a GPU"):
        assert bench in {*BENCHES, "packing"}
        for words in both:
            resolve(with_settings(Recipe(), settings_of(words, T4)), T4)  # raises what a T4 cannot run
    assert found.pop("left behind") == []
    assert [check[:2] for check in found.pop("as it stands")] == [[1, "not yet"], [2, "not yet"], [3, "not yet"]]
    said = complaints(lesson, found)
    assert not said, "\n".join(said)


def complaints(lesson: Path, found: dict[str, Any]) -> list[str]:
    """What is wrong with a lesson's checks, by what they said of right and wrong answers and of wrong kinds."""
    wrong = executed.wrong_answers(lesson)
    said = [
        f"{exercise}: a solution is refused: {words}" for exercise, mark, words in found["solutions"] if mark != "right"
    ]
    said += [f"{n}: {wrong_of(wrong, n)} wrong answers are too few" for n in (1, 2, 3) if wrong_of(wrong, n) < 3]
    if [exercise for exercise, *_ in found["solutions"]] != [1, 2, 3]:
        said.append(f"not three exercises: {found['solutions']}")
    for (exercise, hint, code), (_, mark, words) in zip(wrong, found["wrong"], strict=True):
        if mark != "no":
            said.append(f"{exercise}: taken for {mark}:\n{code}")
        elif not hint or not re.search(hint, words, re.I):
            said.append(f"{exercise}: the hint of\n{code}is {words!r}, without {hint!r}")
    for kind in found["kinds"]:
        if not kind["returns"]:
            said.append(f"{kind['exercise']}: does not say what a right answer is")
        for exercise, mark, words in kind["found"]:
            if mark != "no" or ("Error: " in words and kind["returns"] not in words):
                said.append(f"{exercise}: an answer of the wrong kind is {mark!r}: {words}")
    return said


def wrong_of(wrong: list[tuple[int, str, str]], exercise: int) -> int:
    """How many wrong answers to an exercise there are."""
    return sum(number == exercise for number, _, _ in wrong)


def test_a_check_that_takes_anything_or_says_nothing_is_noticed(tmp_path, monkeypatch):
    lesson, hint = tmp_path / "made.py", "'too small or too large'"
    wrong = [f"# %% {n}: too (small|large)\nx{n} = {answer}\n" for n in (1, 2, 3) for answer in (1, 2, 9)]
    lesson.write_text("".join(wrong))
    monkeypatch.setattr(executed, "WRONG", tmp_path)
    asked = [[exercise, code] for exercise, _, code in executed.wrong_answers(lesson)]
    others = "".join(f"course.check({n}, x{n}, course.about(5, {hint}), 'a number')\n" for n in (2, 3))

    def found(grade: str, returns: str = "a number") -> list[str]:
        names = {"course": course, "x1": None, "x2": None, "x3": None}
        first = f"course.check(1, x1, {grade}, {returns!r})"
        return complaints(lesson, try_answers(names, [first, others], "x1 = x2 = x3 = 5", asked))

    assert found(f"course.about(5, {hint})") == []
    takes_anything = found("lambda answer: None")
    assert sum("taken for right" in line for line in takes_anything) == 3
    assert sum("wrong kind" in line for line in takes_anything) == 4
    takes_nine = found(f"lambda answer: course.about(5, {hint})(5 if answer == 9 else answer)")
    assert takes_nine == ["1: taken for right:\nx1 = 9\n"]
    assert len(found("course.about(5, 'no')")) == 3  # a hint that does not fit
    assert "does not say" in found(f"course.about(5, {hint})", returns="")[0]
    assert ["a solution is refused" in line for line in found(f"course.about(4, {hint})")] == [True]


def test_the_wheel_holds_what_the_lessons_need(installed):
    """They are run on the repository's package, and pip installs this one."""
    ours = {path.relative_to(notebooks.ROOT) for path in (notebooks.ROOT / "cria_tricks").rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path.parts}
    results = notebooks.ROOT / "benchmarks" / "results"
    committed = Path("cria_tricks") / "committed"
    ours |= {committed / path.relative_to(results) for path in results.rglob("*") if path.is_file()}
    ours |= {Path("cria_tricks/report") / name for name in ("film.css", "film.js")}  # for the page of cria film
    theirs = {path.relative_to(installed) for path in (installed / "cria_tricks").rglob("*") if path.is_file()}
    assert theirs == ours


@pytest.mark.parametrize("lesson", notebooks.lessons(), ids=lambda path: path.stem)
def test_a_lesson_has_the_skeleton(lesson):
    cells = jupytext.read(lesson).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert text.startswith("# ")
    assert not re.match(r"# \d+\. ", text), "a title gets its number from the list of lessons"
    assert "> **Promise.**" in text
    assert "> **Card.**" in text
    assert re.findall(r"^## (?:\d\. )?(\w+(?: \w+)*)", text, re.M) == [
        "The bill",
        "From scratch",
        "Prove it",
        "What it costs",
        "The production switch",
        "Where it breaks",
        "Exercises",
        "In one breath",
        "Sources",
    ]
    found = lesson_figures.figures(lesson)
    if asks_a_question(lesson):
        assert 800 <= found.words <= 1600, "words of the path, before In one breath"
        assert found.lines <= LINES, "lines of code in the path"
        assert found.cells <= CELLS, "cells of the path"
        assert +found.private == {}
        assert f"about {found.minutes} minutes" in text.replace("\n> ", " ").split("**Card.**")[1][:600]
        promise = re.search(r"> \*\*Promise\.\*\* (.+?)\n(?:>\n|\n)", text, re.S)
        assert promise
        assert 35 <= len(promise[1].replace("> ", "").split()) <= 75, "words of the promise"
    else:  # not told anew yet
        assert 800 <= found.words <= 1620, found.words
        assert found.lines <= VISIBLE, f"{found.lines} visible lines; {VISIBLE} in 88 columns are what 200 were in 120"
    whole = lesson.read_text(encoding="utf-8")
    assert "CUDA_VISIBLE_DEVICES" not in whole, "a lesson leaves the reader's card where it is; see pretend(this_cpu())"


def asks_a_question(lesson: Path) -> bool:
    """Whether a lesson is told anew: those that are begin with the question that they answer."""
    return "question" in jupytext.read(lesson, fmt="py:percent").metadata


TOLD_ANEW = [path for path in notebooks.lessons() if asks_a_question(path)]


def from_scratch(lesson: Path) -> list[str]:
    """The cells of a lesson's from-scratch part that a first reading takes."""
    section, code = "", []
    for cell in jupytext.read(lesson, fmt="py:percent").cells:
        if cell.cell_type == "markdown" and (heading := re.search(r"^## (?:\d\. )?(.*)$", cell.source, re.M)):
            section = heading[1]
        away = set(cell.metadata.get("tags", [])) & {notebooks.FOLDED, notebooks.DEEP, notebooks.PREDICT}
        if cell.cell_type == "code" and section.startswith("From scratch") and not away:
            code.append(cell.source)
    return code


@pytest.mark.parametrize("lesson", TOLD_ANEW, ids=lambda path: path.stem)
def test_the_from_scratch_part_runs_alone_in_an_empty_notebook(lesson, monkeypatch, tmp_path):
    """With torch and at most two imports of ours, and without anything from the cells before it."""
    code = "\n".join(from_scratch(lesson))
    modules = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in modules]
    assert sum(name.startswith("cria_tricks") for name in names) <= OURS
    others = {name.partition(".")[0] for name in names} - {"torch", "cria_tricks"} - sys.stdlib_module_names
    assert not others
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(compile(code, f"lessons/{lesson.name}, from scratch", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("lesson", TOLD_ANEW, ids=lambda path: path.stem)
def test_a_lesson_shows_its_switch_as_plain_code_and_what_it_is_worth_twice(lesson):
    """The plain code is that of the technique's module, which a test runs."""
    whole = lesson.read_text(encoding="utf-8")
    taught = [trick for trick in TECHNIQUES if lesson.stem == trick.TECHNIQUE.lesson]
    on = {toggle.partition("=")[0] for trick in taught for toggle in trick.TECHNIQUE.switches} & set(
        toggles.switched_on(course.CAPSTONE)
    )
    if taught:
        assert ".PLAIN" in whole
        assert re.search(r"cria (train|plan) ", whole)
    for field in on:
        assert re.search(rf"show_worth\([^)]*\"{field}\"", whole), field


@pytest.mark.parametrize("lesson", notebooks.lessons(), ids=lambda path: path.stem)
def test_code_fits_a_page(lesson):
    """At most 88 columns; prose may be longer, because a browser wraps it."""
    cells = jupytext.read(lesson).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    code += [block for cell in cells if cell.cell_type == "markdown" for block in _fenced(cell.source)]
    assert [line for source in code for line in source.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize("script", notebooks.scripts(), ids=lambda path: path.stem)
def test_every_fold_says_what_is_inside(script):
    folded = [cell for cell in jupytext.read(script).cells if _tagged(cell, notebooks.FOLDED)]
    names = [cell.metadata.get("title", "") for cell in folded]
    assert all(len(name) > len("Code") for name in names), "write a title: # %% Draw figure 2 tags=[...]"
    assert len(set(names)) == len(names), names


@pytest.mark.parametrize("lesson", notebooks.lessons(), ids=lambda path: path.stem)
def test_every_lesson_takes_a_prediction_before_it_says_the_answer(lesson):
    """Each guess has one answer, which comes after it, and no two guesses are open at once under one name."""
    cells = [cell for cell in jupytext.read(lesson).cells if cell.cell_type == "code"]
    order = [
        "guess" if asks else "answer"
        for cell in cells
        for asks in [_tagged(cell, notebooks.PREDICT)] * (_tagged(cell, notebooks.PREDICT) or "reveal(" in cell.source)
    ]
    assert order, "no prediction"
    assert order == ["guess", "answer"] * (len(order) // 2), order
    assert all(cell.metadata["title"].startswith("Your guess: ") for cell in cells if _tagged(cell, notebooks.PREDICT))


def _tagged(cell: nbformat.NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def _fenced(text: str) -> list[str]:
    """Blocks of code in Markdown."""
    return re.findall(r"```\w*\n(.*?)```", text, re.S)


def test_the_capstones_checks_tell_right_from_wrong():
    """Without training: its checks need one function of an earlier cell, and the seconds of a step."""
    code = [cell.source for cell in jupytext.read(CAPSTONE).cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"CONFIGS": CONFIGS, "course": course, "seconds": 7.7}
    for needed in ("def lora_numbers", "bytes_at_rank_32 = None"):
        exec(next(cell for cell in code if needed in cell), names)
    asked = executed.exercises_of(CAPSTONE)
    said = complaints(CAPSTONE, try_answers(names, *asked.values()))
    assert not said, "\n".join(said)


def _solved(lesson: str) -> str:
    """The lesson with its own solutions behind the exercises."""
    solutions = re.search(r"<summary>Solutions</summary>.*?```python\n(.*?)# ```", lesson, re.S)
    assert solutions
    code = re.sub(r"^# ?", "", solutions[1], flags=re.M)
    exercise = lesson.index('# %% tags=["exercise"]')
    place = lesson.index("# %%", exercise + 1)
    return lesson[:place] + code + "\n" + lesson[place:]
