"""TRL's SFTTrainer on the same job, as close to ours as its settings go, or with flags of its own.

Two differences stay, because TRL 1.16 has no switch for them: its loss never builds the full logits, whatever
``tricks.chunked_loss`` says, and it also computes the entropy and the top-1 accuracy of every token. One is undone
here: it rounds the adapters of a quantised model to bf16, and they get their fp32 values back before it trains.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.model import Loaded
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan

OPTIMIZERS = {
    (32, False): "adamw_torch_fused",
    (32, True): "paged_adamw_32bit",
    (8, False): "adamw_8bit",
    (8, True): "paged_adamw_8bit",
}
"""(bits, paged) of ``Plan.optimizer`` -> the name that ``TrainingArguments(optim=...)`` takes."""


def installed() -> bool:
    """Whether there is a TRL to measure."""
    return importlib.util.find_spec("trl") is not None


def train(
    loaded: Loaded,
    plan: Plan,
    settings: Train,
    rows: Sequence[dict[str, list[int]]],
    folder: Path,
    *,
    tokenizer: Any,
    callback: TrainerCallback,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[float], int]:
    """Train a loaded model in place, once through the rows.

    Args:
        loaded: from :func:`cria_tricks.load.model.load`; an adapter is on it already, so TRL adds none.
        plan: the same plan.
        settings: the recipe's ``train`` fields.
        rows: with ``input_ids`` and ``labels``, which TRL takes as they are.
        folder: TRL wants one, and writes nothing there.
        tokenizer: the model's; it only pads.
        callback: what keeps the time.
        flags: arguments of ``SFTConfig`` that are to differ from ours.

    Returns:
        The loss of every optimizer step, and how many tokens were trained.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    on_cpu = plan.device.kind == "cpu"
    accumulation = plan.training["gradient_accumulation_steps"]
    steps = settings.steps_per_epoch(accumulation, len(rows))
    ours: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": on_cpu,
        "optim": OPTIMIZERS[plan.optimizer["bits"], plan.optimizer["paged"]],
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": int(steps * settings.warmup_ratio),
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "fp16": plan.training.get("fp16", False),
        "bf16": plan.training.get("bf16", False),  # TRL's default is true
        # TRL's default is true. The blocks of the loaded model are checkpointed already, if the plan says so.
        "gradient_checkpointing": False,
        "max_length": None,  # the rows are cut already
        "packing": False,
        "padding_free": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": settings.seed,
        "dataloader_pin_memory": not on_cpu,
        "disable_tqdm": True,
        "report_to": "none",
    }
    arguments = SFTConfig(**{**ours, **flags})
    masters = {name: p.data for name, p in loaded.model.named_parameters() if p.requires_grad}
    trainer = SFTTrainer(
        model=loaded.model,
        args=arguments,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == (name in masters), f"TRL changed what trains: {name}"
        if name in masters:
            parameter.data = masters[name]
    trainer.train()
    checkpointed = bool(plan.checkpointing) or arguments.gradient_checkpointing
    assert trainer.model.is_gradient_checkpointing == checkpointed, "TRL changed what is checkpointed"
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert history[-1]["num_tokens"] == sum(len(row["input_ids"]) for row in rows), "TRL saw other rows"
    trained = sum(label != IGNORED for row in trainer.train_dataset for label in row["labels"][1:])
    return [entry["loss"] for entry in history], trained
