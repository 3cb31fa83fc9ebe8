r"""Mixed precision: multiply in 16 bits, keep what is trained in 32.

Saves    activations and frozen weights: 4 bytes -> 2 bytes an element               [bytes]
Costs    fp16: a loss scale, and now and then a skipped step; bf16: 8 significant bits to fp16's 11
Claim    approximate: products are rounded to 11 (fp16) or 8 (bf16) significant bits
Needs    fp16: any GPU. bf16: compute capability 8.0; a T4 says yes and emulates it slowly
Breaks   trained weights in fp16 ("Attempting to unscale FP16 gradients"): adapters stay in fp32
Sources  Micikevicius et al. 2018, arXiv:1710.03740, sec. 3 (master weights, loss scaling)
Ours     the switch; torch's autocast and GradScaler do the work

Shapes: none; every matrix product is concerned.
"""

from cria_tricks.errors import BadInput
from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe
from cria_tricks.units import DTYPE

SWITCHES = ("precision=fp16", "precision=bf16")
CLAIM = "approximate"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Autocast to 16 bits; store frozen weights in them, trained weights in fp32."""
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
    if precision == "fp16" and device.kind == "cpu":
        plan = plan.warn("precision=fp16: CPUs emulate fp16, so it saves memory but is far slower than fp32")
    if recipe.tricks.peft != "none":  # all that is loaded is frozen, so it needs no fp32 master copy
        plan = plan.with_("model", dtype=DTYPE[precision])
    return plan.with_("training", **{precision: True})
