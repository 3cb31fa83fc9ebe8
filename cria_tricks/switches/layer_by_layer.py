"""Let micro-batches go layer by layer, and bill it; ``techniques/layer_by_layer.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact",
    lesson="weights_elsewhere",
    switches=("layer_by_layer=true",),
    fields={"layer_by_layer": Field("Memory", "All micro-batches through each streamed layer")},
    needs={"layer_by_layer=true": "peft=lora gradient_checkpointing=true stream_layers=true gradient_accumulation=2"},
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask the trainer for it, if a window has several micro-batches of streamed blocks.

    Raises:
        BadInput: with an offload that follows one micro-batch through all blocks.
    """
    if not recipe.tricks.layer_by_layer:
        return plan
    if recipe.tricks.activation_offload == "overlapped":
        raise BadInput(
            "tricks.layer_by_layer=true with tricks.activation_offload=overlapped: that follows one micro-batch "
            "through all blocks; set tricks.activation_offload=true"
        )
    if not plan.streaming or recipe.tricks.gradient_accumulation == 1:
        return plan.warn(
            "layer_by_layer has no effect: without stream_layers, or with gradient_accumulation=1, no block is fetched "
            "again for another micro-batch"
        )
    return plan.with_("streaming", layer_by_layer=True)


def _acts(recipe: Recipe) -> bool:
    tricks = recipe.tricks
    return bool(tricks.layer_by_layer and tricks.stream_layers and tricks.gradient_accumulation > 1)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill the block inputs of a whole window, for which each block is fetched once in a pass.

    No earlier micro-batch's gradient waits, except that of a head.
    """
    if not _acts(recipe):
        return step
    waiting = step.waiting_gradient_bytes if recipe.tricks.peft == "head" else 0
    return replace(step, window=recipe.tricks.gradient_accumulation, waiting_gradient_bytes=waiting)
