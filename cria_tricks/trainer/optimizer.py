"""Make the optimizer, the schedule of its learning rate, and fp16's loss scaler for a plan."""

import math
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, get_scheduler

from cria_tricks.parallel import dtensor
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.techniques.optimizer_in_backward import Scaler, StepInBackward

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
"""``train.schedule`` -> the name that transformers' ``get_scheduler`` takes."""


def make_optimizer(model: Any, plan: Plan, settings: Train) -> torch.optim.Optimizer:
    """Make the AdamW that transformers' Trainer would make for the weights that train.

    torch's fused kernel needs no temporary memory. The others are bitsandbytes': states in 8 bits or in pages.
    """
    matrices = set(Trainer.get_decay_parameter_names(None, model))  # all but biases and norms, which never decay
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decaying = [parameter for name, parameter in trained.items() if name in matrices]
    others = [parameter for name, parameter in trained.items() if name not in matrices]
    groups = [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if plan.steps_by_torch:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)
        dtensor.group_apart(optimizer)
        _leave_skipping_to_the_scaler(optimizer)
        return optimizer
    # Imported here, because only bitsandbytes' own optimizers need it.
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    manager: Any = GlobalOptimManager.get_instance()
    # There is one manager per process. It remembers the embedding of an earlier run by its place in the optimizer,
    # (0, 0), so this run's first matrix would get 32 bits, too; and it would keep the earlier model in memory.
    manager.initialize()
    bits = plan.optimizer["bits"]
    optimizer = AdamW(groups, lr=settings.learning_rate, optim_bits=bits, is_paged=plan.optimizer["paged"])
    for module in model.modules():
        # The gradients of an embedding are too uneven for states in 8 bits. A pipeline's stage may have none.
        if bits == 8 and isinstance(module, torch.nn.Embedding) and module.weight is not None:
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    dtensor.group_apart(optimizer)
    return optimizer


def _leave_skipping_to_the_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Make fp16's loss scaler skip a step by not calling the optimizer, as it does with every other optimizer.

    A fused AdamW offers to skip the step inside its kernel. One way for all optimizers is enough.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def make_scheduler(optimizer: torch.optim.Optimizer, settings: Train, steps: int) -> LRScheduler:
    """Make the schedule of the learning rate: up from 0 in the warmup steps, then as ``train.schedule`` says."""
    warmup = int(steps * settings.warmup_ratio)
    return get_scheduler(SCHEDULES[settings.schedule], optimizer, warmup, steps)


def make_scaler(plan: Plan, stages: ProcessGroup | None) -> torch.amp.GradScaler:
    """Make fp16's loss scaler for the plan's device; in other precisions each of its calls does nothing.

    Small gradients would round to 0 in fp16, so the loss is multiplied by a large factor before the backward pass.

    Args:
        plan: what will run.
        stages: the processes of this pipeline; all stages skip a step if one of them has an overflow.
    """
    enabled = bool(plan.training.get("fp16"))
    if enabled and stages is not None:
        scaler = ShardedGradScaler(plan.device.kind, process_group=stages)
        # The first scale() creates the scaler's state. Stages without a loss never call it, but need the state.
        scaler.scale(torch.zeros((), device=plan.device.kind))
        return scaler
    if plan.optimizer.get("in_backward"):
        return Scaler(plan.device.kind, enabled=enabled)
    return torch.amp.GradScaler(plan.device.kind, enabled=enabled)


def steps_in_backward(
    plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer, limit: float, scaler: torch.amp.GradScaler
) -> StepInBackward | None:
    """Make the optimizer take its steps in the backward pass, if the plan asks for it; else return ``None``."""
    wanted = plan.optimizer.get("in_backward")
    if not wanted:
        return None
    return StepInBackward(model, optimizer, limit if wanted == "clip" else math.inf, scaler)
