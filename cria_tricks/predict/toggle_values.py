"""List the values to try for each switch, and all sets of switches with these values."""

import itertools
from collections.abc import Iterator
from typing import Any

from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe
from cria_tricks.switches import FIELDS, as_switch, needed


def choices(recipe: Recipe, device: Device, width: int) -> dict[str, tuple[Any, ...]]:
    """List the values to try for switches that change how a step is computed, by field.

    Args:
        recipe: what would be trained.
        device: the machine.
        width: D, the width of the model.
    """
    found = {}
    for name, field in FIELDS.items():
        if field.values:
            found[name] = field.values(recipe, device, width) if callable(field.values) else field.values
    return found


def all_sets(recipe: Recipe, device: Device, width: int) -> Iterator[dict[str, Any]]:
    """Yield all combinations of these values in which each switch has what it needs.

    Some of them have no effect on this device all the same, or are refused; the caller checks that.
    """
    fields = choices(recipe, device, width)
    half = device.half_precision
    for values in itertools.product(*fields.values()):
        tricks = dict(zip(fields, values, strict=True))
        # What is not among the fields, such as peft, stays as the recipe has it.
        has = {name: as_switch(name, value) for name, value in tricks.items()}
        needs = (need for switch in has.values() for need in needed(switch))
        if all(name not in has or has[name] == f"{name}={value.format(half=half)}" for name, value in needs):
            yield tricks
