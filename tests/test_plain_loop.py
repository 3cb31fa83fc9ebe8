"""The loop for reading trains what the shared trainer trains.

Both do the same operations in the same order on the same processor, so they are held to each other bit for bit: losses,
gradients' lengths, learning rates, and the trained weights. There is no tolerance to derive.
"""

import contextlib
from dataclasses import replace

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.trainer import plain_loop
from tests.helpers import prepare, train, trained_weights

LORA = "tricks.peft=lora"
NF4 = ("tricks.quantization=nf4", "tricks.gradient_checkpointing=true")
WINDOWS = "tricks.gradient_accumulation=2"
ALWAYS = ("train.epochs=2", "train.learning_rate=2e-3", "train.max_grad_norm=0.3", "train.weight_decay=0.1")
ENTRY = ("step", "loss", "trained_tokens", "grad_norm", "learning_rate", "skipped")


def both(folder, rows, out, *settings):
    """Train twice; the plain loop goes first, so that it inherits nothing from the shared trainer."""
    settings = (*settings, *ALWAYS)
    recipe, plan, plain = prepare(folder, *settings)
    history = plain_loop.train(plain, plan, recipe.train, rows, pad_id=2)
    run, shared = train(folder, rows, out, *settings)
    expected = [{name: entry[name] for name in ENTRY} for entry in run.training]
    assert all(list(entry) == list(ENTRY) for entry in history)
    return history, expected, plain, shared


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="full fine-tuning"),
        pytest.param((LORA, "train.schedule=linear", "train.warmup_ratio=0.4"), id="LoRA"),
        pytest.param((LORA, *NF4, "lora.dropout=0.1"), id="NF4 with gradient checkpointing"),
        pytest.param((LORA, "tricks.precision=fp16"), id="fp16"),
        pytest.param((LORA, WINDOWS, "train.batch_size=2"), id="accumulation"),
        pytest.param((LORA, "tricks.precision=bf16", "tricks.chunked_loss=true"), id="bf16 and chunked loss"),
        pytest.param(("tricks.optimizer=adamw_8bit", "tricks.activation_offload=true"), id="8-bit AdamW and offload"),
        pytest.param((LORA, "tricks.packing=true", "data.max_length=64"), id="packing"),
    ],
)
def test_it_is_the_shared_trainer_bit_for_bit(settings, tiny_model, rows, tmp_path):
    found, expected, plain, shared = both(tiny_model, rows, tmp_path, *settings)
    assert found == expected
    assert len(found) >= 4
    weights = trained_weights(shared)
    for name, weight in trained_weights(plain).items():
        assert torch.equal(weight, weights[name]), name


def test_windows_of_ragged_rows_are_means_over_tokens(tiny_model, rows, tmp_path):
    """Five rows in windows of two: the mean of the micro-batches' means would be another number in each window."""
    found, expected, _, _ = both(tiny_model, rows, tmp_path, LORA, WINDOWS, "train.epochs=1")
    assert found == expected
    windows = plain_loop.windows(rows, prepare(tiny_model, LORA)[0].train, 2, 2)
    counts = [[plain_loop.trained_tokens([batch]) for batch in next(windows)] for _ in found]
    assert [len(window) for window in counts] == [2, 2, 1] * 2
    assert all(len(set(window)) == len(window) for window in counts), "micro-batches of equally many tokens"
    assert [sum(window) for window in counts] == [entry["trained_tokens"] for entry in found]


@pytest.mark.parametrize(("setting", "runs"), [("false", 1), ("true", 2)])
def test_a_checkpointed_block_runs_again_in_the_backward_pass(setting, runs, tiny_model, rows):
    """The losses are the same without checkpointing, so they cannot tell."""
    sets = (LORA, f"tricks.gradient_checkpointing={setting}", "train.max_steps=1")
    recipe, plan, loaded = prepare(tiny_model, *sets)
    calls = []
    loaded.model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    plain_loop.train(loaded, plan, recipe.train, rows, pad_id=2)
    assert len(calls) == runs


def test_each_forward_pass_is_in_the_contexts_of_the_plan(tiny_model, rows, monkeypatch):
    entered = []

    def watch(model, plan):
        return contextlib.nullcontext(entered.append(model))

    monkeypatch.setitem(plain_loop.CONTEXTS, "activation_offload", watch)
    recipe, plan, loaded = prepare(tiny_model, LORA, "tricks.activation_offload=true", WINDOWS, "train.max_steps=1")
    plain_loop.train(loaded, plan, recipe.train, rows, pad_id=2)
    assert entered == [loaded.model] * 2


def test_a_step_that_overflows_in_fp16_is_skipped(tiny_model, rows, tmp_path, monkeypatch):
    """The first factor is made too large, so both take some steps to find one that fits."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *given, **named: scaler(*given, **named, init_scale=2.0**18))
    found, expected, _, _ = both(tiny_model, rows, tmp_path, LORA, "tricks.precision=fp16")
    assert str(found) == str(expected)  # as text, because the overflowed gradient's length is nan
    skipped = [entry["skipped"] for entry in found]
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert found[1]["learning_rate"] == found[0]["learning_rate"], "a skipped step moves no learning rate"


def test_the_caller_hears_of_each_step(tiny_model, rows):
    recipe, plan, loaded = prepare(tiny_model, LORA, "train.max_steps=3")
    heard = []
    plain_loop.train(loaded, plan, recipe.train, rows, pad_id=2, after_step=lambda: heard.append(1))
    assert len(heard) == 3


def test_a_plan_for_several_processes_is_refused(tiny_model, rows):
    recipe, plan, loaded = prepare(tiny_model, LORA)
    before = trained_weights(loaded)
    several = replace(plan, parallel={"strategy": "ddp", "data": 2})
    with pytest.raises(BadInput, match=r"^parallel\.strategy=ddp: the plain loop trains in one process on one device"):
        plain_loop.train(loaded, several, recipe.train, rows, pad_id=2)
    for name, weight in trained_weights(loaded).items():
        assert torch.equal(weight, before[name])
