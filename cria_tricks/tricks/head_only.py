r"""Train the head only: everything below it is a fixed feature extractor.

Saves    gradients and optimizer states of all but V x D weights, and every block's activations  [bytes]
Costs    one fp32 copy of the head, untied from the embedding: 4 V D bytes
Claim    reparametrised: identical to the base at step 0; only the last matrix moves
Needs    nothing
Breaks   tasks that need new features: a linear layer on old ones is all that is learnt
Sources  Yosinski et al. 2014, arXiv:1411.1792, sec. 2 (frozen features, a new last layer)
Ours     the switch; peft keeps the copy and saves it like an adapter

Shapes: head (V, D).
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe

SWITCHES = ("peft=head",)
CLAIM = "reparametrised"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask peft for a trained copy of the head over a frozen model."""
    if recipe.tricks.peft != "head":
        return plan
    return plan.with_("peft", kind="head").then("add_adapter")
