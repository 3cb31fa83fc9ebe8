"""How many optimizer steps a run has, how many micro-batches each of them, and after which something is due."""

import math
from dataclasses import dataclass

from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of a run.

    Attributes:
        epoch: steps of an epoch; of the whole run for a stream, which has no epochs.
        total: steps of the run.
        evaluate: an evaluation is due every so many steps; 0 for never.
        save: a checkpoint is due every so many steps.
    """

    epoch: int
    total: int
    evaluate: int
    save: int

    @classmethod
    def of(cls, plan: Plan, settings: Train, rows: int | None, *, evaluates: bool) -> "Steps":
        """Count the steps of a run.

        Args:
            plan: what will run.
            settings: the recipe's ``train`` fields.
            rows: the training rows of an epoch, after packing; ``None`` for a stream.
            evaluates: whether there are evaluation rows.
        """
        epoch = settings.max_steps if rows is None else settings.steps_per_epoch(micro_batches_of_a_step(plan), rows)
        total = settings.max_steps or math.ceil(epoch * settings.epochs)
        return cls(epoch, total, (settings.eval_steps or epoch) * evaluates, settings.save_steps or epoch)


def micro_batches_at_once(plan: Plan) -> int:
    """Return how many micro-batches the loop gets together: one, or in a pipeline all those of a step."""
    return plan.parallel.get("micro_batches", 1)


def micro_batches_of_a_step(plan: Plan) -> int:
    """Return how many micro-batches an optimizer step has, in all processes together."""
    return plan.training["gradient_accumulation_steps"] * micro_batches_at_once(plan) * plan.parallel["data"]
