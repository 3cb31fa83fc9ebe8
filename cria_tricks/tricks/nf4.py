r"""NF4: frozen weights in four bits, with levels at the quantiles of a normal distribution.

Saves    frozen linear weights: 16 -> 4.5 bits an element, 4.127 with double quantization   [bytes]
Costs    one layer at a time is unpacked to 16 bits for its product
Claim    approximate: each weight moves to the nearest of 16 levels of its block of 64
Needs    compute capability 6.0, or a CPU; something else to train (peft)
Breaks   training the quantised weights; merging an adapter into them rounds it
Sources  Dettmers et al. 2023, arXiv:2305.14314, sec. 3 (NormalFloat, double quantization)
Ours     the switch; bitsandbytes does the work. fp4 (plain 4-bit floats) is the comparison

Shapes: weights (D_out, D_in), flattened to blocks of 64 with one absmax each.
"""

from cria_tricks.errors import BadInput
from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe
from cria_tricks.units import DTYPE

SWITCHES = ("quantization=nf4", "quantization=fp4", "double_quantization=true")
CLAIM = "approximate"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask bitsandbytes for 4-bit linears that compute in the recipe's precision."""
    tricks = recipe.tricks
    if tricks.quantization not in ("nf4", "fp4"):
        if tricks.double_quantization:
            plan = plan.warn(
                "double_quantization has no effect: it packs the scales of 4-bit weights, and "
                f"quantization is {tricks.quantization}"
            )
        return plan
    refuse_without_adapter(recipe)
    return plan.with_(
        "quantization",
        load_in_4bit=True,
        bnb_4bit_quant_type=tricks.quantization,
        bnb_4bit_use_double_quant=tricks.double_quantization,
        bnb_4bit_compute_dtype=DTYPE[tricks.precision],
    ).then("prepare_for_kbit_training")


def refuse_without_adapter(recipe: Recipe) -> None:
    """Quantised weights are codes: they have no gradient, so something else must train."""
    if recipe.tricks.peft == "none":
        kind = recipe.tricks.quantization
        raise BadInput(
            f"tricks.quantization={kind} with tricks.peft=none: quantised weights are frozen, so nothing "
            "would train; set tricks.peft=lora (or head)"
        )
