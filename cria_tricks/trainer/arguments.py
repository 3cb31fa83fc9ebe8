"""Turn a plan and the recipe's ``train`` fields into the ``TrainingArguments`` of transformers."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer.resumable import loading
from cria_tricks.tricks.optimizer_in_backward import Scaler, StepInBackward

OPTIMIZERS = {
    (32, False): "adamw_torch_fused",
    (32, True): "paged_adamw_32bit",
    (8, False): "adamw_8bit",
    (8, True): "paged_adamw_8bit",
}
"""(bits, paged) -> the name that ``TrainingArguments(optim=...)`` takes.

The first is transformers' default: torch's AdamW in one fused kernel, which needs no temporary memory.
"""

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
"""``train.schedule`` -> the name that ``TrainingArguments(lr_scheduler_type=...)`` takes."""


def leave_skipping_to_the_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Make fp16's loss scaler skip a step by not calling the optimizer, as it does with every other optimizer.

    A fused AdamW offers to skip the step inside its kernel. Then the scaler calls the optimizer even if gradients
    overflowed, so accelerate never learns that a step was skipped: the learning rate schedule moves on, and the history
    counts no skipped step.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def loss_scaler(plan: Plan, *, enabled: bool = True) -> torch.amp.GradScaler:
    """Make fp16's loss scaler for the plan's device; if it is not enabled, each of its calls does nothing."""
    if plan.optimizer.get("in_backward"):
        return Scaler(plan.device.kind, enabled=enabled)
    return torch.amp.GradScaler(plan.device.kind, enabled=enabled)


def steps_in_backward(
    plan: Plan,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    scaler: torch.amp.GradScaler | None,
) -> StepInBackward | None:
    """Make the optimizer take its steps in the backward pass, if the plan asks for it; else return ``None``."""
    wanted = plan.optimizer.get("in_backward")
    if not wanted:
        return None
    return StepInBackward(model, optimizer, max_grad_norm if wanted == "clip" else math.inf, scaler)


def evaluated(state: TrainerState) -> bool:
    """Whether there was an evaluation after the last step."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def micro_batches_at_once(plan: Plan) -> int:
    """Return how many micro-batches the trainer gets together: one, or in a pipeline all those of a step."""
    return plan.parallel.get("micro_batches", 1)


def micro_batches_of_a_step(plan: Plan) -> int:
    """Return how many micro-batches an optimizer step has, in all processes together."""
    return plan.training["gradient_accumulation_steps"] * micro_batches_at_once(plan) * plan.parallel["data"]


def training_arguments(
    plan: Plan, settings: Train, rows: int | None, evaluates: bool, checkpoints: Path, start: Checkpoint | None
) -> TrainingArguments:
    """Make the ``TrainingArguments`` of a run.

    Args:
        plan: what will run.
        settings: the recipe's ``train`` fields.
        rows: the number of training rows of an epoch, after packing; ``None`` for a stream, which has no epochs.
        evaluates: whether there are evaluation rows.
        checkpoints: the folder for checkpoints.
        start: the checkpoint from which to continue; ``None`` to start from the beginning.

    Raises:
        BadInput: if the checkpoint's state cannot be read.
    """
    # The steps of an epoch, which is the whole run for a stream.
    epoch = settings.max_steps if rows is None else settings.steps_per_epoch(micro_batches_of_a_step(plan), rows)
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
        max_grad_norm=settings.max_grad_norm or math.inf,
        save_strategy="steps",
        save_steps=settings.save_steps or epoch,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would log a NaN as 0.0
        seed=settings.seed,
        data_seed=settings.seed,  # the same order of the rows in all processes; dropout's seed is set in fit.py
        # On a GPU, a batch is copied from pinned memory while the processor goes on.
        dataloader_pin_memory=plan.device.kind == "cuda",
        accelerator_config={"non_blocking": plan.device.kind == "cuda"},
        ignore_data_skip=rows is None,  # a resumed stream restores its own position
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        **_when_to_evaluate(settings.eval_steps or epoch, total, evaluates, start),
        **plan.training,
    )
    if arguments.n_gpu > 1:
        # One process uses one card. Otherwise the Trainer would use DataParallel, which cannot copy 4-bit weights.
        arguments._n_gpu = 1
    return arguments


def _when_to_evaluate(eval_steps: int, total: int, evaluates: bool, start: Checkpoint | None) -> dict[str, Any]:
    """Return the arguments that say when to evaluate.

    That is every ``eval_steps`` steps, and when the trainer starts: at step 0, or if a resumed run stopped at a step
    whose evaluation was due, but is not in its checkpoint. One is due after the last step, too, which ``fit`` adds.
    """
    state = TrainerState()
    if start:
        with loading(str(start.path)):
            state = TrainerState.load_from_json(str(start.path / "trainer_state.json"))
    due = state.global_step % eval_steps == 0 or state.global_step >= total
    return {
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": eval_steps,
        "eval_on_start": evaluates and due and not evaluated(state),
    }
