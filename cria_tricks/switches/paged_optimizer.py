"""Switch the paged optimizer on, and bill it; ``techniques/paged_optimizer.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import ON_OFF, Field, Technique

TECHNIQUE = Technique(
    claim="exact",
    lesson="optimizers",
    switches=("paged_optimizer=true",),
    fields={"paged_optimizer": Field("Memory", "Paged optimizer", values=ON_OFF, search="exact")},
)
PAGED_FROM = 100_000
"""bitsandbytes pages a state of so many elements or more (``get_state_buffer`` in ``bitsandbytes/optim``)."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for paged optimizer states; without CUDA, only warn."""
    if not recipe.tricks.paged_optimizer:
        return plan
    if plan.device.kind != "cuda":
        return plan.warn("paged_optimizer has no effect without CUDA: the states are in host memory already")
    return plan.with_("optimizer", paged=True)


def bill(step: Step, recipe: Recipe) -> Step:
    """Leave large states out of the allocator's bytes: they live in CUDA's unified memory, which it does not see.

    The time stays: it is that of a step that fits, and then no page moves.
    """
    if not recipe.tricks.paged_optimizer or step.device.kind != "cuda":
        return step
    return replace(step, paged_from=PAGED_FROM)
