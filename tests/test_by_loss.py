"""``train.keep_best`` and ``train.patience``: the lowest loss is kept, an early end is said, and no bit moves."""

import io
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from cria_tricks.adapter.folder import verify
from cria_tricks.common.errors import Interrupted
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import page
from cria_tricks.report.summary import step_warnings
from cria_tricks.run import ready
from cria_tricks.run.train import train as whole_run
from cria_tricks.trainer import what_ran
from cria_tricks.trainer.step_meter import sizes
from cria_tricks.trainer.stops import KeepBest, Patience, lowest
from cria_tricks.trainer.training import Training
from tests.helpers import train, trained_weights

SETS = (
    "tricks.peft=lora", "lora.dropout=0.1", "train.max_steps=8", "train.eval_steps=1", "train.save_steps=2",
    "train.learning_rate=0.1", "train.warmup_ratio=0", "train.schedule=constant",
)  # fmt: skip
FASTER = (*SETS, "train.learning_rate=0.3")
LOSSES = {
    0.1: (5.0, 3.0, 4.0, 3.5, 2.0, 2.5, 2.2, 3.0, 2.6),
    0.3: (5.0, 3.0, 4.0, 3.5, 3.6, 3.7, 3.8, 3.9, 4.1, 4.2, 4.3),
    1.0: (5.0, 6.0),
}
"""Learning rate -> the loss of each evaluation, by its step: trained ones would differ from processor to processor."""


