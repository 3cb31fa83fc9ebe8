"""Switch the tiled MLP on, and bill it; ``techniques/tiled_mlp.py`` has the card and the code."""

import functools
from dataclasses import replace

from cria_tricks.bill import fused_operations
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import PLAIN_BLOCKS, Facts
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import ON_OFF, Field, Technique


def _values(recipe: Recipe, device: Device, width: int) -> tuple[bool, ...]:
    """Return what a plan tries: a micro-batch of no more tokens than the model is wide is no longer than one tile."""
    if recipe.train.batch_size * recipe.data.max_length <= width:
        return (False,)
    return ON_OFF


TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="long_rows",
    switches=("tiled_mlp=true",),
    fields={
        "tiled_mlp": Field("Memory", "Tiled MLP (long rows)", number="tokens of a tile", values=_values, search="long")
    },
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Have the MLPs of all blocks run in tiles.

    Raises:
        BadInput: with compile, and with the tensor-parallel strategies.
    """
    tricks = recipe.tricks
    tile = tricks.tiled_mlp
    if not tile:
        return plan
    asked = f"tricks.tiled_mlp={str(tile).lower()}"
    if tricks.compile:
        raise BadInput(f"{asked}: a compiled block chooses itself what it keeps; set tricks.compile=false")
    if recipe.parallel.strategy in ("tensor", "ddp_tensor"):
        raise BadInput(
            f"{asked}: tensor parallelism cuts the MLP's matrices, and tiles of these are not tested; use "
            "parallel.strategy=ddp or fsdp"
        )
    most = recipe.train.batch_size * _row(recipe)
    if tile is not True and most <= tile:
        return plan.warn(
            f"tiled_mlp has no effect: no micro-batch has more than {most:,} tokens, and a tile has {tile:,}"
        )
    return plan.with_("checkpointing", mlp_tile=tile).then("techniques.tiled_mlp.tile_blocks")


def _row(recipe: Recipe) -> int:
    """Return the most positions of a row: its tokens, and the learnt vectors in front of them."""
    return recipe.data.max_length + recipe.prompt.tokens * (recipe.tricks.peft == "prompt_tuning")


def tokens_of(wanted: bool | int, width: int) -> int:
    """Return the tokens of a tile: as many as are wanted, D (the model's width) for True, and 0 for False."""
    return width if wanted is True else wanted


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model of another kind than those whose MLP can be tiled."""
    if "mlp_tile" not in plan.checkpointing or facts.kind in PLAIN_BLOCKS:
        return
    raise BadInput(
        f"tricks.tiled_mlp: the MLP of {facts.name}, a model of kind {facts.kind}, is not one that can be tiled: it "
        f"is for {', '.join(PLAIN_BLOCKS)}; set tricks.tiled_mlp=false"
    )


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill a tile's insides in place of all tokens', wherever a micro-batch has more tokens than a tile.

    The MLP runs forward a second time, and its weights are read and unpacked once a tile.
    """
    tile = tokens_of(recipe.tricks.tiled_mlp, step.shape.width)
    if not tile or step.all_tokens <= tile:
        return step
    step = replace(step, mlp_tile=tile)
    if step.learns_beside:  # a side network's rule tiles the frozen block and its copy by itself
        return step
    rule = functools.partial(fused_operations.tiled, rule=step.learning_operations)
    return replace(step, learning_operations=rule)
