"""The trainer's promises: token-true means, no step on a bad number, nothing lost by Ctrl-C or a resume."""

import math
import os
import shutil
import signal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from cria_tricks.common.errors import BadInput, Diverged, Interrupted
from cria_tricks.trainer.training import Training
from tests.helpers import prepare, train, trained_weights


def token_mean(model, rows) -> torch.Tensor:
    """The loss by its definition: every trained token counts once."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logits = model(input_ids=ids).logits[0, :-1].float()
        total = total + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total / count


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step, before clipping could scale them."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


LOSSES = pytest.mark.parametrize("loss", ["tricks.chunked_loss=false", "tricks.chunked_loss=true"])
UP = "model.layers.1.mlp.up_proj.weight"
FREE = ("train.max_grad_norm=1e9", "train.warmup_ratio=0", "train.save_steps=1000")


@LOSSES
def test_a_window_of_ragged_micro_batches_has_the_gradient_of_its_token_mean(loss, tiny_model, rows, tmp_path):
    """Five rows, windows of two: the last window is partial, and no row is as long as another."""
    kept = Gradients()
    sets = ("tricks.peft=lora", loss, "tricks.gradient_accumulation=2", "train.learning_rate=1e-9", *FREE)
    run, _ = train(tiny_model, rows, tmp_path, *sets, callbacks=[kept])
    assert run.steps == 3
    assert sorted(entry["trained_tokens"] for entry in run.training)[0] < 15, "the partial window"
    _, _, fresh = prepare(tiny_model, "tricks.peft=lora")
    windows = _windows_in_the_order_seen(tiny_model, rows, tmp_path)
    for found, entry, window in zip(kept.steps, run.training, windows, strict=True):
        fresh.model.zero_grad()
        expected = token_mean(fresh.model, window)
        expected.backward()
        assert entry["loss"] == pytest.approx(expected.item(), abs=1e-5)
        for name, p in fresh.model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)


def _windows_in_the_order_seen(folder, rows, out):
    """The loop shuffles with its seed: watch which rows it takes."""
    from cria_tricks.data.batches import PadToLongest

    seen = []
    original = PadToLongest.__call__
    try:
        PadToLongest.__call__ = lambda self, batch: seen.append(batch) or original(self, batch)
        train(folder, rows, out, "tricks.peft=lora", "tricks.gradient_accumulation=2", *FREE)
    finally:
        PadToLongest.__call__ = original
    flat = [row for batch in seen for row in batch]
    return [flat[0:2], flat[2:4], flat[4:5]]


@LOSSES
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_evaluation_loss_is_the_mean_over_all_trained_tokens(loss, batch_size, tiny_model, rows, tmp_path):
    sets = ("tricks.peft=lora", loss, f"train.batch_size={batch_size}", "train.max_steps=1", *FREE)
    run, _ = train(tiny_model, rows, tmp_path, *sets, eval_rows=rows)
    _, _, fresh = prepare(tiny_model, "tricks.peft=lora")
    with torch.no_grad():
        expected = token_mean(fresh.model, rows).item()
    before, after = run.evaluations[0], run.evaluations[-1]
    assert (before["step"], after["step"]) == (0, 1)
    assert before["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert before["eval_tokens"] == sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)


def test_evaluates_before_during_and_after(tiny_model, rows, tmp_path):
    sets = ("tricks.peft=lora", "train.max_steps=5", "train.eval_steps=2")
    run, _ = train(tiny_model, rows, tmp_path, *sets, eval_rows=rows[:1])
    assert [entry["step"] for entry in run.evaluations] == [0, 2, 4, 5]
    assert all({"step_seconds", "tokens", "grad_norm"} <= set(entry) for entry in run.training)
    assert "peak_bytes" in run.training[0]


def test_a_run_says_what_it_did_step_by_step(tiny_model, rows, tmp_path):
    """Five rows in batches of two and windows of two batches: two windows an epoch, and the second has one row."""
    sets = ("train.batch_size=2", "tricks.gradient_accumulation=2", "train.max_steps=5", "train.eval_steps=4")
    run, _ = train(tiny_model, rows, tmp_path, "tricks.peft=head", *sets, eval_rows=rows[:3])
    assert (run.steps, run.planned_steps, run.train_rows, run.skipped_steps, run.warnings) == (5, 5, 5, 0, ())
    assert [entry["step"] for entry in run.training] == [1, 2, 3, 4, 5]
    assert [entry["epoch"] for entry in run.training] == pytest.approx([2 / 3, 1, 5 / 3, 2, 8 / 3])
    assert [entry["step"] for entry in run.evaluations] == [0, 4, 5]
    tokens = sum(len(row["input_ids"]) for row in rows)
    trained = sum(label != -100 for row in rows for label in row["labels"][1:])
    for name, whole in (("tokens", tokens), ("trained_tokens", trained)):
        counts = [entry[name] for entry in run.training]
        assert counts[0] + counts[1] == counts[2] + counts[3] == whole
    assert all(0 < entry["eval_seconds"] < 100 for entry in run.evaluations)
    assert {entry["eval_tokens"] for entry in run.evaluations} == {18 + 14 + 7}
    assert len(run.history) == 8


def test_packed_rows_are_fewer(tiny_model, rows, tmp_path):
    sets = ("tricks.peft=head", "tricks.packing=true", "data.max_length=64")
    run, _ = train(tiny_model, rows, tmp_path, *sets)
    assert (run.train_rows, run.steps, run.planned_steps, run.evaluations) == (2, 2, 2, [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_adapter_is_touched(bad, tiny_model, rows, tmp_path, monkeypatch):
    honest = Training.loss
    seen = {}

    def loss(self, batch, tokens):
        if self.state.global_step == 1:
            seen["before"] = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
            seen["model"] = self.model
            return honest(self, batch, tokens) * bad
        return honest(self, batch, tokens)

    monkeypatch.setattr(Training, "loss", loss)
    with pytest.raises(Diverged, match=f"the loss is {bad} at step 2; stopped before the optimizer touched"):
        train(tiny_model, rows, tmp_path, "tricks.peft=lora", "train.max_steps=4")
    for name, p in seen["model"].named_parameters():
        if p.requires_grad:
            assert torch.equal(p, seen["before"][name])


def base_with(value: float, folder, tiny_model):
    """A copy of the tiny model with one bad number in a matrix that quantization packs."""
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[UP].view(-1)[7] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class NoSteps(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pytest.fail("the optimizer is about to take a step")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("tricks.quantization=nf4",),
        ("tricks.quantization=nf4", "tricks.double_quantization=true"),
        ("tricks.quantization=nf4", "lora.init=loftq"),
        ("tricks.quantization=int8",),
        ("tricks.precision=fp16", "tricks.lean_preparation=true"),
    ],
    ids=" ".join,
)
def test_nan_in_the_base_ends_the_run_before_any_step_and_names_the_tensor(value, settings, tiny_model, rows, tmp_path):
    folder = base_with(value, tmp_path / "base", tiny_model)
    for eval_rows in (rows[:1], ()):  # without an evaluation the first loss of training shows it
        with pytest.raises(BadInput, match=f"^model .*base: {UP} in model.safetensors holds NaN or infinity") as caught:
            train(folder, rows, tmp_path / "out", "tricks.peft=lora", *settings, eval_rows=eval_rows,
                  callbacks=[NoSteps()])  # fmt: skip
        assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_numbers_too_large_for_fp16_are_no_nan_in_the_base(tiny_model, rows, tmp_path):
    folder = base_with(1e30, tmp_path / "base", tiny_model)
    with pytest.raises(Diverged, match="evaluation loss is nan at step 0. No weight has moved yet. fp16 ends"):
        train(folder, rows, tmp_path / "out", "tricks.peft=lora", "tricks.precision=fp16", eval_rows=rows[:1])


def test_gradients_that_are_not_finite_stop_the_run_too(tiny_model, rows, tmp_path):
    class Spoil(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = float("nan")

    with pytest.raises(Diverged, match="the gradients are not finite at step 1"):
        train(tiny_model, rows, tmp_path, "tricks.peft=lora", "tricks.gradient_accumulation=2", callbacks=[Spoil()])


def test_fp16_on_a_cpu_is_real_and_its_skipped_steps_are_counted(tiny_model, rows, tmp_path):
    """Accelerate takes fp16=True on a CPU and then runs fp32; here products are in fp16 and the loss is scaled."""

    class Overflow(TrainerCallback):
        def __init__(self):
            self.dtypes = set()

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            layer = model.model.layers[0].self_attn.q_proj
            layer.register_forward_hook(lambda module, inputs, out: self.dtypes.add(out.dtype))

        def on_substep_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = float("inf")

    watch = Overflow()
    # Full fine-tuning: its weights are fp32, so only autocast can make the products fp16.
    sets = ("tricks.precision=fp16", "tricks.gradient_accumulation=2", "train.max_steps=3")
    run, loaded = train(tiny_model, rows, tmp_path, *sets, callbacks=[watch])
    assert watch.dtypes == {torch.float16}
    assert run.skipped_steps == 1
    assert [entry["skipped"] for entry in run.training] == [0, 1, 0]
    assert all(torch.isfinite(p).all() for p in trained_weights(loaded).values())


def test_fp16_that_never_takes_a_step_stops_with_a_word(tiny_model, rows, tmp_path):
    class Spoil(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = float("nan")

    sets = ("tricks.peft=lora", "tricks.precision=fp16", "tricks.gradient_accumulation=2", "train.max_steps=3")
    with pytest.raises(Diverged, match="skipped 3 steps in a row, up to step 3: the run ended while"):
        train(tiny_model, rows[:2], tmp_path, *sets, callbacks=[Spoil()])


class InterruptAt(TrainerCallback):
    """Ctrl-C in the middle of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("setting", ["tricks.quantization=none", "tricks.quantization=nf4", "tricks.precision=fp16"])
