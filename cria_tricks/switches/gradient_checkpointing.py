"""Switch gradient checkpointing on, and bill it; ``techniques/gradient_checkpointing.py`` has the card and the code."""

import functools
from collections.abc import Callable
from dataclasses import replace

from cria_tricks.bill.operation import BlockTensors, WaitingBytes
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Facts, Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import ON_OFF, Field, Technique

TECHNIQUE = Technique(
    claim="exact",
    lesson="gradient_checkpointing",
    switches=("gradient_checkpointing=true",),
    fields={
        "gradient_checkpointing": Field(
            "Memory", "Gradient checkpointing (recompute activations)", number="the first blocks only", values=ON_OFF
        )
    },
)
CHECKPOINT = "techniques.gradient_checkpointing.checkpoint_blocks"
"""The edit that checkpoints blocks."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for an edit of the model, because a number of blocks is no argument of ``from_pretrained``."""
    wanted = recipe.tricks.gradient_checkpointing
    if not wanted:
        return plan
    if recipe.tricks.peft == "head":
        return plan.warn(
            "gradient_checkpointing has no effect: with peft=head no block below the head keeps activations"
        )
    if wanted is True:
        return plan.with_("checkpointing", blocks="all").then(CHECKPOINT)
    if recipe.tricks.peft == "side_network":
        raise BadInput(
            f"tricks.gradient_checkpointing={wanted}: side_network has its copies beside the last blocks, which the "
            "first blocks are not; set tricks.gradient_checkpointing=true"
        )
    return plan.with_("checkpointing", blocks=wanted).then(CHECKPOINT)


def kept_blocks(recipe: Recipe, shape: Shape) -> int:
    """Return how many of the last blocks keep everything although the first ones are checkpointed: L - k.

    Args:
        recipe: ``tricks.gradient_checkpointing`` is on.
        shape: the model's.

    Raises:
        BadInput: if the model has fewer blocks than are to be checkpointed.
    """
    wanted = recipe.tricks.gradient_checkpointing
    if wanted is True:
        return 0
    if wanted > shape.layers:
        raise too_many(wanted, shape.name, shape.layers)
    return shape.layers - wanted


def too_many(wanted: int, model: str, blocks: int) -> BadInput:
    """Make the error for more blocks to checkpoint than a model has."""
    return BadInput(
        f"tricks.gradient_checkpointing={wanted}: {model} has {blocks} blocks; set true for all, or {blocks} or less"
    )


def in_stage(recipe: Recipe, first: int, blocks: int) -> Recipe:
    """Return the recipe as it is for some blocks of the model, e.g. those of a pipeline's stage.

    Args:
        recipe: of the whole model.
        first: the number of the stage's first block, from 0.
        blocks: the number of its blocks.
    """
    wanted = recipe.tricks.gradient_checkpointing
    if wanted is True or wanted is False:
        return recipe
    here = min(max(wanted - first, 0), blocks) or False
    return recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update={"gradient_checkpointing": here})})


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model with fewer blocks than are to be checkpointed."""
    wanted = plan.checkpointing.get("blocks", 0)  # "all" or a number
    if isinstance(wanted, int) and wanted > (facts.blocks or 0):
        raise too_many(wanted, facts.name, facts.blocks or 0)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill L s + a: the inputs s of all L blocks, and the insides a of the one that is being recomputed.

    With a number k it is L s + (L - k) a. The last blocks have freed theirs when block k needs its own a. Checkpointed
    blocks run forward once more, and transformers makes embeddings require a gradient, so all blocks get one.
    """
    if not recipe.tricks.gradient_checkpointing or recipe.tricks.peft == "head":  # no gradient goes below the head
        return step
    # bill/block.py needs the flag: the forward pass of the open block runs a second time, so other tensors are alive
    # around its operations.
    rule = functools.partial(inputs_wait, step.block_waits)
    kept = kept_blocks(recipe, step.shape)
    return replace(step, checkpointed=True, kept_blocks=kept, block_waits=rule, reaches_embedding=True)


def inputs_wait(waits: Callable[[BlockTensors], WaitingBytes], block: BlockTensors) -> WaitingBytes:
    """Count what waits in each checkpointed block: its input, s bytes.

    The insides of the open block, a bytes, are counted in ``bill/block.py``. Two more things wait in each block: what
    int8 products pin, which no hook can take away, and what the matrix that joins a trained copy saves
    (``side_network.py``), because it is not recomputed. The open block has its pinned tensors a second time, and its
    input beside them if none of its operations keeps it.

    Args:
        waits: the rule for a block that is not checkpointed.
        block: what one block leaves for its backward pass.
    """
    if not block.recomputed:
        return waits(block)
    again = block.pinned
    if not block.keeps_input:
        again += block.input
    why = "its input"
    if block.joined:
        why += " and its join"
    return WaitingBytes(block.input + block.pinned + block.joined, again, why)
