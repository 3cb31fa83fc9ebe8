"""Switch streamed blocks on, and bill it; ``techniques/stream_layers.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import PLAIN_BLOCKS, Facts
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact",
    lesson="weights_elsewhere",
    switches=("stream_layers=true", "stream_layers=file"),
    # It is no value to try, because an H200 has run it on small blocks only.
    fields={"stream_layers": Field("Memory", "Weights on the host, streamed layer by layer")},
    needs=dict.fromkeys(("stream_layers=true", "stream_layers=file"), "peft=lora gradient_checkpointing=true"),
)
SLOTS = 2
"""Blocks on the device at a time: one that runs, and the one that runs next."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Have the blocks loaded to the host one by one.

    Raises:
        BadInput: without a frozen base, without all blocks checkpointed, and with what is listed at Breaks.
    """
    tricks = recipe.tricks
    if not tricks.stream_layers:
        return plan
    asked = f"tricks.stream_layers={str(tricks.stream_layers).lower()}"
    refused = {
        "tricks.peft=none": (tricks.peft == "none", "weights that train cannot leave the card; set tricks.peft=lora"),
        "tricks.peft=side_network": (
            tricks.peft == "side_network", "its trained copies run beside the blocks; set tricks.peft=lora",
        ),
        "tricks.compile=true": (tricks.compile, "a compiled block fetches nothing; set tricks.compile=false"),
        f"parallel.strategy={recipe.parallel.strategy}": (
            recipe.parallel.strategy != "none", "it is built for one process; set tricks.stream_layers=false",
        ),
        f"tricks.gradient_checkpointing={str(tricks.gradient_checkpointing).lower()}": (
            tricks.gradient_checkpointing is not True and tricks.peft != "head",
            "a block's weights are gone after its forward pass, so each must run again before its backward pass; set "
            "tricks.gradient_checkpointing=true",
        ),
    }  # fmt: skip
    for what, (is_wrong, why) in refused.items():
        if is_wrong:
            raise BadInput(f"{asked} with {what}: {why}")
    if plan.device.kind != "cuda" and tricks.stream_layers is True:
        plan = plan.warn(
            "stream_layers=true gains nothing without CUDA, and costs copies: the weights are in host memory already; "
            "file saves memory"
        )
    return plan.with_("streaming", source="file" if tricks.stream_layers == "file" else "memory")


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model of another kind than those whose blocks are loaded one by one."""
    if plan.streaming and facts.kind not in PLAIN_BLOCKS:
        raise BadInput(
            f"tricks.stream_layers: {facts.name}, a model of kind {facts.kind}, is not one whose blocks can be loaded "
            f"one by one: it is for {', '.join(PLAIN_BLOCKS)}; set tricks.stream_layers=false"
        )


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill the weights of two blocks and not of all; all others are fetched, in each pass."""
    if not recipe.tricks.stream_layers:
        return step
    return replace(step, blocks_on_device=min(SLOTS, step.shape.layers))
