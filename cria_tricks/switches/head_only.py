"""Switch a trained head on, and bill it; ``techniques/head_only.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="reparametrised", lesson="lora", switches=("peft=head",))


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask peft for a trained copy of the head over a frozen model."""
    if recipe.tricks.peft != "head":
        return plan
    return plan.with_("peft", kind="head").then("load.adapters.add_trained_head")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill an fp32 copy of the head; no gradient reaches the blocks, so they save nothing and run forward only."""
    if recipe.tricks.peft != "head":
        return step
    # learning_blocks=0 alone makes the lines of the blocks zero.
    added = ((1, step.shape.embedding_weights),)
    return replace(step, trains_all=False, added=added, learning_blocks=0, reaches_embedding=False)
