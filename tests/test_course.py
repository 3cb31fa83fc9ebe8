"""What the lessons share, where the lessons themselves do not show it."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cria_tricks
from cria_tricks import course
from cria_tricks.bench import case as cases
from cria_tricks.course import measured

ROOT = Path(__file__).parents[1]


def test_with_a_card_a_lesson_measures_both_steps_and_draws_on_as_if_there_were_none(monkeypatch, capsys):
    """The card is a CPU that course takes for one: the steps and the table are real."""
    has_one = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True), random=torch.random)
    monkeypatch.setattr(measured, "torch", has_one)
    asked = []
    monkeypatch.setattr(cases, "measure", lambda *case, real=cases.measure: asked.append(real(*case)) or asked[-1])
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    course.on_a_gpu("nf4", off="peft=lora", on="peft=lora quantization=nf4", shorter=2)
    assert torch.equal(torch.rand(3), drawn)
    off, on = asked
    assert (off.status, on.status, on.against) == ("ok", "ok", off.name)
    assert off.tokens_per_row == on.tokens_per_row == cases.default_setup().tokens // 2
    assert on.peak_allocated_bytes < off.peak_allocated_bytes
    said = capsys.readouterr().out
    assert off.device in said
    assert "| `nf4` on |" in said


def test_without_a_card_it_shows_what_is_committed_and_says_so_when_nothing_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    course.on_a_gpu("nf4", off="", on="")
    assert "| `nf4` on |" in capsys.readouterr().out
    monkeypatch.setattr(measured.results, "COMMITTED", tmp_path)
    course.on_a_gpu("nf4", off="", on="")
    assert capsys.readouterr().out == "no GPU here, and no committed results of nf4 next to this package\n"


def test_a_known_mistake_gets_the_hint_that_fits_it_and_any_other_number_the_usual_one():
    grade = course.about(12, "think of both tables", mistakes={6: "there are two tables", 24: "two bytes, not four"})
    grade(12.1)
    for wrong, hint in ((6, "there are two tables"), (24.1, "two bytes, not four"), (13, "think of both tables")):
        with pytest.raises(AssertionError, match=f"^not {wrong}[.0]*; {hint}$"):
            grade(wrong)


def taken_by(lesson: Path) -> set[tuple[str, str]]:
    """Return what a lesson imports from the package, each as (module, name); the name of a whole module is empty."""
    found = set()
    for node in ast.walk(ast.parse(lesson.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {(name.name, "") for name in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "cria_tricks"}


def is_on_the_surface(module: str, name: str) -> bool:
    if module == "cria_tricks":
        return name in ("", "course", *cria_tricks.__all__)
    if module == "cria_tricks.course":
        return name in (*course._PLACES, "register_attention", "hybrid_demo")
    of_techniques = ("cria_tricks.techniques", "cria_tricks.switches")
    return module.startswith(of_techniques) and "folds" not in (name, module.rpartition(".")[2])


@pytest.mark.parametrize("lesson", sorted(ROOT.glob("lessons/*.py")), ids=lambda lesson: lesson.stem)
def test_lessons_stand_on_the_course_on_public_names_and_on_techniques(lesson):
    assert {one for one in taken_by(lesson) if not is_on_the_surface(*one)} == set()


def test_every_name_of_the_course_is_taken_by_a_lesson_and_is_there():
    taken = set()
    for lesson in ROOT.glob("lessons/*.py"):
        taken |= {name for _, name in taken_by(lesson)}
        taken |= set(re.findall(r"\bcourse\.(\w+)", lesson.read_text(encoding="utf-8")))
    assert set(course._PLACES) - taken == set()
    for name in course._PLACES:
        assert getattr(course, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        course.__getattr__("nothing")
