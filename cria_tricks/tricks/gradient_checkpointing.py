r"""Gradient checkpointing: keep each block's input, recompute its insides on the way back.

Saves    activations: L blocks x (s + a)  ->  L x s + 1 x a                          [bytes]
Costs    one more forward through every block
Claim    exact: same loss, same gradients, bit for bit, if the random state is replayed
Needs    nothing; composes with every other trick
Breaks   blocks with side effects; dropout without a saved random state
Sources  Chen et al. 2016, arXiv:1604.06174, sec. 4
Ours     the switch; torch's non-reentrant checkpoint does the work

Shapes: s = B T D elements (a block's input), a = all that the block keeps inside.
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe

SWITCHES = ("gradient_checkpointing=true",)
CLAIM = "exact"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask the trainer for it; ``trainer.py`` knows this version's name of the argument."""
    if not recipe.tricks.gradient_checkpointing:
        return plan
    if recipe.tricks.peft == "head":
        return plan.warn(
            "gradient_checkpointing has no effect: with peft=head no block below the head keeps activations"
        )
    return plan.with_("training", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
