"""A base is the one that was trained over, or it is refused; and a folder's name never becomes a model of the hub."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cria_tricks import models
from cria_tricks.adapter.folder import trained_over
from cria_tricks.adapter.merge import merge
from cria_tricks.common import atomic_files
from cria_tricks.models import Weights, identity, pretrained, weight_files
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.train import train
from cria_tricks.store.run_folder import Folders

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory, trained, tokenizer) -> Path:
    """A folder with a base, ``models/base``, and a run over it that was stopped after the first of two steps."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(models.find("random:tiny").path, folder / "models" / "base")
    tokenizer.save_pretrained(folder / "models" / "base")
    rows = json.loads((trained / "run.json").read_text())["recipe"]["data"]["train"]
    sets = ["model=models/base", "train.max_steps=2", "train.save_steps=1", "tricks.peft=lora", "lora.r=2"]
    before = Path.cwd()
    os.chdir(folder)
    try:
        train(with_settings(Recipe(), [*sets, "data.max_length=320", f"data.train={rows}", f"data.eval={rows}"]), "run")
    finally:
        os.chdir(before)
    shutil.copytree(folder / "run", folder / "stopped")
    for name in ("adapter", "report.json", "report.md", "report.png", "checkpoints/checkpoint-2"):
        path = folder / "stopped" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@pytest.fixture
def place(home, tmp_path, monkeypatch) -> Path:
    """A copy of all of it under its first name, so that what is recorded still holds."""
    aside = home.with_name(home.name + "-kept")
    shutil.copytree(home, aside)
    monkeypatch.chdir(tmp_path)
    yield home
    shutil.rmtree(home)
    aside.rename(home)


def change_a_weight(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors[NORM] = tensors[NORM] + 1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})


def test_another_base_is_refused_wherever_one_was_recorded(place, run_cria):
    change_a_weight(place / "models" / "base")
    adapter = place / "run" / "adapter"
    commands = [
        ("chat", adapter, "--prompt", "a"),
        ("merge", adapter, "--out", "merged"),
        ("eval", adapter, "--data", "nguzo_saba", "--out", "eval"),
        ("train", place / "stopped" / "recipe.toml", "--resume", "--out", place / "stopped"),
    ]
    for command in commands:
        code, stdout, stderr = run_cria(*command)
        last = stderr.splitlines()[-1]
        assert (code, stdout) == (2, ""), command
        assert "is not the one that it was trained over" in last
        assert "model.safetensors was sha256 " in last
        assert "--other-base" in last
    assert not (place / "stopped" / "adapter").exists()
    assert not Path("merged").exists()


def test_another_base_that_is_wanted_is_used_and_said(place, run_cria):
    change_a_weight(place / "models" / "base")
    adapter = place / "run" / "adapter"
    code, _, stderr = run_cria("chat", adapter, "--prompt", "a", "--max-new-tokens", 1, "--other-base")
    assert code == 0
    assert "used because of --other-base" in stderr
    stopped = place / "stopped"
    code, _, stderr = run_cria("train", stopped / "recipe.toml", "--resume", "--out", stopped, "--other-base")
    assert code == 0
    assert "used because of --other-base" in stderr
    made = trained_over(stopped / "adapter")
    was = trained_over(adapter)
    assert made["other_than"]["weights"] == was["weights"] != made["weights"]
    card = " ".join((stopped / "adapter" / "README.md").read_text().split())
    assert f"began over other weights (model.safetensors sha256 {was['weights']['model.safetensors']})" in card


def test_the_same_base_is_no_other(place, run_cria):
    stopped = place / "stopped"
    code, _, stderr = run_cria("train", stopped / "recipe.toml", "--resume", "--out", stopped)
    assert code == 0
    assert "warning: --resume" not in stderr
    same = ("adapter/adapter_model.safetensors",)
    for name in same:
        assert (stopped / name).read_bytes() == (place / "run" / name).read_bytes()
    assert "other_than" not in trained_over(stopped / "adapter")


def test_a_folder_stays_a_folder_wherever_the_command_runs(place, run_cria, monkeypatch):
    """Recorded absolute; and when it is gone, no hub is asked for a model of its name."""
    adapter = place / "run" / "adapter"
    base = place / "models" / "base"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert f'model = "{base}"' in (adapter / "recipe.toml").read_text()
    code, _, _ = run_cria("chat", adapter, "--prompt", "a", "--max-new-tokens", 1)
    assert code == 0
    base.rename(place / "elsewhere")
    monkeypatch.setattr(models, "fetch", lambda *_: pytest.fail("the hub is asked"))
    code, _, stderr = run_cria("chat", adapter, "--prompt", "a")
    assert code == 2
    assert f"was trained over the folder {base}, which is not there; name it with --base" in stderr
    monkeypatch.undo()
    monkeypatch.chdir(place)
    moved = ("--base", "elsewhere")
    assert run_cria("chat", adapter, "--prompt", "a", "--max-new-tokens", 1, *moved)[0] == 0
    assert run_cria("merge", adapter, "--out", "merged", *moved)[0] == 0
    (place / "stopped" / "recipe.toml").write_text(
        (place / "stopped" / "recipe.toml").read_text().replace(str(base), str(place / "elsewhere"))
    )
    assert run_cria("train", place / "stopped" / "recipe.toml", "--resume", "--out", place / "stopped")[0] == 0


