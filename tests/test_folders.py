"""A run's folder and its mirror, held without any training: names, room, whose they are, and what is copied where."""

import contextlib
import json
from collections import namedtuple
from pathlib import Path

import pytest

from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput, Unwritten
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.store import run_folder
from cria_tricks.store.checkpoints import describe
from cria_tricks.store.run_folder import Folders, numbered, taken

Usage = namedtuple("Usage", "total used free")
MIB_32 = 33_554_432


def made(out, *settings: str, resume: bool = False, said=None) -> Folders:
    recipe = with_settings(Recipe(), settings)
    return Folders(recipe, out, resume, describe(recipe, {}, "cpu"), print if said is None else said.append)


def save(found: Folders, step: int) -> None:
    with found.checkpoints.new(step, {"seconds": step}) as aside:
        (aside / "weights").write_text(f"of step {step}")


def refusal(*arguments, **options) -> str:
    with pytest.raises(BadInput) as caught:
        made(*arguments, **options)
    return str(caught.value)


def test_the_next_free_name_and_to_resume_the_last_taken_one(tmp_path):
    first = tmp_path / "mine"
    found = []
    for _ in range(4):
        found.append((numbered(first, False).name, numbered(first, True).name))
        numbered(first, False).mkdir()
        (tmp_path / found[-1][0] / "recipe.toml").touch()
    assert found == [("mine", "mine"), ("mine-2", "mine"), ("mine-3", "mine-2"), ("mine-4", "mine-3")]


def test_without_out_a_run_is_named_after_its_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made(None, "name=mine").folder == Path("runs/mine")
    Path("runs/mine/adapter").mkdir(parents=True)
    found = made(None, "name=mine")
    assert (found.folder, found.mirror, found.start) == (Path("runs/mine-2"), None, None)
    assert found.checkpoints.folder == Path("runs/mine-2/checkpoints")
    assert found.checkpoints.mirror is None


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "adapter", "model", "report.json", "report.md", "report.png", "recipe.toml", "run.json"],
)
def test_what_a_run_would_write_makes_a_folder_taken(name, tmp_path):
    assert taken(tmp_path) == ""
    (tmp_path / "notes.txt").touch()
    assert taken(tmp_path) == ""
    (tmp_path / name).touch()
    assert taken(tmp_path) == name
    said = f"--out {tmp_path}: holds another run ({name}); name a new folder, or go on with it: --resume"
    assert refusal(tmp_path) == said


def test_what_cannot_be_a_folder_or_a_mirror(tmp_path):
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == f"--out {tmp_path}/file: is a file; name a folder"
    assert refusal(tmp_path / "run", f"train.mirror={tmp_path}/file") == (
        f"train.mirror {tmp_path}/file: is a file; name a folder"
    )
    assert refusal(tmp_path / "run", f"train.mirror={tmp_path}/x/../run") == (
        f"train.mirror={tmp_path}/x/../run: is the run's own folder; name a second one"
    )
    assert refusal(tmp_path / "run", f"train.mirror={tmp_path}/drive/mine") == (
        f"train.mirror={tmp_path}/drive/mine: there is no folder {tmp_path}/drive; is the drive mounted?"
    )
    found = made(tmp_path / "run", f"train.mirror={tmp_path}/drive")
    assert (found.mirror, found.checkpoints.mirror) == (tmp_path / "drive", tmp_path / "drive" / "checkpoints")
    assert not found.folder.exists(), "nothing is made before it is claimed"


