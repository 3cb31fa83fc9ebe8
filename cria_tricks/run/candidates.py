"""List the sets of switches that a search tries, say how a set differs from the wanted one, and that none fits."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.common.units import human
from cria_tricks.predict.toggle_values import choices
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe

EXACT = (
    "expand_kv", "chunked_loss", "activation_offload", "keep_attention", "paged_optimizer", "optimizer_in_backward",
)  # fmt: skip
"""Switches that are on or off and change no result beyond rounding. Checkpointing and micro-batches are tried, too."""

LONG = (*EXACT, "tiled_mlp")
"""The same for rows longer than a tile. No T4 has run it, so a run that goes on with less memory does not try it."""

FREE = ("fused_lora", "fused_blocks")
"""Switches of the same kind that cost nothing by the estimate, so they are switched on wherever they have an effect. A
run that goes on with less memory does not switch them on by itself, because no T4 has run them yet."""

ALLOWED = ("precision", "quantization", "double_quantization", "lean_preparation", "optimizer", "packing", "compile")
"""Switches that ``may_change`` may name: they change numbers, or, like packing, how many documents a step sees."""

MOST_SPLITS = 64
"""The largest micro-batch that is tried [rows]."""


class NothingFits(OutOfMemory):
    """No set of switches fits; the message says what else would help.

    Args:
        target: the model and the card.
        smallest: the set that needs least.
        needed: what it needs [bytes].
    """

    def __init__(self, target: Target, smallest: Recipe, needed: int):
        self.smallest = smallest
        self.needed = needed
        advice = [f"shorten data.max_length ({smallest.data.max_length})"]
        if smallest.tricks.peft == "none":
            advice.append("train an adapter with tricks.peft=lora")
        elif smallest.tricks.quantization not in ("nf4", "fp4"):
            advice.append("store the weights in fewer bits with --may-change quantization")
        elif not smallest.tricks.stream_layers:
            advice.append("keep the weights on the host with tricks.stream_layers=true")
        super().__init__(
            f"--fit: no set of switches fits {target.device.name} with a margin: the smallest needs {human(needed)} of "
            f"{human(target.device.memory_bytes)}; {', or '.join(advice)}"
        )


def candidates(target: Target, recipe: Recipe, exact: Iterable[str], may_change: Iterable[str]) -> Iterator[Recipe]:
    """Yield the recipe with each set of switches (its own values, too) and each micro-batch, all blocks recomputed."""
    fields: dict[str, tuple[Any, ...]] = {n: tuple({False: 0, True: 0, getattr(recipe.tricks, n): 0}) for n in exact}
    attention = recipe.tricks.attention
    fields["attention"] = (attention, "sdpa") if attention == "eager" else (attention,)
    values = choices(recipe, target.device, target.shape.width) | {"packing": (False, True), "compile": (False, True)}
    fields |= {name: values[name] for name in may_change}
    batches = [rows for rows in _divisors(recipe.rows_per_step) if rows <= MOST_SPLITS]
    warned = len(target.resolve(recipe).warnings)
    for combination in itertools.product(*fields.values()):
        tricks = dict(zip(fields, combination, strict=True)) | {"gradient_checkpointing": True}
        one = changed(recipe, tricks, recipe.train.batch_size)
        try:
            plan = target.resolve(one)
        except BadInput:
            continue
        if len(plan.warnings) > warned:
            continue  # one of the switches would have no effect
        whole = [recipe.train.batch_size]  # with steps in the backward pass a step is one micro-batch
        for rows in whole if plan.optimizer.get("in_backward") else batches:
            yield changed(one, {"gradient_accumulation": recipe.rows_per_step // rows}, rows)


def with_free(target: Target, recipe: Recipe) -> Recipe:
    """Set the switches of :data:`FREE` that work here and have an effect."""
    for name in FREE:
        more = changed(recipe, {name: True}, recipe.train.batch_size)
        if target.works(more) and len(target.resolve(more).warnings) == len(target.resolve(recipe).warnings):
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
    """Write what differs between two recipes in switches and micro-batches, as ``--set`` takes it."""
    found = []
    if other.data.max_length != recipe.data.max_length:
        found.append(f"data.max_length={other.data.max_length}")
    if other.train.batch_size != recipe.train.batch_size:
        found.append(f"train.batch_size={other.train.batch_size}")
    for name in type(recipe.tricks).model_fields:
        value, before = getattr(other.tricks, name), getattr(recipe.tricks, name)
        if (type(value), value) != (type(before), before):
            found.append(f"tricks.{name}={str(value).lower() if isinstance(value, bool) else value}")
    return tuple(found)


def _divisors(number: int) -> list[int]:
    """List the numbers that divide another."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