def test_answers_over_another_base_are_not_taken_for_those_of_the_recorded_one(place, run_cria, tmp_path):
    shutil.copytree(place / "models" / "base", tmp_path / "base2")
    change_a_weight(tmp_path / "base2")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": " b"}\n')
    words = ("eval", place / "run" / "adapter", "--with-base", "--data", rows, "--max-new-tokens", 1, "--out")
    code, stdout, stderr = run_cria(*words, "own", "--json")
    assert code == 0, stderr
    own = json.loads(stdout)
    code, stdout, _ = run_cria(*words, "other", "--base", tmp_path / "base2", "--other-base", "--json")
    other = json.loads(stdout)
    assert code == 0
    assert other["base"] == str(tmp_path / "base2") != own["base"]
    assert other["systems"]["base"]["loss"]["value"] != own["systems"]["base"]["loss"]["value"]


def test_a_file_of_weights_that_nobody_reads_makes_no_other_base(place, run_cria):
    base = place / "models" / "base"
    shutil.copy(base / "model.safetensors", base / "consolidated.safetensors")
    code, _, stderr = run_cria("chat", place / "run" / "adapter", "--prompt", "a", "--max-new-tokens", 1)
    assert code == 0, stderr


def test_a_resumed_run_takes_the_commit_that_it_began_over(place, run_cria, monkeypatch):
    asked, fetch, over = [], models.fetch, Folders.revision.fget

    def with_commit(folders):
        assert over(folders) == "", "a folder has none"
        folders.start.about["base"]["revision"] = "c" * 40
        return over(folders)

    monkeypatch.setattr(Folders, "revision", property(with_commit))
    monkeypatch.setattr(models, "fetch", lambda found, commit="": asked.append(commit) or fetch(found, commit))
    stopped = place / "stopped"
    code, _, stderr = run_cria("train", stopped / "recipe.toml", "--resume", "--out", stopped)
    assert code == 0, stderr
    assert asked[0] == "c" * 40


def test_the_merged_model_says_that_its_base_is_another(place, tmp_path):
    change_a_weight(place / "models" / "base")
    said = []
    found = merge(place / "run" / "adapter", tmp_path / "merged", other_base=True, say=said.append)
    assert "is not the one that it was trained over" in said[0]
    made = json.loads((Path(found["merged"]) / "provenance.json").read_text())
    assert "is not the one that it was trained over" in made["merge"]["other_base"]
    assert "is not the one that it was trained over" in (Path(found["merged"]) / "README.md").read_text()


def test_kinds_of_bases_and_their_hashes(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "notes.txt"):
        (folder / name).write_bytes(name.encode())
    entry = {name: atomic_files.entry(folder / name)["sha256"] for name in ("model.safetensors", "config.json")}
    found = identity.of(Weights(str(folder), str(folder), None))
    assert found == {
        "name": str(folder),
        "kind": "folder",
        "weights": {"model.safetensors": entry["model.safetensors"]},
        "config": {"config.json": entry["config.json"]},
        "tokenizer": {"tokenizer.json": atomic_files.entry(folder / "tokenizer.json")["sha256"]},
    }
    assert identity.of(Weights("owner/name", str(folder), None))["kind"] == "wheel"
    assert identity.of(Weights("random:x", str(folder), None))["kind"] == "random"
    on_hub = identity.of(Weights("owner/name", str(folder), None, "", "c" * 40))
    assert (on_hub["kind"], on_hub["revision"], on_hub["weights"]) == ("hub", "c" * 40, found["weights"])
    for before, now in ((found, on_hub), ({}, found)):  # the same files from another place; nothing was recorded
        assert identity.compare(before, now, "x", allowed=False, weights=Weights(str(folder), str(folder), None)) == []


def test_a_large_file_is_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "LARGE", 4)
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "cache"))
    file, hashed, entry = tmp_path / "model.safetensors", [], atomic_files.entry
    monkeypatch.setattr(weight_files.atomic_files, "entry", lambda path: hashed.append(path) or entry(path))
    file.write_bytes(b"first")
    first = weight_files.sha256(file)
    assert weight_files.sha256(file) == first == entry(file)["sha256"]
    assert len(hashed) == 1
    times = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a careful forger would
    assert weight_files.sha256(file) == entry(file)["sha256"] != first
    assert len(hashed) == 2
    (tmp_path / "cache" / "weight_files.json").write_text("{")
    assert weight_files.sha256(file) == entry(file)["sha256"], "a broken cache costs time alone"


def test_the_hubs_cache_names_a_file_by_its_hash(tmp_path):
    digest = "ab" * 32
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs" / digest).write_bytes(b"x")
    (tmp_path / "snapshots" / "model.safetensors").symlink_to(tmp_path / "blobs" / digest)
    assert weight_files.sha256(tmp_path / "snapshots" / "model.safetensors") == digest


def test_a_model_of_the_hub_comes_whole_of_one_commit_without_second_copies(hub, tmp_path, monkeypatch, tiny_model):
    from tests.hub import Repo
    from tests.test_pretrained import in_shards

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    in_shards(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"consolidated.safetensors": b"a second copy", "original/weights.pth": b"a third", "README.md": b"words"}
    hub.repos["owner/name"] = Repo(files=files, commits=["c" * 40])
    hub.alone(monkeypatch, tmp_path / "hf")
    found = models.fetch(models.find("owner/name"))
    assert (found.kind, found.revision, found.name) == ("hub", "c" * 40, "owner/name")
    here = {path.name for path in Path(found.path).iterdir()}
    assert here == {path.name for path in folder.iterdir()}
    assert pretrained.causal_lm(found.path, found.name).config.vocab_size == 512
    assert identity.of(found)["weights"] == weight_files.identity(folder)["weights"]
    asked = len(hub.asked)
    assert models.fetch(found) == found
    assert len(hub.asked) == asked, "it is here already"
