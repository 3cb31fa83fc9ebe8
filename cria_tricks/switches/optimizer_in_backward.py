"""Switch early steps of weights on, and bill it; ``techniques/optimizer_in_backward.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique


def _values(recipe: Recipe, device: Device, width: int) -> tuple[bool | str, ...]:
    """Return what a plan tries: only if all weights train, because only then are their gradients large."""
    if recipe.tricks.peft != "none":
        return (False,)
    return (False, "clip" if recipe.train.max_grad_norm else True)


TECHNIQUE = Technique(
    claim="exact without clipping",
    lesson="weights_elsewhere",
    switches=("optimizer_in_backward=true", "optimizer_in_backward=clip"),
    fields={
        "optimizer_in_backward": Field("Memory", "Optimizer step in the backward pass", values=_values, search="exact")
    },
    needs={"optimizer_in_backward=true": "train.max_grad_norm=0"},
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for steps in the backward pass, unless something has to see all gradients first.

    Raises:
        BadInput: with gradient accumulation, with several processes, and for ``true`` with a limit for the norm.
    """
    wanted = recipe.tricks.optimizer_in_backward
    if not wanted:
        return plan
    window = recipe.tricks.gradient_accumulation
    limit = recipe.train.max_grad_norm
    strategy = recipe.parallel.strategy
    toggle = f"tricks.optimizer_in_backward={str(wanted).lower()}"
    if window > 1:
        raise BadInput(
            f"{toggle} with tricks.gradient_accumulation={window}: a gradient must stay until the last micro-batch of "
            "its window, and here it is freed at once; set tricks.gradient_accumulation=1"
        )
    if wanted is True and limit:
        raise BadInput(
            f"{toggle} with train.max_grad_norm={limit:g}: the norm of all gradients is known only when every weight "
            "has taken its step, so it cannot limit the step; set train.max_grad_norm=0 for no limit, or "
            "tricks.optimizer_in_backward=clip, which limits the gradient of each weight by itself"
        )
    if strategy != "none":
        raise BadInput(
            f"{toggle} with parallel.strategy={strategy}: it is built for one process, whose gradients are whole when "
            "they arrive; set tricks.optimizer_in_backward=false"
        )
    return plan.with_("optimizer", in_backward=wanted)


def bill(step: Step, recipe: Recipe) -> Step:
    """Let no gradient wait: each is alive only while its own product runs backward and its weight takes its step.

    If nothing is clipped, the memory traffic of clipping is left out. Gradient norms are computed all the same.
    """
    switch = recipe.tricks.optimizer_in_backward
    if not switch:
        return step
    step = replace(step, steps_in_backward=True)
    if switch == "clip":
        return step
    return replace(step, gradient_bytes=step.gradient_bytes - CLIP)


CLIP = 8
"""Memory traffic [bytes for one trained weight] of clipping gradients: each is read and written."""
