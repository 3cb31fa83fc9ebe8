"""Apply the parallel strategy of a plan (DDP, FSDP, ...) to the model that the trainer trains.

With ``parallel.strategy=none`` nothing is wrapped and nothing is sent.
"""

import contextlib
from typing import Any

import torch

from cria_tricks.parallel import STRATEGIES
from cria_tricks.processes.world import World
from cria_tricks.step_plan import Plan


class Spread:
    """A model with its loss, and the strategy that divides their work over the processes.

    Args:
        total: a module that holds the model and maps a micro-batch to the sum of its losses.
        plan: the plan; ``plan.parallel["strategy"]`` names the strategy.
        world: the processes of the run.

    Attributes:
        total: the module to call for the loss. After :meth:`over_processes` the strategy may have wrapped it.
        strategy: the module of ``cria_tricks.parallel`` that implements the strategy; ``None`` without a strategy.
    """

    def __init__(self, total: torch.nn.Module, plan: Plan, world: World):
        self.total = total
        self.plan = plan
        self.world = world
        self.strategy = STRATEGIES.get(plan.parallel["strategy"])

    def over_processes(self) -> None:
        """Let the strategy wrap or shard the model.

        Call this before the optimizer is made: sharding replaces parameters, and the optimizer needs the new ones.
        """
        if self.strategy:
            self.total = self.strategy.spread(self.total, self.plan, self.world)

    def window(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager for the forward and backward pass of one micro-batch.

        The data-parallel strategies average the gradients over the data-parallel ranks after the last micro-batch of
        an accumulation window, and keep them local before that. FSDP also shards them, and with
        ``parallel.reduce=micro_batch`` it does so after every micro-batch. Tensor parallelism sums those of which each
        process has a part.

        Args:
            last: whether this is the last micro-batch before the optimizer step.
        """
        if not self.strategy:
            return contextlib.nullcontext()
        return self.strategy.window(self.total, self.world, last or self.plan.parallel.get("reduce") == "micro_batch")

    @property
    def in_pieces(self) -> bool:
        """Whether this process holds only a part of the model: shards of parameters, or the blocks of one stage."""
        return self.strategy is not None and getattr(self.strategy, "IN_PIECES", False)
