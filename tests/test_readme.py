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


@pytest.mark.parametrize("page", ["README.md", "docs/guide/plan.md"])
def test_the_answer_is_that_of_its_command(page, run_cria):
    """What is shown of it is shortened: its lines begin lines of the answer, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    command, *shown = re.findall(r"^```\n\$ cria (plan .+?)\n(.+?)^```", text, re.M | re.S)[0]
    code, stdout, _ = run_cria(*command.split())
    assert code == 0
    told = " ".join(stdout.split())
    for line in shown[0].splitlines():  # a narrow screen breaks lines
        _, words, told = told.partition(" ".join(line.split()))
        assert words, line


def test_the_answer_about_8_gib_is_that_of_its_command(run_cria):
    ((command, needs),) = re.findall(r"`cria (plan [^`]+--gpu 8GiB)`\s\(fits: ([\d.]+ GiB)\)", README)
    code, stdout, _ = run_cria(*command.split())
    assert code == 0
    assert f"fits: needs {needs} of 8.0 GiB" in stdout.splitlines()[0]


def test_what_readme_quotes_of_the_trained_model_is_on_the_home_page():
    """The home page takes it from the stored answers; README leaves out what it marks with [...]."""
    (quoted,) = re.findall(r"^## Before and after$(.+?)^## ", README, re.M | re.S)
    said = re.sub(r"\s+", " ", " | ".join(re.findall(r"^(?:> |\| (?!before|-))(.+)", quoted, re.M)))
    pieces = [piece.strip(" |") for piece in re.split(r"\[\.\.\.\]|\*\*|\[\d\] (?=\w)| \| ", said)]
    assert len([piece for piece in pieces if piece]) == 6
    assert [piece for piece in pieces if piece not in HOME] == []


@pytest.mark.parametrize("page", front.PAGES, ids=lambda page: page.name)
def test_what_is_made_is_as_it_is_made(page):
    text = page.read_text(encoding="utf-8")
    assert front.filled(page) == text, "run make update"
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) >= {"lessons", "links", "clone"}


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
    """A page is made of a file in docs/ ."""
    of_the_site = [link.removeprefix(notebooks.SITE) for link in links() if link.startswith(notebooks.SITE)]
    assert len(of_the_site) == 2
    for link in of_the_site:
        assert (ROOT / "docs" / (link.replace(".html", ".md") or "index.md")).is_file(), link
    notebook = notebooks.colab_address(front.CAPSTONE)
    others = [link for link in links() if "://" in link and not link.startswith((notebooks.SITE, notebook))]
    assert others == []


def test_every_lesson_is_told_once_with_its_address():
    for path in notebooks.lessons():
        for text, addresses in (
            (README, [f"(notebooks/{path.stem}.ipynb)"]),
            (HOME, [f"(lessons/{path.stem}.md)", f"({notebooks.colab_address(path.stem)})"]),
        ):
            (line,) = [line for line in text.splitlines() if line.startswith("| [") and addresses[0] in line]
            assert all(address in line for address in addresses)
            assert front.LEARNT[path.stem] in line
    assert front.LEARNT.keys() == {path.stem for path in notebooks.lessons()}
    assert f"{len(front.LEARNT)} lessons" in README


def test_the_number_of_the_home_page_is_that_of_the_ladder():
    first, *_, last = (bill.peak_bytes / 2**30 for bill in ladder.bills().values())
    assert f"\n{first:.1f} GiB → {last:.1f} GiB\n" in HOME
    assert f"from {first:.1f} to {last:.1f} GiB" in README
