"""Turn a recipe (what the user wants) into a plan (what will run): apply each technique, then the parallel strategy."""

import contextlib
from dataclasses import replace

from cria_tricks.common.errors import BadInput
from cria_tricks.data import rules
from cria_tricks.hardware import Device, this_device
from cria_tricks.parallel import strategies
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.settings import Tricks
from cria_tricks.step_plan import Plan
from cria_tricks.switches import FIELDS, TECHNIQUES, technique_name


def resolve(recipe: Recipe, device: Device | None = None, processes: int = 1) -> Plan:
    """Build the plan of a recipe: every technique writes its settings into an empty plan, and the strategy comes last.

    Args:
        recipe: the settings that the user wants.
        device: the machine that will run the plan. None means this machine.
        processes: the world size of the run.

    Returns:
        The plan. Its ``warnings`` name the settings that have no effect on this device.

    Raises:
        BadInput: if a switch cannot work on this device, or not together with another switch. The message gives the
            reason and says what to use instead.
    """
    rules.refuse(recipe)
    plan = Plan(device or this_device())
    for technique in TECHNIQUES:
        # An error message names the technique that set a field, so the plan knows which technique is writing now.
        plan = technique.switch_on(replace(plan, _technique=technique_name(technique)), recipe)
    return strategies.switch_on(plan, recipe, processes)


def still_off(recipe: Recipe, device: Device, processes: int = 1) -> list[str]:
    """List the switches that are off in a recipe and would work on a device, as advice after an out-of-memory error.

    Each switch is switched on alone. It is listed if the changed recipe resolves without an error and with the same
    warnings, because a new warning means that the switch has no effect there.

    Args:
        recipe: the recipe that ran out of memory.
        device: the machine that it runs on.
        processes: of the run.

    Returns:
        One string for each field, with all values that work: ``["tricks.quantization=int8 or nf4 or fp4", ...]``.

    Raises:
        BadInput: if the recipe itself does not resolve for these processes on this device.
    """
    defaults = Tricks()
    usable: dict[str, list[str]] = {}  # field -> values that work
    warnings_before = resolve(recipe, device, processes).warnings
    for technique in TECHNIQUES:
        for switch in technique.TECHNIQUE.switches:
            field, _, value = switch.partition("=")
            already_on = getattr(recipe.tricks, field) != getattr(defaults, field)
            if already_on:
                continue
            if not FIELDS[field].helps(recipe):
                continue
            with contextlib.suppress(BadInput):  # this switch cannot work on the device or with the other switches
                changed = with_settings(recipe, [f"tricks.{switch}"])
                if resolve(changed, device, processes).warnings == warnings_before:
                    usable.setdefault(field, []).append(value)
    return [f"tricks.{field}={' or '.join(values)}" for field, values in usable.items()]
