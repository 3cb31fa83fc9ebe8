r"""LoRA: freeze W, learn a product of two thin matrices beside it.

Saves    gradients and optimizer states of all but r (D_in + D_out) weights a matrix [bytes]
Costs    two thin products more for every adapted matrix
Claim    reparametrised: identical to the base at step 0; afterwards W + (alpha / r) B A
Needs    nothing; composes with every other trick
Breaks   a learning rate meant for full fine-tuning (use about ten times it)
Sources  Hu et al. 2021, arXiv:2106.09685, sec. 4.1 (B = 0 at the start, scaling alpha / r)
Ours     the switch; peft does the work

Shapes: A (r, D_in), B (D_out, r), both fp32, also over a 4-bit W.
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Lora, Recipe

SWITCHES = ("peft=lora",)
CLAIM = "reparametrised"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask peft for adapters on the named linears."""
    if recipe.tricks.peft != "lora":
        if recipe.lora != Lora():
            plan = plan.warn(f"the lora.* settings have no effect: tricks.peft is {recipe.tricks.peft}")
        return plan
    lora = recipe.lora
    return plan.with_(
        "peft",
        kind="lora",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
    ).then("add_adapter")
