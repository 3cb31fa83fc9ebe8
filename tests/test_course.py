"""What the lessons share, where the lessons themselves do not show it."""

from types import SimpleNamespace

import pytest
import torch

from cria_tricks import course
from cria_tricks.bench import case as cases
from cria_tricks.course import measured


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
