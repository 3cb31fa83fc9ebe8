"""Switch the lean preparation on, and bill it; ``techniques/lean_preparation.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches.nf4 import USUAL_CASTS
from cria_tricks.technique import ON_OFF, Field, Technique

TECHNIQUE = Technique(
    claim="approximate",
    lesson="mixed_precision",
    switches=("lean_preparation=true",),
    fields={
        "lean_preparation": Field(
            "LoRA", "Lean preparation (no fp32 copies of norms and head)", values=ON_OFF, search="may change"
        )
    },
    needs={"lean_preparation=true": "peft=lora precision={half}"},
)
UNCAST = "techniques.lean_preparation.leave_inputs_uncast"
"""The edit after which adapters take their inputs as they are."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Leave out the usual casts to fp32, and let adapters take their inputs without a cast."""
    tricks = recipe.tricks
    if not tricks.lean_preparation:
        return plan
    if tricks.precision == "fp32" or tricks.peft != "lora":
        return plan.warn(
            "lean_preparation has no effect: it avoids fp32 copies around LoRA in 16-bit arithmetic, and "
            f"precision is {tricks.precision}, peft {tricks.peft}"
        )
    return plan.without(USUAL_CASTS).then(UNCAST)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill 16 bits for what is usually fp32.

    That is the weights beside the matrices, hidden states, adapters' inputs, and products of quantised matrices, which
    come back in the dtype of their input. Less is moved between products, and adapters cast no input.
    """
    if not recipe.tricks.lean_preparation or recipe.tricks.precision == "fp32" or recipe.tricks.peft != "lora":
        return step
    return replace(step, other_weight_itemsize=2, hidden_itemsize=2, product_itemsize=2, adapter_input_itemsize=2)
