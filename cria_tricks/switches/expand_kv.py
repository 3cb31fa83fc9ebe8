"""Switch repeated key and value heads on, and bill it; ``techniques/expand_kv.py`` has the card and the code."""

from cria_tricks.bill.step import Step
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches.flash_attention import with_kernel
from cria_tricks.technique import ON_OFF, Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="flash_attention",
    switches=("expand_kv=true",),
    fields={"expand_kv": Field("Speed", "Repeat K/V heads (GQA on a T4)", values=ON_OFF, search="exact")},
    needs={"expand_kv=true": "attention=sdpa"},
)
IMPLEMENTATION = "sdpa_expanded"
"""Under this name transformers finds the attention function (``load/attention.py``)."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Replace the attention function sdpa, which the recipe must ask for, by one that repeats the heads first."""
    tricks = recipe.tricks
    device = plan.device
    if not tricks.expand_kv:
        return plan
    if tricks.attention != "sdpa":
        return plan.warn(
            f"expand_kv has no effect: attention={tricks.attention} needs no equal heads from outside; it acts on "
            "tricks.attention=sdpa"
        )
    plan = plan.refine("model", attn_implementation=IMPLEMENTATION)
    if device.kind != "cuda":
        return plan.warn("expand_kv gains nothing without CUDA: the CPU's flash kernel takes grouped heads as they are")
    if not device.needs_expand_kv and tricks.precision != "fp32":
        return plan.warn(f"expand_kv gains nothing on {device.name}: its flash kernel takes grouped heads as they are")
    return plan


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill keys and values of as many heads as the queries have, in the kernel that takes equal heads.

    The time of the repeat is small beside it, and not counted.
    """
    if not recipe.tricks.expand_kv or recipe.tricks.attention != "sdpa":
        return step
    return with_kernel(step, masked=not step.maskless, repeats=True)
