"""Checkpoints under fire: whatever happens to the process, the files or the disk, the run is the same or says why."""

import contextlib
import functools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, Interrupted, OutOfMemory, Unwritten
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.store.checkpoints import Checkpoints, describe, refuse_another_run
from cria_tricks.techniques.optimizer_in_backward import StepInBackward
from cria_tricks.trainer import checkpoint
from cria_tricks.trainer.fit import fit, training
from cria_tricks.trainer.training import Training
from tests.helpers import At, Killed, kill, prepare, send, train, trained_weights

SETS = ("tricks.peft=lora", "lora.dropout=0.1", "train.max_steps=7", "train.save_steps=2", "train.eval_steps=3")


EVERY = os.environ.get("CRIA_ALL") == "1"
"""Whether sweeps are whole, as in ``make check-all``; else a sample of them is drawn, one of each kind."""


class DuringEvaluation(TrainerCallback):
    def __init__(self, step: int, act):
        self.step, self.act = step, act

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def raising(error: BaseException):
    def act():
        raise error

    return act


def curves(run):
    keys = ("step", "loss", "eval_loss", "grad_norm", "learning_rate", "trained_tokens")
    return [{key: entry[key] for key in keys if key in entry} for entry in run.history]


def same(run, loaded, other_run, other_loaded):
    assert curves(run) == curves(other_run)
    ours, theirs = trained_weights(loaded), trained_weights(other_loaded)
    assert ours
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def whole(tiny_model, rows, tmp_path_factory):
    """The run that nobody stopped, made once for the same settings, rows to evaluate and number of threads."""

    @functools.cache
    def run(sets, evaluated, threads):
        return train(tiny_model, rows, tmp_path_factory.mktemp("whole"), *sets, eval_rows=rows[:evaluated])

    return lambda *more, evaluated=2: run((*SETS, *more), evaluated, torch.get_num_threads())


STOPS = {"SIGINT": (3, 6), "SIGTERM": (1, 4, 7), "kill": (2, 5)}
"""Before which of seven steps each comes: inside epochs of five rows and at their ends, on saves and between them."""


def some_of(steps, *of):
    """One step, drawn by what is tested, and so the same in every run; all of them where sweeps are whole."""
    return steps if EVERY else (random.Random(" ".join(map(str, of))).choice(steps),)


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("setting", ["tricks.quantization=none", "tricks.quantization=nf4"])
def test_stopped_at_any_step_and_resumed_is_the_uninterrupted_run(setting, name, whole, tiny_model, rows, tmp_path):
    for step in some_of(STOPS[name], setting, name):
        _stop_and_resume(name, step, setting, whole, tiny_model, rows, tmp_path)


