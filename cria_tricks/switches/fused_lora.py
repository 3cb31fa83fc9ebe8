"""Switch fused adapters on, and bill it; ``techniques/fused_lora.py`` has the card and the code."""

import functools
from dataclasses import replace

from cria_tricks.bill import fused_operations
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="fused_lora",
    switches=("fused_lora=true",),
    fields={"fused_lora": Field("Speed", "Fused LoRA backward", search="free")},
    needs={"fused_lora=true": "peft=lora"},
)
FUSE = "load.fused.fuse"
"""The edit that fuses adapters."""


def fuses(recipe: Recipe) -> bool:
    """Tell whether a recipe's adapters are fused."""
    lora = recipe.lora
    return recipe.tricks.fused_lora and recipe.tricks.peft == "lora" and not lora.dropout and not lora.dora


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Have the modules with adapters run by the functions of ``techniques/``."""
    tricks = recipe.tricks
    if not tricks.fused_lora:
        return plan
    if tricks.peft != "lora":
        return plan.warn(f"fused_lora has no effect: it acts on LoRA's adapters, and peft is {tricks.peft}")
    if not fuses(recipe):
        name = "dora" if recipe.lora.dora else "dropout"
        return plan.warn(
            f"fused_lora has no effect with lora.{name}: peft computes the adapters, and each MLP also saves its "
            f"activated gate and its gated product; leave lora.{name} out"
        )
    if tricks.compile:
        raise BadInput("tricks.fused_lora=true: torch.compile fuses a block itself; set tricks.compile=false")
    return plan.then(FUSE)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill an input for each group of matrices and, for an MLP, gate and up; no 16-bit copies of adapters are kept.

    The small operations around adapters are left out. A x and the MLP's activation are computed twice.
    """
    if not fuses(recipe):
        return step
    rule = functools.partial(fused_operations.operations, rule=step.learning_operations)
    with_adapter = fused_operations.with_adapter
    return replace(step, learning_operations=rule, with_adapter=with_adapter, casts_adapters=False, fused_adapters=True)