def test_interrupted_and_resumed_is_the_uninterrupted_run(setting, tiny_model, rows, tmp_path):
    sets = (
        "tricks.peft=lora",
        setting,
        "tricks.optimizer=adamw_8bit",
        "lora.dropout=0.1",
        "train.max_steps=6",
    )
    before = signal.getsignal(signal.SIGINT)
    whole, straight = train(tiny_model, rows, tmp_path / "a", *sets, eval_rows=rows[:2])
    with pytest.raises(Interrupted, match="after step 3"):
        train(tiny_model, rows, tmp_path / "b", *sets, eval_rows=rows[:2], callbacks=[InterruptAt(3)])
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "b" / "checkpoint-3").is_dir()
    run, resumed = train(tiny_model, rows, tmp_path / "b", *sets, eval_rows=rows[:2], resume=True)
    for key, entries in (("loss", "training"), ("eval_loss", "evaluations")):
        assert [e[key] for e in getattr(run, entries)] == [e[key] for e in getattr(whole, entries)]
    before, after = trained_weights(straight), trained_weights(resumed)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_resume_without_a_checkpoint_starts_from_the_beginning(tiny_model, rows, tmp_path):
    run, _ = train(tiny_model, rows, tmp_path / "none", "tricks.peft=lora", "train.max_steps=2", resume=True)
    assert [entry["step"] for entry in run.training] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "library", "states"),
    [((), "torch", torch.float32), (("tricks.optimizer=adamw_8bit",), "bitsandbytes", torch.uint8)],
)
def test_the_optimizer_that_really_runs(settings, library, states, tiny_model, rows, tmp_path):
    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, optimizer=None, **kwargs):
            self.inner = optimizer

    watch = Watch()
    # An earlier run in the same process, whose embedding transformers asks bitsandbytes to keep in 32 bits ...
    train(tiny_model, rows, tmp_path / "earlier", *settings, "train.max_steps=1")
    # ... must not decide how many bits this run's matrices get.
    train(tiny_model, rows, tmp_path, "tricks.peft=lora", *settings, "train.max_steps=1", callbacks=[watch])
    assert type(watch.inner).__module__.partition(".")[0] == library
    assert type(watch.inner).__name__ == "AdamW"
    key = "state1" if library == "bitsandbytes" else "exp_avg"
    # Smaller ones stay in 32 bits.
    large = [state[key] for p, state in watch.inner.state.items() if p.numel() >= 4096]
    assert large
    assert all(state.dtype == states for state in large)


