"""README and home: short, made of what they show, and every link leads somewhere."""

import re
from pathlib import Path

import pytest

from tools import front, ladder, notebooks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_readme_is_short():
    assert len(README.encode()) < 8192


def test_the_answer_about_a_3b_is_that_of_its_command(run_cria):
    ((command, needs),) = re.findall(r"`cria (plan [^`]+--gpu 8GiB)` \(yes: ([\d.]+ GiB)\)", README)
    code, stdout, _ = run_cria(*command.split())
    assert code == 0
    assert stdout.startswith(f"verdict  fits: needs {needs} of 8.0 GiB")


@pytest.mark.parametrize("page", front.PAGES, ids=lambda page: page.name)
def test_what_is_made_is_as_it_is_made(page):
    assert front.filled(page) == page.read_text(encoding="utf-8"), "run: python -m tools.front"
    assert set(re.findall(r"<!-- made: (\w+) -->", page.read_text(encoding="utf-8"))) >= {"lessons", "links", "picture"}


def links() -> list[str]:
    """Every address in README."""
    return re.findall(r"\]\(([^)]+)\)", README) + re.findall(r'(?:src|srcset|href)="([^"]+)"', README)


def test_every_relative_link_leads_somewhere():
    relative = [link for link in links() if "://" not in link]
    assert len(relative) > 30
    for link in relative:
        path, _, place = link.partition("#")
        assert (ROOT / path).is_file(), link
        assert not place or place in (ROOT / path).read_text(encoding="utf-8").lower().replace(" ", "-"), link


def test_every_link_to_the_site_leads_to_a_page_of_it():
    """A page is made of a lesson, or of a file in docs/ ."""
    of_the_site = [link.removeprefix(notebooks.SITE) for link in links() if link.startswith(notebooks.SITE)]
    assert len(of_the_site) > 28
    for link in of_the_site:
        source = link.replace(".html", ".py" if link.startswith("lessons/") else ".md") or "index.md"
        assert (ROOT / source).is_file() or (ROOT / "docs" / source).is_file(), link
    notebook = notebooks.colab_address(front.CAPSTONE)
    others = [link for link in links() if "://" in link and not link.startswith((notebooks.SITE, notebook))]
    assert others == []


def test_every_lesson_is_told_once_with_its_page_and_its_notebook():
    for path in notebooks.lessons():
        for text, page, book in (
            (README, f"lessons/{path.stem}.html", f"(notebooks/{path.stem}.ipynb)"),
            (HOME, f"(lessons/{path.stem}.md)", f"({notebooks.colab_address(path.stem)})"),
        ):
            line = next(line for line in text.splitlines() if line.startswith("| [") and page in line)
            assert book in line
            assert front.LEARNT[path.stem] in line
    assert front.LEARNT.keys() == {path.stem for path in notebooks.lessons()}
    assert f"{len(front.LEARNT)} lessons" in README


def test_the_number_of_the_home_page_is_that_of_the_ladder():
    first, *_, last = (bill.peak_bytes / 2**30 for bill in ladder.bills().values())
    assert f"\n{first:.1f} GiB → {last:.1f} GiB\n" in HOME
    assert f"With it: {last:.1f} GiB; with none: {first:.1f} GiB." in README
