r"""Gradient accumulation: k small batches, one optimizer step.

Saves    activations and logits: those of k B rows -> those of B rows                [bytes]
Costs    k smaller, less busy forward and backward passes instead of one
Claim    exact, also with ragged lengths and a partial last window, when the loss is divided by the
         window's trained tokens and not averaged micro-batch by micro-batch
Needs    nothing; composes with every other trick
Breaks   batch statistics (there are none here); a mean of means (transformers issue 34191)
Sources  Huang et al. 2018, arXiv:1811.06965, sec. 2.2 (micro-batches); transformers PR 34198
Ours     the switch, and a loss that sums; transformers' Trainer keeps the window

Shapes: k micro-batches of (B, T).
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe

SWITCHES = ("gradient_accumulation=8",)
CLAIM = "exact"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Tell the trainer how many micro-batches make a step."""
    return plan.with_("training", gradient_accumulation_steps=recipe.tricks.gradient_accumulation)
