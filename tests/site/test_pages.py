"""A lesson becomes a page: what it prints and draws, links as they are on the site; and nothing when a cell fails."""

import re
from types import SimpleNamespace

import nbformat
import pytest

from cria_tricks import course
from tests.site.conftest import wrong_with
from tools import executed, notebooks, pages

LESSON = """\
# %% [markdown]
# # 1. A lesson
# After [the bill](the_bill.py#3-prove-it), see [the map](../docs/map.md).

# %%
from pathlib import Path

from cria_tricks import course

print("here:", Path.cwd() / "a", "```")

# %% Draw figure 1 tags=["hide-input"]
course.show(lambda theme: course.figure()[0], "Figure 1. Nothing, in two colours.")
"""


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """A lesson of its own, away from what is kept."""
    monkeypatch.setattr(executed, "KEPT", tmp_path / "kept")
    path = tmp_path / "one.py"
    path.write_text(LESSON)
    return path


def test_a_page(lesson):
    book = executed.execute(lesson)
    text, files = pages.page(lesson, book)
    assert text.startswith('# 1. A lesson\n\n<p class="bar"><a href=')
    assert "[the bill](the_bill.md#3-prove-it), see [the map](../map.md)" in text
    assert "```` { .text .no-copy .output .stdout }\nhere: a ```\n````" in text, "where it ran is in it"
    assert '<details class="code" markdown="1"><summary>Draw figure 1</summary>' in text
    assert list(files) == ["one-1-light.svg", "one-1-dark.svg"]
    assert files["one-1-light.svg"] != files["one-1-dark.svg"]
    assert 'src="one-1-light.svg"' in text
    assert 'srcset="one-1-dark.svg"' in text
    assert "Figure 1. Nothing, in two colours.</figcaption>" in text
    assert notebooks.INSTALL.splitlines()[0] not in text
    assert next(executed.KEPT.iterdir()).name.startswith("one-")
    assert pages.page(lesson, executed.execute(lesson)) == (text, files), "what was kept gives another page"


def test_what_a_cell_printed_is_no_wider_than_a_page():
    long, table, command = "  " + "a word " * 30, "| a |" * 30, "$ cria plan " + "--set a=b " * 20
    output = nbformat.v4.new_output("stream", text="\n".join([long, table, command, "short"]))
    cells = [nbformat.v4.new_markdown_cell("badge"), nbformat.v4.new_code_cell("print()", outputs=[output])]
    text, _ = pages.page(notebooks.LESSONS / "one.py", nbformat.v4.new_notebook(cells=cells))
    printed = text.partition("stdout }\n")[2].splitlines()
    first, second, third, *rest = printed
    assert all(len(line) <= pages.COLUMNS for line in (first, second, third))
    assert re.match("  a word", first)
    assert re.match("      \\w", second), "it goes on further to the right"
    assert re.match("      \\w", third)
    assert rest[:3] == [table, command, "short"], "these would be broken by it"


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("40 + 2", "a value nobody asked for"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')", "a lesson went to"),
    ],
    ids=["error", "value", "network"],
)
def test_a_failing_cell_stops_the_build(lesson, cell, says):
    lesson.write_text(f"{LESSON}\n# %%\n{cell}\n")
    with pytest.raises(executed.LessonError, match=says):
        pages.page(lesson, executed.execute(lesson))


def test_a_site_is_tested_only_when_it_is_made_of_the_sources_as_they_are(tmp_path, monkeypatch):
    for folder in ("docs/lessons", "lessons/.ruff_cache", "tools/__pycache__", "site"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("docs/index.md", "lessons/one.py", "tools/pages.py", "mkdocs.yml", "pyproject.toml"):
        (tmp_path / name).write_text("a")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "MADE_HERE", (tmp_path / "docs" / "lessons",))
    site = tmp_path / "site"
    assert wrong_with(site) == "no site, or none that was built to its end; run: make site"
    pages.on_post_build(SimpleNamespace(site_dir=str(site)))
    (tmp_path / "docs" / "lessons" / "one.md").write_text("made by the build")
    (tmp_path / "tools" / "__pycache__" / "pages.pyc").write_text("made by Python")
    (tmp_path / "lessons" / ".ruff_cache" / "1").write_text("made by make lint")
    assert wrong_with(site) == ""
    for name in ("docs/index.md", "lessons/one.py", "mkdocs.yml", "docs/new.md"):
        (tmp_path / name).write_text("b")
        assert wrong_with(site) == "the site is stale; run: make site", name
        pages.on_post_build(SimpleNamespace(site_dir=str(site)))
        assert wrong_with(site) == ""
    monkeypatch.setattr(pages, "key", lambda text: "another package")
    assert wrong_with(site) == "the site is stale; run: make site"


def test_what_a_first_reading_leaves_out_is_folded_under_its_heading():
    deep = {"tags": ["deep"]}
    cells = [
        nbformat.v4.new_markdown_cell("badge"),
        nbformat.v4.new_markdown_cell("# A lesson"),
        nbformat.v4.new_markdown_cell("### How far `x` is off\nBy much.", metadata=deep),
        nbformat.v4.new_code_cell("print(2)", metadata=deep),
        nbformat.v4.new_markdown_cell("### A second one\nShort.", metadata=deep),
        nbformat.v4.new_markdown_cell("## The next section"),
    ]
    text, _ = pages.page(notebooks.LESSONS / "one.py", nbformat.v4.new_notebook(cells=cells))
    first, second = (
        '<summary markdown="span">How far `x` is off</summary>',
        '<summary markdown="span">A second one</summary>',
    )
    assert f'<details class="deep" markdown="1">{first}\n\nBy much.\n' in text
    assert "print(2)\n```\n\n</details>" in text.split(first)[1].split(second)[0]
    assert text.split(second)[1].split("## The next section")[0].strip() == "Short.\n\n</details>"


def test_a_table_that_a_cell_shows_is_a_table_of_the_page(monkeypatch):
    text = "| case | peak |\n|---|---|\n| on | 3.4 MiB |"
    shown = []
    monkeypatch.setattr("IPython.core.getipython.get_ipython", object)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    course.show_table(text)
    output = nbformat.v4.new_output("display_data", data=shown[0])
    cells = [nbformat.v4.new_markdown_cell("badge"), nbformat.v4.new_code_cell("on_a_gpu()", outputs=[output])]
    page, _ = pages.page(notebooks.LESSONS / "one.py", nbformat.v4.new_notebook(cells=cells))
    assert f"```\n\n{text}\n" in page


def test_without_a_notebook_a_table_is_printed(capsys):
    course.show_table("| case |")
    assert capsys.readouterr().out == "| case |\n"
