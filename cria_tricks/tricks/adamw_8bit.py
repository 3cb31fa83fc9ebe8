r"""8-bit AdamW: both moments in one byte each, block by block.

Saves    optimizer states: 8 -> 2 bytes a trained weight                             [bytes]
Costs    a little rounding in every step
Claim    approximate: each moment moves to the nearest of 256 dynamic levels of its block
Needs    bitsandbytes; matrices of at least 4,096 elements (smaller ones stay in 32 bits)
Breaks   very small adapters: nothing is left to save
Sources  Dettmers et al. 2021, arXiv:2110.02861, sec. 2 (block-wise dynamic quantisation)
Ours     the switch; bitsandbytes does the work

Shapes: states as the weights, in blocks with one fp32 absmax each.
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe

SWITCHES = ("optimizer=adamw_8bit",)
CLAIM = "approximate"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for 8-bit states."""
    if recipe.tricks.optimizer != "adamw_8bit":
        return plan
    return plan.with_("optimizer", bits=8)