@pytest.mark.parametrize(("bits", "a_weight"), [(32, 3 * 12 + 4), (8, 3 * 6 + 4)])
def test_the_room_is_that_of_three_checkpoints_and_the_result(bits, a_weight, tmp_path, monkeypatch):
    """A weight has four bytes and two moments; a third checkpoint is there while the oldest still is."""
    free = [0]
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda folder: Usage(0, 0, free[0]))
    needed = 1_000_000 * a_weight + MIB_32
    found = made(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "deep" / "old").write_bytes(bytes(100))
    found.resume = True  # what is there is written over
    free[0] = needed - 100
    with found.claimed(1_000_000, bits):
        pass
    free[0] -= 1
    said = rf"^--out {tmp_path}/run: \d+\.\d MiB are free, and the checkpoints and the result take about \d+\.\d MiB; "
    with (
        pytest.raises(BadInput, match=f"{said}make room, or name a folder on another disk$"),
        found.claimed(10**6, bits),
    ):
        pytest.fail("there is no room")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as caught, made(tmp_path / "file" / "run").claimed(1, 32):
        pytest.fail("it cannot be made")
    assert str(caught.value) == f"--out {tmp_path}/file/run: cannot be made: Not a directory; name another folder"


def test_a_claimed_folder_and_its_mirror_say_what_run_it_is(tmp_path):
    found = made(tmp_path / "run", f"train.mirror={tmp_path}/drive", "lora.r=3")
    with found.claimed(10, 32):
        for place in ("run", "drive"):
            assert (tmp_path / place / "recipe.toml").read_text() == found.recipe.to_toml()
            assert (tmp_path / place / "run.json").read_text() == json.dumps(found.about, indent=2) + "\n"
    assert sorted(path.name for path in (tmp_path / "drive").iterdir()) == ["recipe.toml", "run.json"]


@pytest.mark.parametrize(
    ("still_there", "said"), [(True, "another run is writing there"), (False, "holds another run")]
)
def test_who_comes_second_is_refused(still_there, said, tmp_path):
    first, second = made(tmp_path / "run"), made(tmp_path / "run")
    with contextlib.ExitStack() as stack:
        stack.enter_context(first.claimed(10, 32))
        if not still_there:
            stack.close()
        with pytest.raises(BadInput, match=said):
            stack.enter_context(second.claimed(10, 32))


def test_a_resumed_run_goes_on_where_its_checkpoints_end(tmp_path):
    out, said = tmp_path / "run", []
    first = made(out)
    with first.claimed(10, 32):
        save(first, 2)
        save(first, 4)
    found = made(out, resume=True, said=said)
    assert (found.start.step, found.start.spent) == (4, {"seconds": 4})
    assert said == [f"going on from {out}/checkpoints/checkpoint-4"]
    assert made(out, "train.save_steps=3", resume=True).start.step == 4, "how often it saves may change"
    assert "train.seed (42, now 1)" in refusal(out, "train.seed=1", resume=True)
    (out / "checkpoints" / "checkpoint-4" / "weights").unlink()
    assert made(out, resume=True).start.step == 2


def test_other_versions_are_warned_of(tmp_path):
    first = made(tmp_path)
    first.about["versions"]["torch"] = "1.0"
    with first.claimed(10, 32):
        save(first, 1)
    said = []
    made(tmp_path, resume=True, said=said)
    assert said[0].startswith("warning: torch 1.0 is now ")
    assert said[1:] == [f"going on from {tmp_path}/checkpoints/checkpoint-1"]


def test_a_resume_without_a_checkpoint(tmp_path):
    said = []
    assert made(tmp_path, resume=True, said=said).start is None
    assert said == [f"no checkpoint in {tmp_path} yet: starting from the beginning"]
    found = made(tmp_path)
    with found.claimed(10, 32):
        pass
    assert made(tmp_path, resume=True).start is None
    (tmp_path / "report.json").touch()
    assert refusal(tmp_path, resume=True) == (
        f"--resume: {tmp_path} holds report.json but no checkpoint to go on from; name a new folder"
    )
    for content in ("{", "[" * 100_000, None):
        (tmp_path / "run.json").unlink()
        if content:
            (tmp_path / "run.json").write_text(content)
        assert refusal(tmp_path, resume=True) == (
            f"--resume: {tmp_path} holds report.json but no run.json that says of what run; name a new folder"
        )