@pytest.fixture(autouse=True, scope="module")
def losses():
    """Put these in the place of the losses of evaluations; what is trained does not change."""
    honest = Training.loss_sum

    def loss_sum(self, batch):
        found = honest(self, batch)
        if torch.is_grad_enabled():
            return found
        return torch.full_like(found, LOSSES[self.settings.learning_rate][self.state.global_step] * sizes(batch)[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "loss_sum", loss_sum)
        yield


def curves(history):
    keys = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
    return [{key: entry[key] for key in keys if key in entry} for entry in history]


def equal(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def entry(step, loss):
    return {"step": step, "eval_loss": loss}


def test_the_lowest_is_the_first_of_equals():
    assert lowest([]) == ({}, 0)
    assert lowest([{"step": 1, "loss": 0.1}]) == ({}, 0)
    history = [entry(0, 3.0), {"step": 1, "loss": 0.1}, entry(1, 2.0), entry(2, 2.0), entry(3, 2.5)]
    assert lowest(history) == (entry(1, 2.0), 2), "an equal loss is no lower one"
    assert lowest([*history, entry(4, 1.0)]) == (entry(4, 1.0), 0)


def test_weights_are_kept_at_each_lower_loss_after_the_first_step(tiny_model, rows, tmp_path):
    kept = []
    plain, plainly = train(tiny_model, rows[:4], tmp_path / "off", *SETS, eval_rows=rows[4:])
    run, loaded = train(tiny_model, rows[:4], tmp_path / "on", *SETS, eval_rows=rows[4:], keep=kept.append)
    assert curves(run.history) == curves(plain.history)
    assert equal(trained_weights(loaded), trained_weights(plainly))
    assert [so_far.steps for so_far in kept] == [1, 4], "not those between, which are worse"
    assert all(so_far.goes_on and step_warnings(so_far) == [] for so_far in kept), "no early end is said"
    kept.clear()
    train(tiny_model, rows[:4], tmp_path / "known", *SETS, eval_rows=rows[4:], keep=kept.append, known=2.0)
    assert kept == [], "an equal loss does not replace what is there"


def test_patience_ends_the_run_and_a_resumed_run_goes_on_only_when_told(tiny_model, rows, tmp_path):
    options = {"eval_rows": rows[4:]}
    whole, loaded = train(tiny_model, rows[:4], tmp_path / "whole", *FASTER, **options)
    best, _ = lowest(whole.history)
    stops_after = best["step"] + 2
    assert stops_after < 8
    run, ended = train(tiny_model, rows[:4], tmp_path / "run", *FASTER, "train.patience=2", **options)
    assert (run.steps, run.planned_steps) == (stops_after, 8)
    assert curves(run.history) == curves(whole.history)[: len(run.history)]
    assert run.stopped_early == {
        "step": stops_after, "patience": 2, "lowest_step": best["step"], "lowest_loss": best["eval_loss"],
    }  # fmt: skip
    said = (
        f"train.patience=2 ended the run after step {stops_after} of 8: the last 2 evaluations were not below the loss "
        f"{best['eval_loss']:.4f} of step {best['step']}; --resume goes on with a larger train.patience, or with 0"
    )
    assert step_warnings(run) == [said]
    assert (tmp_path / "run" / f"checkpoint-{stops_after}").is_dir()

    resumed, again = train(tiny_model, rows[:4], tmp_path / "run", *FASTER, "train.patience=2", resume=True, **options)
    assert step_warnings(resumed) == [said]
    assert curves(resumed.history) == curves(run.history)
    assert equal(trained_weights(again), trained_weights(ended))

    further, to_the_end = train(tiny_model, rows[:4], tmp_path / "run", *FASTER, resume=True, **options)
    assert further.stopped_early == {}
    assert curves(further.history) == curves(whole.history)
    assert equal(trained_weights(to_the_end), trained_weights(loaded))


def test_the_evaluation_after_a_time_budget_counts_too_but_patience_did_not_end_the_run(tiny_model, rows, tmp_path):
    kept = []
    sets = (*SETS, "train.time_budget=0.001", "train.eval_steps=5", "train.patience=1")
    run, _ = train(tiny_model, rows[:4], tmp_path, *sets, eval_rows=rows[4:], keep=kept.append)
    assert ([found["step"] for found in run.evaluations], run.steps) == ([0, 1], 1)
    assert [so_far.steps for so_far in kept] == [1]
    kept.clear()
    worse = (*sets, "train.learning_rate=1", "train.seed=3")
    run, _ = train(tiny_model, rows[:4], tmp_path / "worse", *worse, eval_rows=rows[4:], keep=kept.append)
    assert run.evaluations[1]["eval_loss"] > run.evaluations[0]["eval_loss"], "so patience would be at its end"
    assert run.stopped_early == {}
    assert "train.time_budget ended the run after step 1 of 8" in step_warnings(run)[0]


def test_a_run_that_reaches_its_end_was_not_stopped_early(tiny_model, rows, tmp_path):
    run, _ = train(tiny_model, rows[:4], tmp_path, *SETS, "train.patience=100", eval_rows=rows[4:])
    assert (run.steps, run.stopped_early) == (8, {})
    at_the_end = Patience(1)

    state = SimpleNamespace(log_history=[entry(1, 1.0), entry(2, 2.0)], global_step=2, max_steps=2)
    at_the_end.on_evaluate(None, state, None)
    assert at_the_end.stopped == {}, "the last evaluation ends nothing"


def test_an_interrupted_write_is_not_taken_for_kept():
    def full():
        raise OSError("no space")

    callback = KeepBest(full, float("inf"))

    with pytest.raises(OSError, match="no space"):
        callback.on_evaluate(None, SimpleNamespace(global_step=1), None, {"eval_loss": 1.0})
    assert callback.known == float("inf")


class StopBefore(TrainerCallback):
    """Presses Ctrl-C before the optimizer takes a step."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def carry_out(folder: Path, *settings: str, resume: bool = False) -> tuple[dict, str]:
    """A whole run on a few short rows, with its report and what it said."""
    said = io.StringIO()
    for name, names in (("train", ("Ella Baker", "Bayard Rustin", "Septima Clark")), ("eval", ("Diane Nash",))):
        rows = [{"prompt": f"Who was {who}?", "completion": f"{who} was an organiser."} for who in names]
        (folder.parent / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = [
        "model=random:tiny", f"data.train={folder.parent / 'train.jsonl'}", f"data.eval={folder.parent / 'eval.jsonl'}",
        "data.max_length=64", "lora.r=2", "train.learning_rate=0.3", "train.monitor_seconds=0",
    ]  # fmt: skip
    recipe = with_settings(Recipe(name="kept"), [*SETS, *made, *settings])
    return whole_run(recipe, folder, resume=resume, console=Console(file=said, width=400)), said.getvalue()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The report, the words and the folder of a run that kept its best."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    report, said = carry_out(folder, "train.keep_best=true")
    return report, said, folder


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_the_folder_is_whole_and_is_the_adapter_of_a_run_that_ends_there(kept, tmp_path):
    report, said, folder = kept
    best = report["best"]
    evaluations = [found for found in report["history"] if "eval_loss" in found and found["step"]]
    assert best == {key: lowest(evaluations)[0][key] for key in ("step", "eval_loss")}
    assert 1 <= best["step"] < 8
    assert verify(folder / "best")["unlisted"] == []
    assert sorted(os.listdir(folder / "best")) == sorted(os.listdir(folder / "adapter"))
    ends_there, _ = carry_out(tmp_path / "run", f"train.max_steps={best['step']}")
    assert weights(folder / "best") == weights(tmp_path / "run" / "adapter") != weights(folder / "adapter")
    assert json.loads((folder / "best" / "provenance.json").read_text())["kept"] == best
    card = (folder / "best" / "README.md").read_text()
    assert f"These are the weights after step {best['step']}, whose evaluation loss of {best['eval_loss']:.4f}" in card
    assert "keep_best" not in (folder / "adapter" / "README.md").read_text()
    assert f"kept in {folder / 'best'}" in said
    assert f"| {best['eval_loss']:.4f} after step {best['step']}" in (folder / "report.md").read_text()
    assert ends_there["best"] is None
    assert "kept in" not in page.markdown(ends_there)


def test_the_run_is_the_same_bit_for_bit(kept, tmp_path):
    report, _, folder = kept
    plain, _ = carry_out(tmp_path / "run")
    assert curves(plain["history"]) == curves(report["history"])
    assert weights(tmp_path / "run" / "adapter") == weights(folder / "adapter")
    assert not (tmp_path / "run" / "best").exists()


def test_after_ctrl_c_it_is_there_and_the_resumed_run_remembers_it(kept, tmp_path, monkeypatch):
    report, _, folder = kept
    step = report["best"]["step"] + 2
    onlookers = ready._onlookers
    monkeypatch.setattr(ready, "_onlookers", lambda *given: with_stop(onlookers(*given), step))
    mirrored = ("train.keep_best=true", f"train.mirror={tmp_path / 'mirror'}")
    with pytest.raises(Interrupted):
        carry_out(tmp_path / "run", *mirrored)
    monkeypatch.setattr(ready, "_onlookers", onlookers)
    assert not (tmp_path / "run" / "adapter").exists()
    verify(tmp_path / "run" / "best")
    shutil.rmtree(tmp_path / "run")  # a new machine has the mirror alone
    resumed, said = carry_out(tmp_path / "run", *mirrored, resume=True)
    assert "kept in" not in said, "no later loss is lower"
    assert resumed["best"] == report["best"]
    assert curves(resumed["history"]) == curves(report["history"])
    for name in ("best", "adapter"):
        assert weights(tmp_path / "run" / name) == weights(folder / name) == weights(tmp_path / "mirror" / name)


def with_stop(context, step):
    """The callbacks of a run, and one more that stops it."""
    import contextlib

    @contextlib.contextmanager
    def more():
        with context as found:
            yield [*found, StopBefore(step)]

    return more()


def test_a_damaged_one_is_kept_anew_and_the_report_says_what_was_lower(kept, tmp_path):
    report, _, folder = kept
    shutil.copytree(folder.parent, tmp_path / "copy")
    run = tmp_path / "copy" / "run"
    (run / "best" / "adapter_model.safetensors").write_bytes(b"damaged")
    # Two more steps, so that there is an evaluation after the resume.
    resumed, said = carry_out(run, "train.keep_best=true", "train.max_steps=10", resume=True)
    assert "best: adapter_model.safetensors" in said
    assert "it is kept anew after the next evaluation" in said
    assert resumed["best"]["step"] in (9, 10)
    verify(run / "best")
    words = f"step {report['best']['step']} had {report['best']['eval_loss']:.4f}, and its weights were not kept"
    before = lowest(report["history"])[0]
    assert before["step"] == 0 or words in (run / "report.md").read_text()


def test_what_was_lower_is_said():
    assert what_ran.best(entry(4, 2.0), entry(4, 2.0)) == "2.0000 after step 4"
    said = "2.0000 after step 4; step 0 had 1.5000, and its weights were not kept"
    assert what_ran.best(entry(4, 2.0), entry(0, 1.5)) == said


def test_an_early_end_is_in_the_report(tmp_path):
    report, _ = carry_out(tmp_path / "run", "train.patience=1", "train.keep_best=true")
    assert report["stopped_early"]["patience"] == 1
    assert report["steps"] == report["stopped_early"]["step"] < 8
    assert "train.patience=1 ended the run after step" in (tmp_path / "run" / "report.md").read_text()
    resumed, said = carry_out(tmp_path / "run", "train.patience=1", "train.keep_best=true", resume=True)
    assert said.count("train.patience=1 ended the run after step") == 1
    assert (resumed["steps"], resumed["best"]) == (report["steps"], report["best"])
