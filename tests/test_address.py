"""The repository's address is written by hand in one place, and one command writes it everywhere else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools import address

OLD = address.parsed(address.project()["urls"]["Repository"], "1.0")
NEW = "https://github.com/" + "acme-labs/small.gpu"  # in two parts, as this file may hold no address


@pytest.fixture
def copy(tmp_path) -> Path:
    """A repository with the files of this one."""
    for path in address.tracked(address.ROOT):
        (tmp_path / path.relative_to(address.ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(address.ROOT))
    for command in ("init", "add --all"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def texts(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in address.tracked(root)}


def moved(root: Path, *url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.address", *url]
    return subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)


def test_every_file_shows_the_address_of_pyproject():
    assert address.stale() == [], "run make address"


def test_the_address_is_written_nowhere_else():
    assert address.elsewhere() == []


def test_one_command_moves_the_repository_and_moves_it_back(copy):
    assert moved(copy).returncode == 0
    before = texts(copy)
    assert moved(copy, NEW).returncode == 0
    after = texts(copy)
    assert not [name for name, text in after.items() if f"{OLD.owner}/{OLD.name}".encode() in text]
    assert not [name for name, text in after.items() if f"{OLD.owner}.github.io".encode() in text]
    changed = {name for name in after if after[name] != before[name]}
    assert {"pyproject.toml", "CITATION.cff", "docs/guide/colab.md", "notebooks/the_bill.ipynb"} <= changed
    assert f"git+{NEW}@v".encode() in after["notebooks/the_bill.ipynb"]
    about = address.project(copy)["urls"]
    assert about == {"Documentation": address.parsed(NEW, "").site, "Repository": NEW}
    assert address.elsewhere(copy) == []
    assert moved(copy, OLD.repository).returncode == 0
    assert texts(copy) == before


def test_what_is_no_repository_is_refused_and_changes_nothing(copy):
    before = texts(copy)
    done = moved(copy, "gitlab.com/acme/tricks")
    assert done.returncode == 1
    assert done.stderr.startswith("URL=gitlab.com/acme/tricks: is not the address of a repository")
    assert texts(copy) == before


def test_an_address_written_by_hand_is_found(copy):
    by_hand = {
        "Makefile": f"# git@github.com:{OLD.owner}/{OLD.name}.git\n",
        "README.md": f"![licence](https://img.shields.io/github/license/somebody/{OLD.name})\n",
        "cria_tricks/launch/job.py": f"# {OLD.repository}\n",
        "docs/index.md": f"[site](https://somebody.github.io/{OLD.name}/)\n",
    }
    assert address.elsewhere(copy) == []
    for file, line in by_hand.items():
        with (copy / file).open("a") as planted:
            planted.write(line)
    assert sorted(found.partition(":")[0] for found in address.elsewhere(copy)) == sorted(by_hand)


def test_a_link_to_a_notebook_opens_the_release_of_pyproject(copy):
    page = copy / "docs" / "index.md"
    link = f"https://colab.research.google.com/github/{OLD.owner}/{OLD.name}/blob/main/notebooks/the_bill.ipynb"
    page.write_text(page.read_text() + link)
    assert "docs/index.md" in address.stale(copy)
    assert moved(copy).returncode == 0
    assert f"/blob/v{address.project()['version']}/notebooks/the_bill.ipynb" in page.read_text()
    assert address.stale(copy) == []


def test_the_citation_says_what_pyproject_says():
    cited = yaml.safe_load((address.ROOT / "CITATION.cff").read_text())
    about = address.project()
    assert (cited["title"], cited["version"], cited["license"]) == (about["name"], about["version"], about["license"])
    assert cited["repository-code"] == about["urls"]["Repository"]
    assert cited["url"] == about["urls"]["Documentation"]
