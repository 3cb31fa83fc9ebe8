"""The loop trains what transformers' Trainer trains, and does what it says at each step.

Both do the same operations in the same order on the same processor, so they are held to each other bit for bit: losses,
gradients' lengths, learning rates, and the trained weights. There is no tolerance to derive.
"""

import contextlib
import weakref
from typing import ClassVar

import pytest
import torch
from transformers import TrainerCallback

from cria_tricks.load import overlapped_offload
from cria_tricks.trainer import loop
from cria_tricks.trainer.training import Training
from tests.helpers import prepare, train, trained_weights
from tests.trainer_peer import by_trainer, forget_embeddings, same_weights

LORA = "tricks.peft=lora"
NF4 = ("tricks.quantization=nf4", "tricks.gradient_checkpointing=true")
WINDOWS = "tricks.gradient_accumulation=2"
ALWAYS = ("train.epochs=2", "train.learning_rate=2e-3", "train.max_grad_norm=0.3", "train.weight_decay=0.1")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="full fine-tuning"),
        pytest.param((LORA, "train.schedule=linear", "train.warmup_ratio=0.4"), id="LoRA"),
        pytest.param((LORA, *NF4, "lora.dropout=0.1"), id="NF4 with gradient checkpointing"),
        pytest.param((LORA, "tricks.precision=bf16", "lora.dropout=0.1"), id="bf16"),
        pytest.param((LORA, WINDOWS, "train.batch_size=2", "lora.dropout=0.1"), id="accumulation"),
        pytest.param((LORA, "tricks.gradient_accumulation=3", "train.schedule=constant"), id="partial windows"),
        pytest.param(("tricks.optimizer=adamw_8bit",), id="8-bit AdamW"),
        pytest.param(("tricks.optimizer=adamw_8bit", "tricks.paged_optimizer=true"), id="paged 8-bit AdamW"),
        pytest.param((LORA, "tricks.packing=true", "data.max_length=64"), id="packing"),
        pytest.param((LORA, "lora.dora=true", "tricks.expand_kv=true"), id="DoRA"),
        pytest.param(("tricks.peft=head", "tricks.attention=sdpa"), id="head"),
    ],
)
def test_it_is_transformers_trainer_bit_for_bit(settings, tiny_model, rows, tmp_path):
    settings = (*settings, *ALWAYS)
    run, ours = train(tiny_model, rows, tmp_path / "ours", *settings)
    forget_embeddings()
    expected, theirs, _ = by_trainer(tiny_model, rows, tmp_path / "theirs", *settings)
    assert [{name: entry[name] for name in expected[0]} for entry in run.training] == expected
    assert len(expected) >= 4
    same_weights(trained_weights(ours), trained_weights(theirs))


def test_windows_of_ragged_rows_are_means_over_tokens(tiny_model, rows, tmp_path):
    """Five rows in windows of two: the mean of the micro-batches' means would be another number in each window."""
    run, _ = train(tiny_model, rows, tmp_path, LORA, WINDOWS, *ALWAYS)
    tokens = [sum(label != -100 for label in row["labels"][1:]) for row in rows]
    seed = prepare(tiny_model, LORA)[0].train.seed
    orders = [loop.row_order(len(rows), seed + epoch) for epoch in range(2)]
    windows = [order[first : first + 2] for order in orders for first in (0, 2, 4)]
    assert [entry["trained_tokens"] for entry in run.training] == [sum(tokens[row] for row in w) for w in windows]
    assert all(len({tokens[row] for row in window}) == len(window) for window in windows), "of equally many tokens"


@pytest.mark.parametrize(("setting", "runs"), [("false", 1), ("true", 2)])
def test_a_checkpointed_block_runs_again_in_the_backward_pass(setting, runs, tiny_model, rows, tmp_path):
    """The losses are the same without checkpointing, so they cannot tell."""
    calls = []

    def count(model):
        model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    sets = (LORA, f"tricks.gradient_checkpointing={setting}", "train.max_steps=1")
    train(tiny_model, rows, tmp_path, *sets, callbacks=[AtTheStart(count)])
    assert len(calls) == runs


class AtTheStart(TrainerCallback):
    """Does something with the model before the first step."""

    def __init__(self, act):
        self.act = act

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.act(model)


def test_each_forward_pass_is_in_the_contexts_of_the_plan(tiny_model, rows, tmp_path, monkeypatch):
    entered = []
    watch = lambda model, plan: contextlib.nullcontext(entered.append(model))  # noqa: E731
    monkeypatch.setattr(overlapped_offload, "offloaded", watch)
    sets = (LORA, "tricks.activation_offload=true", WINDOWS, "train.max_steps=1")
    _, loaded = train(tiny_model, rows, tmp_path, *sets, eval_rows=rows[:1])
    assert entered == [loaded.model] * 2, "each micro-batch, and no evaluation"


def test_a_step_that_overflows_in_fp16_is_skipped(tiny_model, rows, tmp_path, monkeypatch):
    """The first factor is made too large, so it takes some steps to find one that fits."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *given, **named: scaler(*given, **named, init_scale=2.0**18))
    run, _ = train(tiny_model, rows, tmp_path, LORA, "tricks.precision=fp16", *ALWAYS)
    skipped = [entry["skipped"] for entry in run.training]
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert run.training[1]["learning_rate"] == run.training[0]["learning_rate"], "a skipped step moves no rate"


class Keeps(torch.autograd.Function):
    """Keep a tensor as bitsandbytes' product of int8 does: an attribute of the graph, which backward does not free."""

    kept: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.own = torch.zeros(3)
        Keeps.kept.append(weakref.ref(ctx.own))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class AfterAMicroBatch(TrainerCallback):
    def __init__(self):
        self.alive = []

    def on_substep_end(self, args, state, control, **kwargs):
        self.alive.append(sum(ref() is not None for ref in Keeps.kept))


def test_nothing_of_a_micro_batch_is_alive_when_the_next_one_runs(tiny_model, rows, tmp_path, monkeypatch):
    Keeps.kept.clear()
    honest = Training.loss_sum
    monkeypatch.setattr(Training, "loss_sum", lambda self, batch: Keeps.apply(honest(self, batch)))
    watch = AfterAMicroBatch()
    train(tiny_model, rows, tmp_path, LORA, "tricks.gradient_accumulation=3", "train.max_steps=1", callbacks=[watch])
    assert len(Keeps.kept) == 3
    assert watch.alive == [0, 0]
