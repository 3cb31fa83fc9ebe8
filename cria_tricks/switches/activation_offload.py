"""Switch activation offload on, and bill it; ``techniques/activation_offload.py`` has the card and the code."""

import functools
from collections.abc import Callable
from dataclasses import replace

from cria_tricks.bill.operation import BlockTensors, WaitingBytes
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import ON_OFF, Field, Technique

TECHNIQUE = Technique(
    claim="exact",
    lesson="long_rows",
    switches=("activation_offload=true", "activation_offload=overlapped"),
    fields={
        "activation_offload": Field("Memory", "Activation offloading to the host (CPU)", values=ON_OFF, search="exact")
    },
    needs={"activation_offload=overlapped": "gradient_checkpointing=true"},
)
OVERLAPPED = "load.overlapped_offload.overlapped"
"""The context in which copies overlap with the computing."""
SMALL = 2**17
"""If copies overlap, a tensor of fewer bytes stays on the card. PCIe 3.0 carries so many in 11 us, and the host takes
17 us to start a copy (``hardware/reached.py``: ``LINK`` and ``LAUNCH``)."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Put the context around every forward pass; ``load/overlapped_offload.py`` gives it the model's weights.

    Raises:
        BadInput: if copies cannot overlap with what else is on.
    """
    wanted = recipe.tricks.activation_offload
    if not wanted:
        return plan
    if wanted == "overlapped":
        if recipe.tricks.peft == "head":
            return plan.warn(
                "activation_offload has no effect: with peft=head no block below the head keeps activations"
            )
        _refuse_to_overlap(recipe)
        plan = plan.around(OVERLAPPED)
    else:
        plan = plan.around("load.overlapped_offload.offloaded")
    if plan.device.kind != "cuda":
        return plan.warn(
            "activation_offload gains nothing without CUDA, and costs a copy: activations are in host memory already"
        )
    return plan


def _refuse_to_overlap(recipe: Recipe) -> None:
    asked = "tricks.activation_offload=overlapped"
    if not recipe.tricks.gradient_checkpointing:
        raise BadInput(
            f"{asked}: it sends the inputs of checkpointed blocks, and none is checkpointed; set "
            "tricks.gradient_checkpointing=true"
        )
    if recipe.tricks.compile:
        raise BadInput(f"{asked}: compiled blocks do not tell where the last one begins; set tricks.compile=false")
    if recipe.parallel.strategy not in ("none", "ddp"):
        raise BadInput(
            f"{asked}: it follows one process through all blocks, one after the other; use parallel.strategy=ddp, or "
            "tricks.activation_offload=true"
        )


def travelling_blocks(recipe: Recipe, shape: Shape) -> int:
    """Return the number of blocks whose input travels if copies overlap: the checkpointed ones, but never the last."""
    if recipe.tricks.gradient_checkpointing is True:
        return shape.layers - 1
    return min(int(recipe.tricks.gradient_checkpointing), shape.layers - 1)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill only the saved tensors of the open block: the others wait on the host, and all cross the link twice.

    If copies overlap, only inputs of blocks travel, beside the computing. Then bill also what stays, and the input that
    comes back ahead of its use. On a CPU the bytes stay as they are.
    """
    wanted = recipe.tricks.activation_offload
    if not wanted:
        return step
    if wanted == "overlapped":
        step = replace(step, travelling_blocks=travelling_blocks(recipe, step.shape))
        an_input = step.all_tokens * step.shape.width * step.hidden_itemsize
        if an_input < SMALL or not step.checkpointed or not step.travelling_blocks:
            return step
    else:
        step = replace(step, link_trips=2)
    if step.device.kind != "cuda":
        return step
    # bill/block.py needs the flag, because the tensors of the open block come back one by one.
    rule = functools.partial(on_the_host, step.block_waits)
    return replace(step, offloaded=True, overlapped=wanted == "overlapped", block_waits=rule)


def on_the_host(waits: Callable[[BlockTensors], WaitingBytes], block: BlockTensors) -> WaitingBytes:
    """Count what waits on the card: of each block that is offloaded, only what int8 products pin there.

    Args:
        waits: the rule without offload; it still holds for the additional bytes of the open block.
        block: what one block leaves for its backward pass.
    """
    if not block.offloaded:
        return waits(block)
    return WaitingBytes(block.pinned, waits(block).open_too, "what stays on the card; the rest is on the host")