def test_each_process_has_its_own_samples(tmp_path):
    found = made(tmp_path / "run")
    assert [found.monitor(rank).name for rank in (0, 1, 2)] == ["monitor.jsonl", "monitor-1.jsonl", "monitor-2.jsonl"]
    assert found.monitor(0).parent == tmp_path / "run"


def results(folder: Path, text: str) -> None:
    with atomic_files.new_folder(folder / "adapter") as aside:
        (aside / "weights").write_text(text)
    (folder / "report.md").write_text(text)
    (folder / "monitor-1.jsonl").write_text(text)
    (folder / "tensorboard").mkdir(exist_ok=True)
    (folder / "tensorboard" / "events").write_text(text)
    (folder / "notes.txt").write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", ".lock")
    }


def test_results_and_records_are_copied_and_copied_again(tmp_path):
    found = made(tmp_path / "run", f"train.mirror={tmp_path}/drive")
    found.folder.mkdir()
    for text in ("first", "second"):
        results(found.folder, text)
        found.mirror_results()
        names = ("adapter/weights", "report.md", "monitor-1.jsonl", "tensorboard/events")
        assert contents(tmp_path / "drive") == dict.fromkeys(names, text)
    alone = made(tmp_path / "alone")
    alone.mirror_results()  # nowhere to copy to
    assert not alone.folder.exists()


def test_a_mirror_that_fails_at_the_end_is_a_warning(tmp_path, monkeypatch):
    said = []
    found = made(tmp_path / "run", f"train.mirror={tmp_path}/drive", said=said)
    found.folder.mkdir()
    results(found.folder, "x")

    def fail(*arguments):
        raise Unwritten("drive", "the drive is full")

    monkeypatch.setattr(run_folder.atomic_files, "copy_folder", fail)
    monkeypatch.setattr(run_folder, "Unwritten", Unwritten)
    found.mirror_results()
    assert len(said) == 1
    assert said[0].startswith("warning: train.mirror: ")
    assert said[0].endswith(f"; the results are in {tmp_path}/run alone")


@pytest.mark.parametrize("lost", [True, False])
def test_on_a_new_machine_the_records_come_back_and_on_the_old_one_its_own_stay(lost, tmp_path):
    settings = [f"train.mirror={tmp_path}/drive"]
    first = made(tmp_path / "run", *settings)
    with first.claimed(10, 32):
        save(first, 2)
        results(first.folder, "mirrored")
        first.mirror_results()
    found = made(tmp_path / ("new" if lost else "run"), *settings, resume=True)
    if not lost:
        (found.folder / "monitor-1.jsonl").write_text("longer")
    assert found.start.path.parent.parent.name == ("drive" if lost else "run")
    with found.claimed(10, 32):
        assert (found.folder / "monitor-1.jsonl").read_text() == ("mirrored" if lost else "longer")
        assert (found.folder / "tensorboard" / "events").read_text() == "mirrored"


def test_a_run_from_the_beginning_takes_no_records(tmp_path):
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / "monitor.jsonl").write_text("of another")
    found = made(tmp_path / "run", f"train.mirror={tmp_path}/drive")
    with found.claimed(10, 32):
        assert not found.monitor(0).exists()


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    interrupts.now_saved(interrupts.NOTHING)
    with made(run).claimed(10, 8):
        assert interrupts.words() == f"interrupted; no step is saved in {run} yet; begin again with --resume"
    with made(run, resume=True).claimed(10, 8):
        save(made(run, resume=True), 4)
        path = run / "checkpoints" / "checkpoint-4"
        assert interrupts.words() == f"interrupted; step 4 is saved in {path}; go on with --resume"
    assert interrupts.words() == f"interrupted; the run is finished, and its results are in {run}"
    with made(run, resume=True).claimed(10, 8):
        assert interrupts.words() == f"interrupted; {path} is whole; go on with --resume"
