"""Plan and settings -> ``TrainingArguments``, in the words of whichever transformers is installed."""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from cria_tricks.recipe import Train
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer.resumable import loading

OPTIMIZERS = {
    (32, False): "adamw_torch_fused",
    (32, True): "paged_adamw_32bit",
    (8, False): "adamw_8bit",
    (8, True): "paged_adamw_8bit",
}
"""(bits, paged) -> the name that ``TrainingArguments(optim=...)`` takes.

The first is transformers' default: torch's AdamW in one kernel, which needs no memory of its own.
"""

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
"""``train.schedule`` -> the name that ``TrainingArguments(lr_scheduler_type=...)`` takes."""


def leave_skipping_to_the_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let fp16's loss scaler skip steps by not calling the optimizer, as it does with every other optimizer.

    A fused AdamW offers to skip inside its kernel. The scaler then calls it even when gradients overflowed, so
    accelerate never learns that a step was skipped: the learning rate moves on, and the history counts no skipped step.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def evaluated(state: TrainerState) -> bool:
    """Whether there was an evaluation after the last step."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def steps_per_epoch(settings: Train, accumulation: int, rows: int) -> int:
    """Optimizer steps of one epoch, the partial last window included."""
    return math.ceil(math.ceil(rows / settings.batch_size) / accumulation)


def micro_batches_at_once(plan: Plan) -> int:
    """Micro-batches that the trainer is given together: one, but for a pipeline, which takes all of a step."""
    return plan.parallel.get("micro_batches", 1)


def micro_batches_of_a_step(plan: Plan) -> int:
    """Micro-batches of an optimizer step, those of all processes together."""
    return plan.training["gradient_accumulation_steps"] * micro_batches_at_once(plan) * plan.parallel["data"]


def training_arguments(
    plan: Plan, settings: Train, rows: int | None, evaluates: bool, checkpoints: Path, start: Checkpoint | None
) -> TrainingArguments:
    """Say in transformers' words what a run is.

    Args:
        plan: what will run.
        settings: the recipe's ``train`` fields.
        rows: training rows of an epoch, packed ones when they are packed; ``None`` for a stream, which has none.
        evaluates: whether there are rows to evaluate.
        checkpoints: the folder they are written to.
        start: the checkpoint to go on from; from the beginning when left out.

    Raises:
        BadInput: if the checkpoint's state cannot be read.
    """
    epoch = settings.max_steps if rows is None else steps_per_epoch(settings, micro_batches_of_a_step(plan), rows)
    total = settings.max_steps or math.ceil(epoch * settings.epochs)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        use_cpu=plan.device.kind == "cpu",
        optim=OPTIMIZERS[plan.optimizer["bits"], plan.optimizer["paged"]],
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        max_steps=total,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        warmup_steps=int(total * settings.warmup_ratio),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        save_strategy="steps",
        save_steps=settings.save_steps or epoch,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would log a NaN as 0.0
        seed=settings.seed,
        data_seed=settings.seed,  # the order of the rows is the same in all processes, dropout's draws are not
        dataloader_pin_memory=plan.device.kind == "cuda",
        ignore_data_skip=rows is None,  # a stream knows where it was
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        **_when_to_evaluate(settings.eval_steps or epoch, total, evaluates, start),
        **_in_its_words(plan.training),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process, one card: DataParallel cannot copy 4-bit weights
    return arguments


def _when_to_evaluate(eval_steps: int, total: int, evaluates: bool, start: Checkpoint | None) -> dict[str, Any]:
    """After every so many steps; before the first one too, unless a run goes on that has been evaluated there."""
    state = TrainerState()
    if start:
        with loading(str(start.path)):
            state = TrainerState.load_from_json(str(start.path / "trainer_state.json"))
    due = state.global_step % eval_steps == 0 or state.global_step >= total  # at the beginning, and if it was cut off
    return {
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": eval_steps,
        "eval_on_start": evaluates and due and not evaluated(state),
    }


def _in_its_words(training: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's arguments by the names that the installed transformers has for them."""
    known = {field.name for field in fields(TrainingArguments)}
    if "activation_checkpointing" not in known:
        return dict(training)
    # Its name since transformers 5.2x, the only one in 6.
    return {name.replace("gradient_checkpointing", "activation_checkpointing"): v for name, v in training.items()}
