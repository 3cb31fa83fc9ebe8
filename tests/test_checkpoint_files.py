"""Which checkpoints are found and kept; made-up ones, and nothing is trained."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.data.sources import DataSource
from cria_tricks.recipe import Recipe, field_names, with_settings
from cria_tricks.store import checkpoints
from cria_tricks.store.checkpoints import LENGTH, Checkpoints, describe, other_versions, refuse_another_run

ABOUT = {"recipe": {"name": "made"}, "rows": {}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def kept(tmp_path):
    """Saves checkpoints of some steps into a folder, with a mirror or without one."""

    def save(*steps: int, folder: str = "here", mirror: str = "") -> Checkpoints:
        found = Checkpoints(tmp_path / folder, tmp_path / mirror if mirror else None, ABOUT, said.append)
        for step in steps:
            with found.new(step, {"seconds": step / 2}) as aside:
                (aside / "weights").write_text(f"of step {step}")
        return found

    said: list[str] = []
    save.said = said
    return save


def test_a_checkpoint_says_what_it_is_of_and_how_long_it_took(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(perf_counter=iter([10.0, 12.5]).__next__))
    found = kept(7)
    assert found.seconds == 2.5
    written = (tmp_path / "here" / "checkpoint-7" / "run.json").read_text()
    assert written == json.dumps({**ABOUT, "spent": {"seconds": 3.5}}, indent=2) + "\n"
    newest = found.newest()
    assert (newest.path, newest.step) == (tmp_path / "here" / "checkpoint-7", 7)
    assert (newest.about, newest.spent) == (json.loads(written), {"seconds": 3.5})
    assert kept.said == []


def test_of_nothing_there_is_no_newest(tmp_path):
    found = Checkpoints(tmp_path / "none")
    assert (found.newest(), found.mirror, found.seconds, found.about) == (None, None, 0.0, {})
    found.say("a sentence that nobody hears")


def test_the_newest_two_by_their_numbers_are_kept_here_and_in_the_mirror(kept, tmp_path):
    here, drive = tmp_path / "here", tmp_path / "drive"
    for folder in (here, drive):
        for name in ("checkpoint-8.partial", "checkpoint-7.old", "checkpoint-x", "adapter"):
            (folder / name).mkdir(parents=True)
        (folder / "checkpoint-1").write_text("a file")
    found = kept(9, 10, 100, mirror="drive")
    left = ["adapter", "checkpoint-1", "checkpoint-10", "checkpoint-100", "checkpoint-x"]
    assert names(here) == names(drive) == left
    assert found.newest().step == 100


def test_the_newest_wins_wherever_it_is_and_of_two_the_one_here(kept, tmp_path):
    kept(2, 4, mirror="drive")
    found = kept(folder="here", mirror="drive")
    assert found.newest().path == tmp_path / "here" / "checkpoint-4"
    kept(6, folder="drive")
    assert found.newest().path == tmp_path / "drive" / "checkpoint-6"
    assert Checkpoints(tmp_path / "here").newest().step == 4, "without the mirror"


def test_damaged_ones_are_passed_over_and_each_is_told(kept, tmp_path):
    kept(2, 4, mirror="drive")
    here, drive = tmp_path / "here", tmp_path / "drive"
    (here / "checkpoint-4" / "weights").unlink()
    (drive / "checkpoint-4" / "weights").unlink()
    found = kept(mirror="drive")
    assert found.newest().path == here / "checkpoint-2"
    assert kept.said == [
        f"{folder}/checkpoint-4 is damaged (weights is missing): going on from checkpoint-2 instead"
        for folder in (here, drive)
    ]


@pytest.mark.parametrize("content", ["{", "[]", "3", "{}", '{"recipe": {}}', None])
def test_a_checkpoint_without_a_readable_run_is_damaged(content, kept, tmp_path):
    found = kept(2, 4)
    newest = tmp_path / "here" / "checkpoint-4"
    (newest / "run.json").unlink()
    if content:
        (newest / "run.json").write_text(content)
    (newest / "manifest.json").unlink()
    atomic_files.write_manifest(newest)
    assert found.newest().step == 2
    assert kept.said == [f"{newest} is damaged (run.json cannot be read): going on from checkpoint-2 instead"]


def test_a_damaged_one_is_written_over_when_the_run_comes_there_again(kept, tmp_path):
    kept(2, 4)
    (tmp_path / "here" / "checkpoint-4" / "weights").unlink()
    found = kept(3)
    assert found.newest().step == 3
    assert kept(4).newest().step == 4


def test_with_none_whole_the_newest_is_named(kept, tmp_path):
    found = kept(2, 4)
    (tmp_path / "here" / "checkpoint-4" / "weights").unlink()
    (tmp_path / "here" / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(BadInput) as caught:
        found.newest()
    assert str(caught.value) == (
        f"none of the checkpoints in {tmp_path}/here is whole (checkpoint-4: weights is missing); "
        "start again in a new folder"
    )
    assert kept.said == []


def test_a_file_that_is_not_in_the_manifest_does_no_harm(kept, tmp_path):
    found = kept(2, 4)
    (tmp_path / "here" / "checkpoint-4" / ".DS_Store").write_text("x")
    assert found.newest().step == 4


def test_a_mirror_that_cannot_be_written_is_told_and_no_more(kept, tmp_path):
    (tmp_path / "file").touch()
    kept(2, mirror="file/drive")
    assert names(tmp_path / "here") == ["checkpoint-2"]
    assert len(kept.said) == 1
    assert kept.said[0].endswith("cannot be written: Not a directory; the run goes on without this copy")


def test_a_folder_that_cannot_be_read(kept, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as caught:
        Checkpoints(tmp_path / "file").newest()
    assert str(caught.value) == f"{tmp_path}/file: cannot be read: Not a directory"


FREE = {
    "name", "data.train", "data.eval", "lora.continue_from",
    "train.save_steps", "train.save_minutes", "train.time_budget", "train.mirror",
    "train.keep_best", "train.patience", "eval.samples", "eval.max_new_tokens",
    "train.monitor_seconds", "train.profile", "train.report_to", "parallel.strategy",
    "parallel.tensor_size", "parallel.reduce", "parallel.sequence",
    "parallel.timeout", "parallel.pipelines", "parallel.pipeline_schedule", "parallel.stage_blocks",
}  # fmt: skip
WORDS = {
    "train.report_to": "trackio", "parallel.pipeline_schedule": "gpipe",
    "parallel.stage_blocks": "1,1", "parallel.reduce": "step",
    "parallel.strategy": "ddp", "data.overflow": "drop", "data.duplicates": "near", "data.quality": "gopher",
    "data.leakage": "drop", "data.language": "en", "tricks.precision": "bf16", "tricks.quantization": "nf4",
    "tricks.peft": "lora", "tricks.optimizer": "adamw_8bit", "tricks.attention": "sdpa", "lora.init": "loftq",
    "train.schedule": "linear", "data.shuffle_documents": "0.5", "data.drop_uncited": "0.5", "data.drop_cited": "0.5",
}  # fmt: skip


@pytest.mark.parametrize("field", field_names())
def test_only_what_changes_nothing_in_the_training_may_be_changed(field):
    group, _, name = field.partition(".")
    value = getattr(getattr(Recipe(), group), name) if name else getattr(Recipe(), group)
    others = {bool: not value, int: 9, float: 0.5, str: "other", tuple: "q_proj"}
    other = WORDS.get(field, others[type(value)])
    before, now = (describe(recipe, {}, "cpu") for recipe in (Recipe(), with_settings(Recipe(), [f"{field}={other}"])))
    assert before != now
    if field in FREE:
        refuse_another_run(before, now, Path("c"))
        return
    longer = "; a run can be made longer by .* and never shorter" if field in LENGTH else ""
    with pytest.raises(
        BadInput, match=rf"^--resume: c is of another recipe: {field} \(.*, now .*\){longer}; set them back, or"
    ):
        refuse_another_run(before, now, Path("c"))


def test_rows_count_where_both_runs_know_them():
    def run(**rows: str) -> dict:
        return {**describe(Recipe(), {}, "cpu"), "rows": rows}

    refuse_another_run(run(train="a"), run(train="a", eval="b"), Path("c"))
    refuse_another_run(run(train="a", eval="b"), run(train="a"), Path("c"))
    with pytest.raises(BadInput, match=r"of another recipe: data.eval \(other rows\); set"):
        refuse_another_run(run(train="a", eval="b"), run(train="a", eval="c"), Path("c"))
    before = run()
    del before["rows"]
    refuse_another_run(before, run(train="a"), Path("c"))


@pytest.mark.parametrize("before", [{}, None, {"recipe": {"lora": {"rank": 3}}}, {"recipe": 3}])
def test_a_run_that_says_no_recipe_is_of_another_version(before):
    with pytest.raises(BadInput) as caught:
        refuse_another_run(before, describe(Recipe(), {}, "cpu"), Path("c"))
    assert (
        str(caught.value)
        == "--resume: c: its recipe is of another version of cria_tricks; use the version that wrote it"
    )


def test_a_library_that_was_not_there_is_another_version():
    now = {"versions": {"torch": "2", "peft": "1", "device": "cpu"}}
    assert other_versions({"versions": {"torch": "1", "device": "cpu", "old": "1"}}, now) == [
        "torch 1 is now 2: the resumed run may differ in the last bits"
    ]


def test_a_description_names_device_processes_and_rows():
    found = describe(Recipe(name="x"), {"train": DataSource([], "")}, "Tesla T4")
    assert list(found) == ["recipe", "rows", "versions"]
    assert found["rows"] == {"train": DataSource([], "other").sha256}
    assert list(found["versions"]) == ["device", "processes", "torch", "transformers", "peft", "bitsandbytes"]
    assert (found["versions"]["device"], found["versions"]["processes"]) == ("Tesla T4", 1)
    assert describe(Recipe(), {}, "cpu", 3)["versions"]["processes"] == 3
