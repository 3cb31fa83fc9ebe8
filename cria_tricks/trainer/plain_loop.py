"""Train a loaded model in one loop that fits on a screen: read this file first.

``cria train`` runs the shared trainer (``trainer/shared.py``) instead. That one adds evaluation, checkpoints, byte
counts, several processes and a stop at a loss that is not finite. What is left here is the training itself. From the
same :class:`cria_tricks.step_plan.Plan` both get the same losses (``tests/test_plain_loop.py``). Here micro-batches run
one by one, also where the plan says ``layer_by_layer``: the numbers are the same, and blocks are fetched more often.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, get_scheduler

from cria_tricks.common.errors import BadInput
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.tokens import IGNORED
from cria_tricks.load import losses
from cria_tricks.load.model import Loaded
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.arguments import (
    leave_skipping_to_the_scaler,
    loss_scaler,
    steps_in_backward,
    training_arguments,
)
from cria_tricks.trainer.shared import CONTEXTS
from cria_tricks.tricks.optimizer_in_backward import StepInBackward
from cria_tricks.tricks.packing import PackedRows

Rows = Sequence[dict[str, list[int]]]
Batch = dict[str, torch.Tensor]


def train(
    loaded: Loaded,
    plan: Plan,
    settings: Train,
    rows: Rows,
    *,
    pad_id: int,
    after_step: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Train the loaded model in place.

    Args:
        loaded: from :func:`cria_tricks.load.model.load`.
        plan: the plan by which the model was loaded.
        settings: the recipe's ``train`` fields.
        rows: with ``input_ids`` and ``labels``.
        pad_id: token id that fills up shorter rows.
        after_step: called after each optimizer step.

    Returns:
        The history, an entry per optimizer step: ``step``, ``loss`` (mean over trained tokens), ``trained_tokens``, and
        what :func:`update` adds.

    Raises:
        BadInput: if the plan is for several processes or several cards.
    """
    refuse_several_processes(plan)
    if plan.collator:
        rows = PackedRows(rows, plan.collator["packed_length"])
    model = loaded.model
    arguments = training_arguments(plan, settings, len(rows), evaluates=False, checkpoints=Path(), start=None)
    optimizer = make_optimizer(model, arguments)
    scheduler = make_scheduler(optimizer, arguments)
    # Small gradients would round to 0 in fp16, so the loss is multiplied by a large factor before the backward pass. In
    # other precisions the scaler is not enabled, and each of its calls does nothing.
    scaler = loss_scaler(plan, enabled=arguments.fp16)
    in_backward = steps_in_backward(plan, model, optimizer, arguments.max_grad_norm, scaler)  # usually None
    torch.manual_seed(settings.seed)  # dropout draws from this generator
    model.train()

    history: list[dict[str, Any]] = []
    endless = windows(rows, settings, arguments.gradient_accumulation_steps, pad_id)
    for window in itertools.islice(endless, arguments.max_steps):
        # Rows have different lengths. So the losses of all tokens of the window are summed, and divided once, by their
        # number: a mean of the micro-batches' means would give each token of a short row more weight.
        tokens = trained_tokens(window)
        window_loss = torch.zeros((), device=plan.device.kind)
        for micro_batch in window:
            batch = {name: tensor.to(plan.device.kind, non_blocking=True) for name, tensor in micro_batch.items()}
            loss = loss_sum(model, batch, plan) / tokens
            scaler.scale(loss).backward()  # adds to the gradients of the window's earlier micro-batches
            window_loss += loss.detach()  # detached, because loss itself would keep the activations in memory
        updated = update(model, optimizer, scheduler, scaler, arguments.max_grad_norm, in_backward)
        entry = {"step": len(history) + 1, "loss": window_loss.item(), "trained_tokens": tokens}
        history.append(entry | updated)
        if after_step:
            after_step()
    return history


