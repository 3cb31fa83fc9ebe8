"""A strategy at work: what the trainer calls, and nothing when a process is alone."""

import contextlib
from typing import Any

import torch

from cria_tricks.parallel import STRATEGIES
from cria_tricks.processes.world import World
from cria_tricks.step_plan import Plan


class Spread:
    """A model and its loss, and the strategy by which processes share them.

    Args:
        total: from a micro-batch to the sum of its losses, with the model inside.
        plan: names the strategy.
        world: the processes.

    Attributes:
        total: to call; the strategy may lay something around it.
    """

    def __init__(self, total: torch.nn.Module, plan: Plan, world: World):
        self.total = total
        self.plan = plan
        self.world = world
        self.strategy = STRATEGIES.get(plan.parallel["strategy"])

    def over_processes(self) -> None:
        """Let the strategy lay hold of the model, before the optimizer asks for its parameters."""
        if self.strategy:
            self.total = self.strategy.spread(self.total, self.plan, self.world)

    def window(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward pass of a micro-batch; after the window's last one gradients are averaged."""
        return self.strategy.window(self.total, self.world, last) if self.strategy else contextlib.nullcontext()

    @property
    def in_pieces(self) -> bool:
        """Whether this process holds a part of some parameters only, or some of them not at all."""
        return self.strategy is not None and getattr(self.strategy, "IN_PIECES", False)
