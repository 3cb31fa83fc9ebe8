"""Recipe -> Plan: what is wanted, folded over the tricks and over the strategy, becomes what will run."""

import contextlib
from dataclasses import replace

from cria_tricks.common.errors import BadInput
from cria_tricks.data import rules
from cria_tricks.hardware import Device, this_device
from cria_tricks.parallel import strategies
from cria_tricks.recipe import Recipe, Tricks, with_settings
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import TRICKS, gradient_accumulation, trick_name


def resolve(recipe: Recipe, device: Device | None = None, processes: int = 1) -> Plan:
    """Fold a recipe over the tricks, and at last over its strategy for several processes.

    Args:
        recipe: what is wanted.
        device: the machine it is meant for; this one when left out.
        processes: of the run.

    Raises:
        BadInput: for a toggle that cannot work there or with another one, with the reason and what to use.
    """
    rules.refuse(recipe)
    plan = Plan(device or this_device())
    for trick in TRICKS:
        plan = trick.switch_on(replace(plan, _trick=trick_name(trick)), recipe)
    return strategies.switch_on(plan, recipe, processes)


def still_off(recipe: Recipe, device: Device, processes: int = 1) -> list[str]:
    """Toggles that are off and would work here: ``["tricks.quantization=int8 or nf4 or fp4", ...]``."""
    default = Tricks()
    found: dict[str, list[str]] = {}
    warned = resolve(recipe, device, processes).warnings
    for trick in TRICKS:
        for switch in trick.SWITCHES:
            field, _, value = switch.partition("=")
            if getattr(recipe.tricks, field) != getattr(default, field):
                continue
            if trick is gradient_accumulation and recipe.train.batch_size == 1:
                continue  # it takes the place of a larger micro-batch, and there is none
            with contextlib.suppress(BadInput):  # cannot work here
                changed = with_settings(recipe, [f"tricks.{switch}"])
                if resolve(changed, device, processes).warnings == warned:
                    found.setdefault(field, []).append(value)
    return [f"tricks.{field}={' or '.join(values)}" for field, values in found.items()]
