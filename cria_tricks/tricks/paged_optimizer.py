r"""Paged optimizer: states in memory that moves to the host when the card is full.

Saves    optimizer states, at the moment when something else needs the room          [bytes]
Costs    their way over PCIe and back, only when that happens
Claim    exact: the same numbers in another place
Needs    CUDA; only states of at least 100,000 elements are paged, so most LoRA matrices are not
Breaks   nothing; without pressure nothing moves
Sources  Dettmers et al. 2023, arXiv:2305.14314, sec. 3 (paged optimizers)
Ours     the switch; bitsandbytes and CUDA unified memory do the work

Shapes: states as the weights.
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe

SWITCHES = ("paged_optimizer=true",)
CLAIM = "exact"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for paged states where there is a card to page from."""
    if not recipe.tricks.paged_optimizer:
        return plan
    if plan.device.kind != "cuda":
        return plan.warn("paged_optimizer has no effect without CUDA: the states are in host memory already")
    return plan.with_("optimizer", paged=True)
