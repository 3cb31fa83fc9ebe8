"""The loop on a card, beside transformers' Trainer: the same losses, as many bytes, the same scale, the same pages.

It stands first among the tests for a card, because no card has run this loop yet.
"""

import gc

import pytest
import torch
from transformers import TrainerCallback

from cria_tricks.hardware import this_device
from cria_tricks.measure.memory import Meter
from tests.helpers import train, trained_weights
from tests.trainer_peer import by_trainer, forget_embeddings, same_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LORA = ("tricks.peft=lora", "tricks.attention=eager", "train.epochs=2", "train.learning_rate=2e-3")
PREFETCHED = 3 * 8 * 256
"""Bytes of a batch, which the Trainer reads ahead: ids, labels and mask of one row of the tiny model's longest."""


class PeakOfSteps(TrainerCallback):
    """The peak of the Trainer's steps, above what earlier tests have left, and not of the loading before them."""

    def __init__(self, before: int):
        self.before = before

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, args, state, control, **kwargs):
        self.bytes = torch.cuda.max_memory_allocated() - self.before


def left() -> int:
    """What is allocated when nobody uses it any more."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def both(tiny_model, rows, tmp_path, *settings: str):
    """Train by our loop and by the Trainer: for each the steps' numbers, the weights, and the peak of the steps."""
    assert this_device().kind == "cuda"
    before = left()
    run, loaded = train(tiny_model, rows, tmp_path / "ours", *settings, meter=Meter("cuda"))
    ours = trained_weights(loaded)
    del loaded
    forget_embeddings()
    watch = PeakOfSteps(left())
    expected, loaded, trainer = by_trainer(tiny_model, rows, tmp_path / "theirs", *settings, callbacks=[watch])
    found = [{name: entry[name] for name in expected[0]} for entry in run.training]
    peak = max(entry["peak_bytes"] for entry in run.training) - before
    return (found, ours, peak, run), (expected, trained_weights(loaded), watch.bytes), trainer


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="fp32"),
        pytest.param(("tricks.gradient_accumulation=2", "train.batch_size=2"), id="accumulation"),
        pytest.param(("tricks.quantization=nf4", "tricks.gradient_checkpointing=true"), id="NF4, checkpointed"),
    ],
)
def test_losses_and_weights_are_the_trainers(settings, tiny_model, rows, tmp_path):
    """By kernels that add in a fixed order, so bit for bit; and the peak is the Trainer's, but for its batch ahead."""
    (found, ours, peak, _), (expected, theirs, their_peak), _ = both(tiny_model, rows, tmp_path, *LORA, *settings)
    assert found == expected
    same_weights(ours, theirs)
    assert abs(peak - their_peak) <= PREFETCHED + 0.01 * their_peak


def test_fp16_skips_the_trainers_steps_at_its_scale(tiny_model, rows, tmp_path, monkeypatch):
    """The first scale is made too large, so that both take some steps to find one that fits."""
    scaler, first = torch.amp.GradScaler, 2.0**24
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *given, **named: scaler(*given, **named, init_scale=first))
    settings = (*LORA, "tricks.precision=fp16", "train.max_steps=20")
    (found, *_, run), (expected, *_), trainer = both(tiny_model, rows, tmp_path, *settings)
    assert run.skipped_steps > 0
    assert trainer.accelerator.scaler.get_scale() == first / 2**run.skipped_steps
    assert [entry["learning_rate"] for entry in found] == [entry["learning_rate"] for entry in expected]
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in expected]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_with_pages_the_weights_are_the_trainers(optimizer, tiny_model, rows, tmp_path):
    """All weights train, and the embedding's gradient is added up in no fixed order; so not to the bit."""
    settings = (f"tricks.optimizer={optimizer}", "tricks.paged_optimizer=true", "train.max_steps=2")
    (found, ours, *_), (expected, theirs, _), trainer = both(tiny_model, rows, tmp_path, *settings)
    assert trainer.optimizer.optimizer.is_paged
    assert [entry["loss"] for entry in found] == pytest.approx([entry["loss"] for entry in expected], abs=1e-3)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-2, atol=1e-4)
