"""Switch mixed precision on, and bill it; ``techniques/mixed_precision.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="approximate",
    lesson="mixed_precision",
    switches=("precision=fp16", "precision=bf16"),
    fields={
        "precision": Field(
            "Speed",
            "Mixed precision (fp16, bf16)",
            values=lambda recipe, device, _: ("fp32", device.half_precision),
            search="may change",
        )
    },
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Compute in 16 bits by autocast; store frozen weights in 16 bits, and trained weights in fp32."""
    precision = recipe.tricks.precision
    if precision == "fp32":
        return plan
    device = plan.device
    if precision == "bf16" and not device.real_bf16:
        if device.kind == "cuda":
            raise BadInput(
                f"tricks.precision=bf16: {device.name} (compute capability {device.capability[0]}."
                f"{device.capability[1]}) has no bf16 units and only emulates it; use tricks.precision=fp16"
            )
        plan = plan.warn("precision=bf16: this CPU emulates bf16, so it saves memory but is slower than fp32")
    if precision == "fp16" and device.slow_fp16:
        plan = plan.warn("precision=fp16: this CPU emulates fp16, so it saves memory but is far slower than fp32")
    if recipe.tricks.peft != "none":  # all that is loaded is frozen, so it needs no fp32 master copy
        plan = plan.with_("model", dtype=DTYPE[precision])
    if recipe.tricks.peft in ("none", "side_network"):  # else no matrix of a block trains
        plan = plan.then("techniques.mixed_precision.cast_without_cache")
    return plan.with_("training", **{precision: True})


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill two bytes an element for what products take and give, at the card's 16-bit rate.

    If the loaded weights are frozen, they and the hidden states take two bytes, too. fp16 also unscales its gradients.
    """
    precision = recipe.tricks.precision
    if precision == "fp32":
        return step
    # The bill must know in two places whether it is bf16: int8 products cast bf16 to fp16, and the dry run can multiply
    # all experts at once in bf16 only.
    unscaling = UNSCALE * (precision == "fp16")
    step = replace(
        step,
        compute_itemsize=2,
        product_itemsize=2,
        bf16=precision == "bf16",
        gradient_bytes=step.gradient_bytes + unscaling,
    )
    if recipe.tricks.peft == "none":  # what trains stays in fp32, and so do hidden states
        return step
    stored = step.block_weight_bytes // 2
    return replace(step, block_weight_bytes=stored, stored_itemsize=2, other_weight_itemsize=2, hidden_itemsize=2)


UNSCALE = 8
"""Memory traffic [bytes for one trained weight] of undoing fp16's loss scale: the gradient is read and written."""