@pytest.mark.parametrize(("attention", "kernel"), [("eager", "none"), ("sdpa", "flash")])
def test_the_attention_kernel_that_ran_is_named_and_naming_it_changes_nothing(
    attention, kernel, tiny_model, rows, tmp_path, monkeypatch
):
    settings = ["tricks.peft=lora", "lora.dropout=0.2", f"tricks.attention={attention}", "train.max_steps=3"]
    named, _ = train(tiny_model, rows, tmp_path / "named", *settings)
    assert named.attention_kernel == kernel
    monkeypatch.setattr(Training, "_first_loss_sum", Training.loss_sum)
    plain, _ = train(tiny_model, rows, tmp_path / "plain", *settings)
    assert plain.attention_kernel == "", "it was not looked at"
    assert [entry["loss"] for entry in named.training] == [entry["loss"] for entry in plain.training]


def test_the_learning_rate_warms_up_and_falls_as_a_cosine(tiny_model, rows, tmp_path):
    """Of 20 steps a fifth: four rise from nothing, sixteen fall to nothing."""

    class Rates(TrainerCallback):
        def __init__(self):
            self.found = []

        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            self.found.append(optimizer.param_groups[0]["lr"])

    watch = Rates()
    sets = ("tricks.peft=lora", "train.max_steps=20", "train.warmup_ratio=0.2", "train.learning_rate=0.003")
    train(tiny_model, rows, tmp_path, *sets, "train.save_steps=100", callbacks=[watch])
    rising = [0.003 * step / 4 for step in range(4)]
    falling = [0.003 * (1 + math.cos(math.pi * step / 16)) / 2 for step in range(16)]
    assert watch.found == pytest.approx(rising + falling, rel=1e-9)
