"""The same job in a bare PyTorch loop: no evaluation, no checkpoint, no bytes counted, one process.

The model, its loss, the optimizer and the loss scaler are those of the package, so the losses are the same.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from cria_tricks.data.batches import PadToLongest, trained_tokens
from cria_tricks.load.model import Loaded
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.trainer import forward
from cria_tricks.trainer.loop import row_order
from cria_tricks.trainer.optimizer import make_optimizer, make_scaler, make_scheduler
from cria_tricks.trainer.steps import Steps

Rows = Sequence[dict[str, list[int]]]


def train(
    loaded: Loaded, plan: Plan, settings: Train, rows: Rows, *, pad_id: int, after_step: Callable[[], None]
) -> list[dict[str, Any]]:
    """Train the loaded model in place; for each step return its ``loss`` and its ``trained_tokens``."""
    model = loaded.model
    steps = Steps.of(plan, settings, len(rows), evaluates=False)
    loss_sum = forward.loss_sum(model, plan, plan.device.kind)
    optimizer = make_optimizer(model, plan, settings)
    scheduler = make_scheduler(optimizer, settings, steps.total)
    scaler = make_scaler(plan, None)
    torch.manual_seed(settings.seed)
    model.train()
    history = []
    accumulation = plan.training["gradient_accumulation_steps"]
    for window in itertools.islice(windows(rows, settings, accumulation, pad_id), steps.total):
        tokens = sum(int(trained_tokens(batch)) for batch in window)
        total = torch.zeros((), device=plan.device.kind)
        for micro_batch in window:
            batch = {name: tensor.to(plan.device.kind, non_blocking=True) for name, tensor in micro_batch.items()}
            with forward.contexts(model, plan):
                loss = loss_sum(model, batch) / tokens
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or math.inf)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # not skipped
            scheduler.step()
        model.zero_grad()
        history.append({"loss": total.item(), "trained_tokens": tokens})
        after_step()
    return history


def windows(rows: Rows, settings: Train, accumulation: int, pad_id: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the micro-batches of each optimizer step, epoch after epoch without end."""
    for epoch in itertools.count():
        order = row_order(len(rows), settings.seed + epoch)
        loader = DataLoader(rows, settings.batch_size, sampler=order, collate_fn=PadToLongest(pad_id))  # type: ignore
        micro_batches = iter(loader)
        while window := list(itertools.islice(micro_batches, accumulation)):
            yield window
