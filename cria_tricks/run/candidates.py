"""List the sets of switches that a search tries, and say how a set differs from the wanted one."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from cria_tricks.predict.toggle_values import choices
from cria_tricks.predict.toggles import Target, with_effect
from cria_tricks.recipe import Recipe
from cria_tricks.switches import searched
from cria_tricks.technique import ON_OFF

EXACT = searched("exact")
"""Switches that change no result beyond rounding. Checkpointing and micro-batches are tried, too."""

LONG = searched("exact", "long")
"""The same for rows longer than a tile."""

FREE = searched("free")
"""Switches of the same kind that cost nothing by the estimate, so they are switched on wherever they have an effect."""

ALLOWED = searched("may change")
"""Switches that ``may_change`` may name: they change numbers, or, like packing, how many documents a step sees."""

MOST_SPLITS = 64
"""The largest micro-batch that is tried [rows]."""


def candidates(
    target: Target, recipe: Recipe, exact: Iterable[str], may_change: Iterable[str], keep: Collection[str] = ()
) -> Iterator[Recipe]:
    """Yield the recipe with each set of switches (its own values, too) and each micro-batch, all blocks recomputed.

    Args:
        target: the model and the card.
        recipe: what is wanted.
        exact: the switches that are on or off.
        may_change: names of :data:`ALLOWED`.
        keep: fields of the recipe that stay as they are, such as ``tricks.attention``.
    """
    fields: dict[str, tuple[Any, ...]] = {n: tuple({False: 0, True: 0, getattr(recipe.tricks, n): 0}) for n in exact}
    attention = recipe.tricks.attention
    fields["attention"] = (attention, "sdpa") if attention == "eager" else (attention,)
    values = choices(recipe, target.device, target.shape.width)
    fields |= {name: values.get(name, ON_OFF) for name in may_change}
    fields = {name: values for name, values in fields.items() if f"tricks.{name}" not in keep}
    checkpointing: dict[str, Any] = {"gradient_checkpointing": True}
    if "tricks.gradient_checkpointing" in keep:
        checkpointing = {}
    batches = [rows for rows in _divisors(recipe.rows_per_step) if rows <= MOST_SPLITS]
    if {"train.batch_size", "tricks.gradient_accumulation"} & set(keep):
        batches = [recipe.train.batch_size]
    combinations = itertools.product(*fields.values())
    sets = (dict(zip(fields, one, strict=True)) | checkpointing for one in combinations)
    for one, plan in with_effect(target, recipe, sets):
        batch_sizes = batches
        if plan.optimizer.get("in_backward"):  # then a step is one micro-batch
            batch_sizes = [recipe.train.batch_size]
        for rows in batch_sizes:
            split = changed(one, {"gradient_accumulation": recipe.rows_per_step // rows}, rows)
            yield split
            # Offloaded activations of long rows need less of the card than the recomputation of a block, but more of
            # the host. So this is tried only where it is known what the host has.
            if target.host and checkpointing and one.tricks.activation_offload:
                kept = changed(split, {"gradient_checkpointing": False}, rows)
                if target.works(kept):
                    yield kept


def with_free(target: Target, recipe: Recipe, keep: Collection[str] = ()) -> Recipe:
    """Set the switches of :data:`FREE` that work here and have an effect, but for those in ``keep``."""
    if not target.works(recipe):  # such as a micro-batch that several processes cannot share
        return recipe
    for name in FREE:
        if f"tricks.{name}" in keep:
            continue
        for more, _ in with_effect(target, recipe, [{name: True}]):
            recipe = more
    return recipe


def checkpointed(recipe: Recipe, number: int, blocks: int) -> Recipe:
    """Return the recipe with so many of its blocks recomputed."""
    value = {0: False, blocks: True}.get(number, number)
    return changed(recipe, {"gradient_checkpointing": value}, recipe.train.batch_size)


def changed(recipe: Recipe, tricks: dict[str, Any], rows: int) -> Recipe:
    """Return the recipe with other switches, and ``rows`` rows in a micro-batch."""
    return recipe.model_copy(
        update={
            "tricks": recipe.tricks.model_copy(update=tricks),
            "train": recipe.train.model_copy(update={"batch_size": rows}),
        }
    )


def differences(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """Write what differs between two recipes, as ``--set`` takes it."""
    before, after = recipe.model_dump(mode="json"), other.model_dump(mode="json")
    found = []
    for group in ("data", "train", "tricks", "lora"):
        for name, value in after[group].items():
            # By type, too, because in Python True == 1: all blocks checkpointed is not one block.
            if (type(value), value) != (type(before[group][name]), before[group][name]):
                found.append(f"{group}.{name}={_as_set(value)}")
    return tuple(found)


def _as_set(value: Any) -> str:
    """Write a value as ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


def _divisors(number: int) -> list[int]:
    """List the numbers that divide another."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
