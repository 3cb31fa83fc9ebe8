"""transformers' own Trainer on the same model, rows and settings: what our loop is held to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.trl_sft import OPTIMIZERS
from cria_tricks.data.batches import PadToLongest
from cria_tricks.load.model import Loaded
from cria_tricks.techniques.packing import PackedRows
from cria_tricks.trainer.optimizer import SCHEDULES
from tests.helpers import prepare


class LeaveSkippingToTheScaler(TrainerCallback):
    """Let a fused AdamW be skipped as other optimizers are; else accelerate never learns that a step was skipped."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.optimizer._step_supports_amp_scaling = False


def by_trainer(
    folder: Path, rows: Any, out: Path, *settings: str, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[list[dict[str, Any]], Loaded, Trainer]:
    """Train as a script with the Trainer would; the full loss alone, because a Trainer has no other.

    Returns:
        For each step its ``loss``, ``grad_norm`` and ``learning_rate``; the trained model; and the trainer.
    """
    recipe, plan, loaded = prepare(folder, *settings)
    train = recipe.train
    window = plan.training["gradient_accumulation_steps"]
    rows = PackedRows(rows, plan.collator["packed_length"]) if plan.collator else rows
    steps = train.max_steps or round(train.steps_per_epoch(window, len(rows)) * train.epochs)
    arguments = TrainingArguments(
        str(out),
        use_cpu=plan.device.kind == "cpu",
        optim=OPTIMIZERS[plan.optimizer["bits"], plan.optimizer["paged"]],
        per_device_train_batch_size=train.batch_size,
        max_steps=steps,
        learning_rate=train.learning_rate,
        lr_scheduler_type=SCHEDULES[train.schedule],
        warmup_steps=int(steps * train.warmup_ratio),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        seed=train.seed,
        data_seed=train.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **plan.training,
    )
    made = {"train_dataset": rows, "data_collator": PadToLongest(2), "callbacks": list(callbacks)}
    trainer = Trainer(loaded.model, arguments, **made)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LeaveSkippingToTheScaler())
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return (
        [{name: entry[name] for name in ("loss", "grad_norm", "learning_rate")} for entry in history],
        loaded,
        trainer,
    )


def forget_embeddings() -> None:
    """Let bitsandbytes forget the embedding of an earlier run, as our loop does at its start."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


def same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Hold two sets of weights to each other, bit for bit."""
    assert ours.keys() == theirs.keys()
    assert ours
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