def loss_sum(model: Any, batch: Batch, plan: Plan) -> torch.Tensor:
    """Run the forward pass, and sum the losses of the batch's trained tokens."""
    # Inside autocast, matrix products run in 16 bits; softmax and the loss stay in fp32.
    dtype = torch.float16 if plan.training.get("fp16") else torch.bfloat16
    in_16_bits = any(plan.training.get(precision) for precision in ("fp16", "bf16"))
    autocast = functools.partial(torch.autocast, plan.device.kind, dtype, enabled=in_16_bits)
    with contextlib.ExitStack() as contexts:
        for name in plan.step_context:  # such as activation_offload
            contexts.enter_context(CONTEXTS[name](model, plan))
        contexts.enter_context(autocast())
        return losses.find(plan, autocast)(model, batch)


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float,
    in_backward: StepInBackward | None = None,
) -> dict[str, Any]:
    """Take one optimizer step with the gradients of a window; if it was taken ``in_backward``, only end it.

    Returns:
        ``grad_norm`` (length of the gradient before it was clipped), ``learning_rate`` of this step, and ``skipped``
        (1 where fp16 gradients overflowed, so that nothing was updated).
    """
    scaler.unscale_(optimizer)  # before clipping, because the limit is meant for the true gradients
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    if in_backward:  # each gradient was used and freed when it arrived, so there was none to clip
        grad_norm = in_backward.norm()
    learning_rate = scheduler.get_last_lr()[0]
    scale = scaler.get_scale()
    scaler.step(optimizer)  # calls optimizer.step(), unless a gradient overflowed
    scaler.update()
    skipped = scaler.get_scale() < scale  # after an overflow the scaler goes on with a smaller factor
    if not skipped:
        scheduler.step()
    model.zero_grad()  # otherwise the next window would add to these gradients
    return {"grad_norm": grad_norm.item(), "learning_rate": learning_rate, "skipped": int(skipped)}


def windows(rows: Rows, settings: Train, accumulation: int, pad_id: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each optimizer step, epoch after epoch without end.

    An epoch's last window has fewer micro-batches when the rows do not divide evenly.
    """
    for epoch in itertools.count():
        order = row_order(len(rows), settings.seed + epoch)
        loader = DataLoader(rows, settings.batch_size, sampler=order, collate_fn=PadToLongest(pad_id))  # type: ignore
        micro_batches = iter(loader)
        while window := list(itertools.islice(micro_batches, accumulation)):
            yield window


def row_order(rows: int, seed: int) -> list[int]:
    """Shuffle the indices of the rows. The shared trainer's sampler draws the same order from the same seed."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()


def trained_tokens(window: list[Batch]) -> int:
    """Count the tokens that have a loss. A row's first token has none, because no token before it predicts it."""
    return sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in window)


def make_optimizer(model: torch.nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """Make the optimizer that transformers' Trainer would make."""
    kind, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments)
    matrices = set(Trainer.get_decay_parameter_names(None, model))  # all but biases and norms, which never decay
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decaying = [parameter for name, parameter in trained.items() if name in matrices]
    others = [parameter for name, parameter in trained.items() if name not in matrices]
    groups = [{"params": decaying, "weight_decay": arguments.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if keywords.get("optim_bits") == 8:
        # Imported here, because only bitsandbytes' own optimizers need it.
        from bitsandbytes.optim import GlobalOptimManager

        manager = GlobalOptimManager.get_instance()
        manager.initialize()  # there is one per process, and it would remember the embedding of an earlier run
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):  # its gradients are too uneven for states in 8 bits
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer = kind(groups, **keywords)
    leave_skipping_to_the_scaler(optimizer)
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, arguments: TrainingArguments) -> LRScheduler:
    """Make the scheduler of the learning rate: up from 0 in the warmup steps, then as ``train.schedule`` says."""
    return get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.warmup_steps,
        num_training_steps=arguments.max_steps,
    )


def refuse_several_processes(plan: Plan) -> None:
    """Refuse a plan that shares the run among processes or cards."""
    strategy = plan.parallel["strategy"]
    if strategy != "none":
        raise BadInput(
            f"parallel.strategy={strategy}: the plain loop trains in one process on one device; set "
            "parallel.strategy=none, or train with the shared trainer"
        )