@pytest.mark.parametrize("setting", ["tricks.quantization=none", *["tricks.quantization=nf4"] * EVERY])
def test_so_it_is_with_two_threads(setting, whole, tiny_model, rows, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name, step in some_of((("SIGINT", 3), ("SIGTERM", 4), ("kill", 5)), setting):
            _stop_and_resume(name, step, setting, whole, tiny_model, rows, tmp_path)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "setting",
    [
        "tricks.precision=fp16",
        "tricks.peft=head",
        "tricks.peft=none",
        "tricks.gradient_accumulation=2",
        "tricks.optimizer=adamw_8bit",
    ],
)
def test_so_it_is_with_every_kind_of_state(setting, whole, tiny_model, rows, tmp_path):
    for name, step in some_of((("SIGINT", 3), ("kill", 5)), setting):
        _stop_and_resume(name, step, setting, whole, tiny_model, rows, tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_killed_in_a_backward_pass_when_some_weights_have_stepped(
    optimizer, whole, tiny_model, rows, tmp_path, monkeypatch
):
    """With steps in the backward pass the model is then half a step further; the resumed run is the whole one."""
    more = ("tricks.peft=none", f"tricks.optimizer={optimizer}", "tricks.optimizer_in_backward=true")
    more = (*more, "train.max_grad_norm=0")
    expected = whole(*more)
    step_of, taken = StepInBackward._step, []

    def killed_in_the_fourth_step(self, weight):
        step_of(self, weight)
        taken.append(self.steps)
        if len(taken) == 3 * len(self.weights) + 5:
            raise Killed

    monkeypatch.setattr(StepInBackward, "_step", killed_in_the_fourth_step)
    with pytest.raises(Killed):
        train(tiny_model, rows, tmp_path, *SETS, *more, eval_rows=rows[:2])
    assert taken[-1] == 5, "five weights have taken their fourth step, and the others have not"
    monkeypatch.undo()
    assert Checkpoints(tmp_path).newest().step == 2
    same(*expected, *train(tiny_model, rows, tmp_path, *SETS, *more, eval_rows=rows[:2], resume=True))


def _stop_and_resume(name, step, setting, whole, tiny_model, rows, tmp_path):
    sets, out = (*SETS, setting), tmp_path / f"{name}-{step}"
    error, act = {
        "SIGINT": (Interrupted, send(signal.SIGINT)),
        "SIGTERM": (Interrupted, send(signal.SIGTERM)),
        "kill": (Killed, kill),
    }[name]
    with pytest.raises(error):
        train(tiny_model, rows, out, *sets, eval_rows=rows[:2], callbacks=[At(step, act)])
    saved = Checkpoints(out).newest()
    assert (saved.step if saved else 0) == (step if error is Interrupted else (step - 1) // 2 * 2)
    same(*whole(setting), *train(tiny_model, rows, out, *sets, eval_rows=rows[:2], resume=True))


@pytest.mark.parametrize("step", [0, 3, 7])
def test_stopped_in_an_evaluation_it_ends_at_once_and_evaluates_again_after_the_resume(
    step, whole, tiny_model, rows, tmp_path
):
    stop = DuringEvaluation(step, send(signal.SIGTERM))
    with pytest.raises(Interrupted, match=f"after step {step}"):
        train(tiny_model, rows, tmp_path / "b", *SETS, eval_rows=rows, callbacks=[stop])
    assert [path.name for path in (tmp_path / "b").glob("*")].count(f"checkpoint-{step}") == (step > 0)
    same(*whole(evaluated=5), *train(tiny_model, rows, tmp_path / "b", *SETS, eval_rows=rows, resume=True))


def test_evaluating_more_often_changes_nothing_in_the_training(whole, tiny_model, rows, tmp_path):
    often, a = train(tiny_model, rows, tmp_path, *SETS, "train.eval_steps=1", eval_rows=rows)
    never, b = whole(evaluated=0)
    assert [entry["loss"] for entry in often.training] == [entry["loss"] for entry in never.training]
    assert all(torch.equal(p, trained_weights(b)[name]) for name, p in trained_weights(a).items())


def test_a_finished_run_resumed_takes_no_further_step(tiny_model, rows, tmp_path):
    finished, straight = train(tiny_model, rows, tmp_path, *SETS, eval_rows=rows)
    same(finished, straight, *train(tiny_model, rows, tmp_path, *SETS, eval_rows=rows, resume=True))


def test_the_newest_two_are_kept_and_nothing_else(tiny_model, rows, tmp_path):
    (tmp_path / "checkpoint-2.partial").mkdir()  # of a process that was killed
    train(tiny_model, rows, tmp_path, *SETS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-7"]
    files = {path.name for path in (tmp_path / "checkpoint-7").iterdir()}
    assert {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "random.safetensors", "run.json"} <= files
    assert not [name for name in files if name.startswith(("model", "pytorch_model", "training_args"))]


def test_the_clock_saves_between_the_steps_cadence(tiny_model, rows, tmp_path):
    sets = ("tricks.peft=lora", "train.max_steps=6", "train.save_steps=1000")
    train(tiny_model, rows, tmp_path / "never", *sets, "train.save_minutes=0")
    train(tiny_model, rows, tmp_path / "always", *sets, "train.save_minutes=1e-9")
    assert [p.name for p in (tmp_path / "never").iterdir()] == ["checkpoint-6"]
    assert sorted(p.name for p in (tmp_path / "always").iterdir()) == ["checkpoint-5", "checkpoint-6"]


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "bit-flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "removed": lambda path: path.unlink(),
}


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.fixture(scope="module")
def halted(whole, tiny_model, rows, tmp_path_factory):
    """A run killed in step 6, fp16 so that it has a scaler too, and its settings."""
    folder = tmp_path_factory.mktemp("halted")
    sets = (*SETS, "tricks.precision=fp16")
    with pytest.raises(Killed):
        train(tiny_model, rows, folder / "cut", *sets, eval_rows=rows[:2], callbacks=[At(6, kill)])
    return folder / "cut", sets


FILES = (
    "README.md", "adapter_config.json", "adapter_model.safetensors", "manifest.json", "optimizer.pt",
    "random.safetensors", "run.json", "scaler.pt", "scheduler.pt", "trainer_state.json",
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_file_of_the_newest_damaged_in_turn_resumes_from_the_one_before(damage, halted, tmp_path):
    folder, _ = halted
    assert {path.name for path in (folder / "checkpoint-4").iterdir()} == set(FILES)
    for name in FILES:
        out = tmp_path / name
        shutil.copytree(folder, out)
        DAMAGES[damage](out / "checkpoint-4" / name)
        said: list[str] = []
        checkpoints = Checkpoints(out, say=said.append)
        start = checkpoints.newest()
        assert start
        assert start.step == 2
        assert len(said) == 1
        assert name in said[0]
        assert "going on from checkpoint-2" in said[0]


@pytest.mark.parametrize(("damage", "name"), [("removed", "optimizer.pt"), ("bit-flipped", "random.safetensors")])
def test_the_run_resumed_past_a_damaged_checkpoint_is_the_uninterrupted_one(
    damage, name, halted, whole, tiny_model, rows, tmp_path
):
    folder, sets = halted
    shutil.copytree(folder, tmp_path / "out")
    DAMAGES[damage](tmp_path / "out" / "checkpoint-4" / name)
    resumed = train(tiny_model, rows, tmp_path / "out", *sets, eval_rows=rows[:2], resume=True)
    same(*whole("tricks.precision=fp16"), *resumed)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt"])
def test_a_pickle_with_a_forged_manifest_is_refused_and_never_run(name, halted, tiny_model, rows, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "evil"),))

    folder, sets = halted
    shutil.copytree(folder, tmp_path / "out")
    newest = tmp_path / "out" / "checkpoint-4"
    torch.save(Evil(), newest / name)
    (newest / "manifest.json").unlink()
    atomic_files.write_manifest(newest)
    with pytest.raises(BadInput, match="cannot be loaded") as caught:
        train(tiny_model, rows, tmp_path / "out", *sets, eval_rows=rows[:2], resume=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "evil").exists()


def test_the_mirror_has_each_checkpoint_and_is_resumed_from_when_the_machine_is_gone(whole, tiny_model, rows, tmp_path):
    def run(folder, start=None, callbacks=()):
        recipe, plan, loaded = prepare(tiny_model, *SETS)
        checkpoints = Checkpoints(tmp_path / folder, tmp_path / "mirror")
        start = checkpoints.newest()
        return fit(training(
            loaded, plan, recipe.train, rows, (), checkpoints, pad_id=2, start=start, callbacks=callbacks
        )), loaded  # fmt: skip

    with pytest.raises(Killed):
        run("gone", callbacks=[At(6, kill)])
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    shutil.rmtree(tmp_path / "gone")
    same(*whole(evaluated=0), *run("new"))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["checkpoint-6", "checkpoint-7"]
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == ["checkpoint-6", "checkpoint-7"]


@pytest.mark.parametrize("size", [0, 20_000])
def test_a_disk_that_takes_no_more_loses_nothing_saved_before(size, whole, tiny_model, rows, tmp_path):
    """A quota on the size of a file, set in the middle of the run; the weights' and the optimizer's files meet it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = At(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard)))
    try:
        with pytest.raises(Unwritten, match="checkpoint-4: cannot be written: .*; what was saved before is whole"):
            train(tiny_model, rows, tmp_path / "out", *SETS, callbacks=[full])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    same(*whole(evaluated=0), *train(tiny_model, rows, tmp_path / "out", *SETS, resume=True))


def test_a_really_full_disk_loses_nothing_saved_before(whole, tiny_model, rows, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs Linux and root")
    try:
        with pytest.raises(Unwritten, match="checkpoint-4: cannot be written: (No space|the disk took)"):
            train(tiny_model, rows, disk, *SETS, callbacks=[At(4, lambda: fill(disk))])
        assert atomic_files.damage(disk / "checkpoint-2") == ""
        (disk / "filler").unlink()
        same(*whole(evaluated=0), *train(tiny_model, rows, disk, *SETS, resume=True))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)  # safetensors still maps a file of it


def fill(disk: Path) -> None:
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(b"x" * (free - 50_000))


@pytest.mark.parametrize("where", ["forward pass", "backward pass", "evaluation"])
def test_out_of_memory_saves_the_last_whole_step_and_says_at_what_it_was(
    where, whole, tiny_model, rows, tmp_path, monkeypatch
):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise full

    honest = Training.loss_sum

    def loss_sum(self, batch):
        if self.state.global_step == 3 and self.moment == where:
            torch.rand(7)  # the step had drawn some numbers
            raise full
        loss = honest(self, batch)
        return Full.apply(loss) if self.state.global_step == 3 and where == "backward pass" else loss

    with monkeypatch.context() as patch:
        patch.setattr(Training, "loss_sum", loss_sum)
        place = "after step 3" if where == "evaluation" else "of step 4"
        with pytest.raises(OutOfMemory, match=f"out of memory in the {where} {place}; the state after step 3 is in"):
            train(tiny_model, rows, tmp_path / "out", *SETS, eval_rows=rows[:2])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-3"]
    same(*whole(), *train(tiny_model, rows, tmp_path / "out", *SETS, eval_rows=rows[:2], resume=True))


def test_out_of_memory_in_the_optimizer_step_saves_nothing_half_done(tiny_model, rows, tmp_path):
    full = At(4, raising(RuntimeError("CUDA error: out of memory")))
    with pytest.raises(OutOfMemory, match=r"optimizer step of step 4; the newest checkpoint is .*checkpoint-2"):
        train(tiny_model, rows, tmp_path, *SETS, callbacks=[full])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


CONSTANT = ("train.schedule=constant", "train.warmup_ratio=0")


@pytest.mark.parametrize("steps", [3, 5, 6])  # inside an epoch of five rows, at its end, on a save
def test_a_finished_run_lengthened_is_the_longer_run(steps, whole, tiny_model, rows, tmp_path):
    train(tiny_model, rows, tmp_path, *SETS, *CONSTANT, f"train.max_steps={steps}", eval_rows=rows[:2])
    longer = train(tiny_model, rows, tmp_path, *SETS, *CONSTANT, eval_rows=rows[:2], resume=True)
    run, loaded = longer
    assert run.lengthened == ()
    also = {steps} - {3, 6}  # the shorter run was evaluated at its end, and that stays in the history
    kept = [entry for entry in run.history if "loss" in entry or entry["step"] not in also]
    assert len(run.history) - len(kept) == len(also)
    same(replace(run, history=kept), loaded, *whole(*CONSTANT))


def test_where_the_rates_would_have_been_others_it_says_so(whole, tiny_model, rows, tmp_path):
    said: list[str] = []
    train(tiny_model, rows, tmp_path, *SETS, "train.max_steps=4", eval_rows=rows[:2])
    checkpoints = Checkpoints(tmp_path, say=said.append)
    for stopped in (True, False):
        recipe, plan, loaded = prepare(tiny_model, *SETS)
        halt = [At(6, send(signal.SIGINT))] if stopped else []
        with pytest.raises(Interrupted) if stopped else contextlib.nullcontext():
            start = checkpoints.newest()
            run = fit(
                training(loaded, plan, recipe.train, rows, rows[:2], checkpoints, pad_id=2, start=start, callbacks=halt)
            )
    [warning] = said  # not once more by the second resume, which lengthens nothing
    assert re.search(
        r"lengthened after step 4: its first steps had .* of a run of 4 steps, so it differs from a run", warning
    )
    assert run.lengthened == ({"step": 4, "lengthened_from": 4},)
    rates, wanted = ([entry["learning_rate"] for entry in made.training] for made in (run, whole()[0]))
    assert rates[4:] == wanted[4:]  # from there on it follows the longer run's schedule
    assert rates[:4] != wanted[:4]


def test_the_length_may_only_grow():
    def describe_length(*settings):
        return describe(with_settings(Recipe(), settings), {}, "cpu")

    def allowed(before, after):
        refuse_another_run(describe_length(*before), describe_length(*after), Path("c"))

    steps, epochs = "train.max_steps={}".format, "train.epochs={}".format
    allowed([steps(4)], [steps(9)])
    allowed([epochs(1)], [epochs(1.5)])
    allowed([steps(4), epochs(3)], [steps(4), epochs(1)])  # steps decide
    for before, after in (([steps(9)], [steps(4)]), ([epochs(2)], [epochs(1)])):
        with pytest.raises(
            BadInput, match=r"made longer by train\.(max_steps|epochs), which set its length, and never shorter; set"
        ):
            allowed(before, after)
    for before, after in (([steps(4)], []), ([], [steps(4)])):  # which of the two is longer, nobody knows yet
        with pytest.raises(
            BadInput, match=r"max_steps \(\d, now \d\); a run can be made longer by train\.(max_steps|epochs), which"
        ):
            allowed(before, after)


def test_the_cadence_may_change_on_resume(tiny_model, rows, tmp_path):
    sets = (*SETS, "train.save_steps=100")
    with pytest.raises(Interrupted):
        train(tiny_model, rows, tmp_path, *sets, callbacks=[At(2, send(signal.SIGINT))])
    with pytest.raises(Killed):
        train(tiny_model, rows, tmp_path, *SETS, "train.save_steps=1", resume=True, callbacks=[At(6, kill)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5"]


def test_paged_states_are_put_back_in_pages():
    """On a CPU bitsandbytes gives plain memory for a page, but the way is the same; tests/gpu looks at real pages."""
    from bitsandbytes.optim import GlobalOptimManager, PagedAdamW8bit

    GlobalOptimManager.get_instance().initialize()  # it may remember the embedding of an earlier run
    weight = torch.nn.Parameter(torch.randn(100, 100))
    optimizer = PagedAdamW8bit([weight])
    weight.grad = torch.randn(100, 100)
    optimizer.step()
    state = optimizer.state[weight]
    before = {name: (state[name], state[name].clone()) for name in ("state1", "state2")}
    checkpoint.page_again(optimizer)
    for name, (old, content) in before.items():
        assert state[name].data_ptr() != old.data_ptr(), "a page of its own"
        assert state[name].dtype == torch.uint8
        assert torch.equal(state[name], content)


def test_a_resumed_run_puts_its_states_back_in_pages(tiny_model, rows, tmp_path, monkeypatch):
    paged = ("tricks.peft=lora", "tricks.optimizer=adamw_8bit", "tricks.paged_optimizer=true", "train.max_steps=2")
    sets = (*paged, "train.save_steps=1")
    with pytest.raises(Killed):
        train(tiny_model, rows, tmp_path, *sets, callbacks=[At(2, kill)])
    asked, honest = [], checkpoint.page_again
    monkeypatch.setattr(checkpoint, "page_again", lambda optimizer: asked.append(honest(optimizer)))
    train(tiny_model, rows, tmp_path, *sets, resume=True)
    assert len(asked) == 1
