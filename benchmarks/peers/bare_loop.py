"""The plainest loop that does the same job: what is left when a trainer does nothing but train.

No logging, no evaluation, no checkpoints, no byte counts, no checks. Whatever our trainer takes longer than this is
what it costs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.model import Loaded
from cria_tricks.recipe import Train
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.arguments import OPTIMIZERS, steps_per_epoch
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

Batch = dict[str, torch.Tensor]


def train(
    loaded: Loaded,
    plan: Plan,
    settings: Train,
    rows: Sequence[dict[str, list[int]]],
    *,
    pad_id: int,
    after_step: Callable[[], None],
) -> tuple[list[float], int]:
    """Train a loaded model in place, once through the rows.

    Args:
        loaded: from :func:`cria_tricks.load.model.load`.
        plan: the same plan.
        settings: the recipe's ``train`` fields.
        rows: with ``input_ids`` and ``labels``.
        pad_id: token id that fills up shorter rows.
        after_step: called after every optimizer step.

    Returns:
        The loss of every optimizer step, and how many tokens were trained.
    """
    device, model = plan.device.kind, loaded.model
    accumulation = plan.training["gradient_accumulation_steps"]
    steps = steps_per_epoch(settings, accumulation, len(rows))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(trained, plan, settings)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(steps * settings.warmup_ratio), steps)
    dtype = torch.float16 if plan.training.get("fp16") else torch.bfloat16
    autocasts = any(plan.training.get(precision) for precision in ("fp16", "bf16"))
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    loss_sum = {"full": _full_loss_sum, "chunked": _chunked_loss_sum}[plan.loss["kind"]]
    if plan.training.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(plan.training["gradient_checkpointing_kwargs"])
    model.train()

    losses, tokens = [], 0
    for window in windows(rows, settings, accumulation, PadToLongest(pad_id)):
        in_window = trained_tokens(window)
        window_loss = torch.zeros((), device=device)
        for batch in window:
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device, dtype, enabled=autocasts):
                loss = loss_sum(model, batch, plan) / in_window
            scaler.scale(loss).backward()
            window_loss += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        losses.append(window_loss)
        tokens += in_window
        after_step()
    return torch.stack(losses).tolist(), tokens


def order(rows: int, settings: Train) -> list[int]:
    """The order in which the Trainer's sampler draws so many rows."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(settings.seed)).tolist()


def windows(
    rows: Sequence[dict[str, list[int]]], settings: Train, accumulation: int, collate: PadToLongest
) -> Iterator[list[Batch]]:
    """The micro-batches of each optimizer step, in the order in which the Trainer's sampler draws the rows."""
    drawn = order(len(rows), settings)
    micro = [drawn[at : at + settings.batch_size] for at in range(0, len(drawn), settings.batch_size)]
    for at in range(0, len(micro), accumulation):
        yield [collate([rows[i] for i in batch]) for batch in micro[at : at + accumulation]]


def trained_tokens(window: list[Batch]) -> int:
    """How many tokens of a window are trained: what its summed loss is divided by."""
    return sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in window)


def _optimizer(trained: list[torch.nn.Parameter], plan: Plan, settings: Train) -> torch.optim.Optimizer:
    """The optimizer that the Trainer would make for the recipe."""
    name = OPTIMIZERS[plan.optimizer["bits"], plan.optimizer["paged"]]
    arguments = TrainingArguments(optim=name, learning_rate=settings.learning_rate, use_cpu=plan.device.kind == "cpu")
    kind, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
    return kind(trained, weight_decay=settings.weight_decay, **keywords)


def _full_loss_sum(model: Any, batch: Batch, plan: Plan) -> torch.Tensor:
    return model(**batch, num_items_in_batch=1).loss.float()  # the sum, divided by 1


def _chunked_loss_sum(model: Any, batch: Batch, plan: Plan) -> torch.Tensor:
    causal_lm = model.get_base_model()
    hidden_BTD = causal_lm.base_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    labels_BT = batch["labels"][:, 1:]
    wanted = labels_BT != IGNORED
    head_VD = causal_lm.get_output_embeddings().weight
    return chunked_cross_entropy(hidden_BTD[:, :-1][wanted], head_VD, labels_BT[wanted], plan.loss["tokens_per_chunk"])
