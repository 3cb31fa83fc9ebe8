"""TensorBoard and Trackio: the history as the report has it, in the run's folder, and nothing sent."""

import contextlib
import importlib.util
import json
import os
import socket
import sqlite3

import pytest
from rich.console import Console

from cria_tricks import models
from cria_tricks.measure.monitor import Monitor
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, from_toml, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run import ready
from cria_tricks.run.job import Job
from cria_tricks.store.run_folder import Folders
from cria_tricks.trainer.progress import ShowProgress
from cria_tricks.trainer.trackers import flat, trackers
from tests import helpers

SETTINGS = ("tricks.peft=lora", "train.max_steps=3")


def test_a_recipe_names_them_in_a_word_or_a_list(tmp_path):
    def asked(value):
        return with_settings(Recipe(), [f"train.report_to={value}"]).train.report_to

    assert asked("none") == asked("[]") == Recipe().train.report_to == ()
    assert asked("trackio") == ("trackio",)
    assert asked("tensorboard,trackio") == ("tensorboard", "trackio")
    for text, found in (('"tensorboard"', ("tensorboard",)), ('["trackio"]', ("trackio",)), ('"none"', ())):
        (tmp_path / "recipe.toml").write_text(f"[train]\nreport_to = {text}\n")
        assert from_toml(tmp_path / "recipe.toml").train.report_to == found


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_library_that_is_missing_is_refused_before_anything_is_loaded(name, run_cria, monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda what, *rest: None if what == name else found(what, *rest))
    monkeypatch.setattr(models, "find", lambda model: pytest.fail("a model was looked for"))
    code, _, stderr = run_cria("train", "--set", f"train.report_to={name}", "--out", tmp_path / "run")
    assert code == 2
    assert stderr == (
        f"error: train.report_to={name}: the package {name} is not installed; pip install 'cria_tricks[monitor]', or "
        "leave it out\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_word_that_is_none_of_them_is_refused(run_cria):
    code, _, stderr = run_cria("train", "--set", "train.report_to=wandb")
    assert code == 2
    assert "must be tensorboard or trackio" in stderr


def test_a_sample_is_one_row_of_numbers():
    sample = {"time": 9.0, "step": 3, "seconds": 1.0, "rss_bytes": 5, "cpu_cores": 0.5, "cards": [{"watts": 7}] * 2}
    assert flat(sample) == {
        "monitor/rss_bytes": 5, "monitor/cpu_cores": 0.5, "monitor/watts": 7, "monitor/watts_1": 7,
    }  # fmt: skip
    assert flat({}) == {}


def track(word, tiny_model, rows, folder, step=0):
    """Train three steps, reported to one."""
    recipe = with_settings(Recipe(name="tracked"), [*SETTINGS, f"train.report_to={word}"])
    sample = {"rss_bytes": 123, "cpu_cores": 1.0, "cards": []}
    with trackers(recipe, folder, step, lambda: sample) as callbacks:
        options = {"eval_rows": rows[:1], "callbacks": callbacks}
        return helpers.train(tiny_model, rows, folder / f"checkpoints-{step}", *SETTINGS, **options)[0]


def test_tensorboard_has_the_history(tiny_model, rows, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)  # the library's own choice is a folder "runs" in the current one
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = track("tensorboard", tiny_model, rows, tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in found.Scalars("train/loss")}
    assert losses == pytest.approx({entry["step"]: entry["loss"] for entry in done.training})
    evaluated = {event.step: event.value for event in found.Scalars("eval/loss")}
    assert evaluated == pytest.approx({entry["step"]: entry["eval_loss"] for entry in done.evaluations})
    assert {event.value for event in found.Scalars("monitor/rss_bytes")} == {123}
    assert 'name = "tracked"' in found.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert sorted(os.listdir(tmp_path)) == ["checkpoints-0", "tensorboard"], "and nowhere else"


def test_tensorboard_hides_what_is_done_again(tiny_model, rows, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tiny_model, rows, tmp_path)
    track("tensorboard", tiny_model, rows, tmp_path, step=1)  # of the first part only step 1 was saved
    found = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    steps = [event.step for event in found.Scalars("train/loss")]
    assert steps == [1, 1, 2, 3], "the second part begins again at 1 here, as it was not really resumed"


def test_trackio_writes_here_and_sends_nothing(tiny_model, rows, tmp_path, monkeypatch, capfd):
    pytest.importorskip("trackio")
    sent = []

    def refuse(self, address):
        sent.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **how: sent.append(where) or [])
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/dashboard")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("first", "second"):
        done = track("trackio", tiny_model, rows, tmp_path / name)
        with contextlib.closing(sqlite3.connect(tmp_path / name / "trackio" / "tracked.db")) as data:
            kept = [(step, json.loads(row)) for step, row in data.execute("select step, metrics from metrics")]
        losses = {step: row["train/loss"] for step, row in kept if "train/loss" in row}
        assert losses == pytest.approx({entry["step"]: entry["loss"] for entry in done.training})
        assert [row["eval/loss"] for _, row in kept if "eval/loss" in row] == pytest.approx(
            [entry["eval_loss"] for entry in done.evaluations]
        )
        assert all(row["monitor/rss_bytes"] == 123 for _, row in kept)
    assert sent == []
    assert os.environ["TRACKIO_SPACE_ID"] == "somebody/dashboard"
    assert "TRACKIO_DIR" not in os.environ
    assert "rackio" not in "".join(capfd.readouterr()), "nothing said, and of an upload least of all"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_reports_and_traces(rank, tmp_path):
    pytest.importorskip("tensorboard")
    settings = ["train.report_to=tensorboard", "train.profile=true"]
    recipe = with_settings(Recipe(), settings)
    folders = Folders(recipe, tmp_path / "run", False, {}, print)
    watch, progress = Monitor(tmp_path / "m", 0), ShowProgress(Console(), 1)
    job = Job(recipe, resolve(recipe), World(rank, 2, 2), None, None, folders, False, Console(), 0.0)
    with ready._onlookers(job, watch, progress) as found:
        names = [type(callback).__name__ for callback in found]
    between = [] if rank else ["Profile", "Tracker"]
    assert names == ["Monitor", *between, "ShowProgress"]
    assert (tmp_path / "run" / "tensorboard").exists() == (rank == 0)
