"""A guess is compared with the answer in the words of ``course.reveal``, and a page gets each answer for its guess."""

import base64
import json
import re

import nbformat
import pytest

from cria_tricks import course
from cria_tricks.course import notebook
from tools import notebooks, pages
from tools.executed import LessonError

SAID = [
    (900, 1155.2, "MiB", "You said 900 MiB, it is 1,155 MiB: 22% too low."),
    (1300, 1155, "MiB", "You said 1,300 MiB, it is 1,155 MiB: 13% too high."),
    (100, 1155, "MiB", "You said 100 MiB, it is 1,155 MiB: too low by a factor of 11.6."),
    (24, 12, "", "You said 24, it is 12: 100% too high."),
    (25, 12, "", "You said 25, it is 12: too high by a factor of 2.1."),
    (1.5, 1.5, "times", "You said 1.5 times, it is 1.5 times: right."),
    (0.125, 0.25, "%", "You said 0.125 %, it is 0.25 %: 50% too low."),
    (-3, 5, "GiB", "You said -3 GiB, it is 5 GiB."),
    (7, 0, "GiB", "You said 7 GiB, it is 0 GiB."),
    (None, 1155, "MiB", "It is 1,155 MiB."),
    ("fall", "rise", "", "You said fall, the answer is rise."),
    ("rise", "rise", "", "You said rise, which is right."),
    (None, "rise", "", "The answer: rise."),
]
"""Guess, answer, unit, and what is said; the page's script must say the same (tests/site/test_predictions.py)."""


@pytest.mark.parametrize(("guess", "answer", "unit", "said"), SAID)
def test_what_is_said(guess, answer, unit, said):
    assert notebook.verdict(guess, answer, unit) == said


@pytest.mark.parametrize("untouched", [0, 0.0, None, ""])
def test_an_untouched_form_gets_the_answer_alone(untouched):
    assert notebook.verdict(untouched, 12, "GB") == "It is 12 GB."
    assert notebook.verdict(notebook.NO_GUESS, "rise") == "The answer: rise."


def test_words_in_the_place_of_a_number_stop_nothing():
    assert notebook.verdict("many", 12, "GB") == "It is 12 GB. Your guess is no number: 'many'."


def test_a_script_prints_it(capsys):
    course.reveal(900, 1155, "MiB")
    assert capsys.readouterr().out == "You said 900 MiB, it is 1,155 MiB: 22% too low.\n"


END = "So it is 12.\n\n## 2. The end\nWords."


def code(source, *answers, tags=(), **more):
    """A cell that was executed, with what its calls of ``course.reveal`` handed over."""
    said = [{"text/plain": f"It is {one}.", notebook.PREDICTION: {"answer": one, "unit": "MiB"}} for one in answers]
    outputs = [nbformat.v4.new_output("display_data", data) for data in said]
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags), **more}, outputs=outputs)


def form(param='guess = 0  # @param {type:"number"}'):
    """A form cell."""
    return code(param, tags=[notebooks.PREDICT], title="Your guess: <MiB>")


def page(*cells):
    """The page of a lesson of these cells, and of a text on each side."""
    badge, title, after = (nbformat.v4.new_markdown_cell(text) for text in ("badge", "# 1. A lesson", END))
    return pages.page(notebooks.LESSONS / "one.py", nbformat.v4.new_notebook(cells=[badge, title, *cells, after]))[0]


def hidden(text):
    """What a page hides until a guess is there, by guess."""
    return re.findall(r'<div class="answer" data-of="(guess-\d)" markdown="1">\n\n(.*?)\n\n</div>', text, re.S)


def test_a_page_packs_the_answer_into_the_field_and_hides_the_cell_that_says_it():
    text = page(form(), code("before = 1"), code("course.reveal(guess, 12)", 12.0), code("later = 2"))
    (packed,) = re.findall(r'<div class="predict" id="guess-1" data-key="one-1" .* data-of="(.*)" hidden></div>', text)
    assert json.loads(base64.b64decode(packed)) == {"answer": 12.0, "unit": "MiB"}
    assert 'data-label="Your guess: &lt;MiB&gt;"' in text
    ((of, what),) = hidden(text)  # a cell is between the answer and the end, so the end says nothing of it
    assert of == "guess-1"
    assert "course.reveal(guess, 12)" in what
    assert "It is 12.0." in what, "without JavaScript the page says it"
    assert not re.search("before|later|So it is", what)
    assert "@param" not in text


def test_what_is_said_behind_the_answer_is_hidden_too_up_to_a_heading_or_the_next_guess():
    blocks = hidden(page(form(), code("reveal", 12)))
    assert [what for _, what in blocks][1:] == ["So it is 12."]
    asks = nbformat.v4.new_markdown_cell("What then?")
    text = page(form(), code("reveal", 12), asks, form(), code("reveal", 13), nbformat.v4.new_markdown_cell("## 1. B"))
    assert [of for of, _ in hidden(text)] == ["guess-1", "guess-2"], "the second question is hidden, or a heading"
    assert text.index("## 2. The end") > text.index("So it is 12.") > text.index("## 1. B")


def test_a_text_between_guess_and_answer_is_hidden_too_unless_it_is_a_section():
    says, section = "It is 12.", "## 2. From scratch\nWords."

    def blocks(text, *cells):
        return [
            of
            for of, _ in hidden(
                page(form(), nbformat.v4.new_markdown_cell(text), *cells, code("reveal", 12), code("end"))
            )
        ]

    assert blocks(says) == ["guess-1", "guess-1"]
    assert blocks(section) == ["guess-1"]
    assert blocks(says, code("other")) == ["guess-1"]


def test_a_choice_brings_its_choices():
    text = page(form('guess = "no guess"  # @param ["no guess", "fall", "rise"]'), code("reveal", "rise"))
    (packed,) = re.findall(r'data-of="(\w+=*)" hidden', text)
    assert json.loads(base64.b64decode(packed))["choices"] == ["fall", "rise"]


@pytest.mark.parametrize(
    "cells", [[form()], [code("reveal", 12)], [code("reveal", 12), form()], [form(), code("two", 1, 2)]]
)
def test_a_guess_without_an_answer_stops_the_build(cells):
    with pytest.raises(LessonError, match=r"guesses and \d answers"):
        page(*cells)


def test_a_notebook_shows_the_form(tmp_path):
    (tmp_path / "one.py").write_text('# %% Your guess: MiB tags=["predict"]\nguess = 0  # @param {type:"number"}\n')
    cell = nbformat.reads(notebooks.make(tmp_path / "one.py"), as_version=4).cells[-1]
    assert cell.source == '# @title Your guess: MiB\nguess = 0  # @param {type:"number"}'
    assert cell.metadata["cellView"] == "form"
    assert "jupyter" not in cell.metadata, "Jupyter has no forms, so its code must be seen"


def test_a_part_that_is_folded_behind_an_answer_is_not_hidden_with_it():
    deep = nbformat.v4.new_markdown_cell("### Deeper: why\nBecause.", metadata={"tags": ["deep"]})
    text = page(form(), code("reveal", 12), deep, nbformat.v4.new_markdown_cell("## Next"))
    assert all("Because" not in what for _, what in hidden(text))
    assert '<details class="deep" markdown="1"><summary markdown="span">Deeper: why</summary>\n\nBecause.' in text
