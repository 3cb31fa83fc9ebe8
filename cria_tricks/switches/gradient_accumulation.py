"""Switch gradient accumulation on, and bill it; ``techniques/gradient_accumulation.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.operation import FP32
from cria_tricks.bill.step import Step
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="gradient_accumulation",
    switches=("gradient_accumulation=8",),
    # It saves memory by splitting a micro-batch, and a single row cannot be split.
    fields={"gradient_accumulation": Field(helps=lambda recipe: recipe.train.batch_size > 1)},
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Tell the trainer how many micro-batches make a step."""
    return plan.with_("training", gradient_accumulation_steps=recipe.tricks.gradient_accumulation)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill the gradients of earlier micro-batches, which stay in memory: 4 bytes for each trained weight.

    Everything except the optimizer's step runs k times, and a gradient is added to the earlier ones k - 1 times.
    """
    k = recipe.tricks.gradient_accumulation
    waiting = 0
    if k > 1:
        waiting = FP32 * step.trained_weights
    # A new gradient is then added to an old one, and for a moment both are alive. The bill counts this at each product
    # and at the embedding (`Step.accumulates`), because it is another tensor every time.
    return replace(
        step,
        micro_batches=k,
        waiting_gradient_bytes=waiting,
        gradient_bytes=step.gradient_bytes + ACCUMULATE * (k - 1),
    )


ACCUMULATE = 12
"""Memory traffic [bytes for one trained weight] of adding a gradient to earlier ones: two are read, one is written."""
