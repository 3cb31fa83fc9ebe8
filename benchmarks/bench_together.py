"""The capstone's toggles on this device: each alone, each taken away from all, and one after the other.

Alone is over nothing but what a toggle needs, and what cannot do without a toggle goes with it. gradient_accumulation
stays off: with it a step would train other tokens. It has a file of its own.
"""

import pytest

from cria_tricks import recipes
from cria_tricks.hardware import T4, this_device
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings

EVERY = tuple(field for field in toggles.switched_on(recipes.capstone(T4)) if field != "gradient_accumulation")


def words(fields) -> str:
    """Toggles as the capstone has them here."""
    recipe = capstone()
    return " ".join(f"{field}={str(getattr(recipe.tricks, field)).lower()}" for field in fields)


def capstone() -> Recipe:
    """For this device: a CPU's has no fp16, and nothing that is for cards."""
    return with_settings(recipes.capstone(this_device()), ["tricks.gradient_accumulation=1"])


def on_here() -> list[str]:
    """Its toggles, in the order of the lessons."""
    return toggles.switched_on(capstone())


def only_if_here(field: str) -> None:
    if field not in on_here():
        pytest.skip(f"the capstone does not set {field} on this device")


def test_off(step):
    step("off", "")


@pytest.mark.parametrize("field", EVERY)
def test_ladder(step, field):
    only_if_here(field)
    before = on_here()[: on_here().index(field)]
    step(f"ladder_{field}", words([*before, field]), against=f"ladder_{before[-1]}" if before else "off")


@pytest.mark.parametrize("needed", list(dict.fromkeys(toggles.NEEDS.values())), ids="+".join)
def test_needed(step, needed):
    """What toggles that need others are held against when they are alone."""
    if not any(toggles.NEEDS.get(field) == needed for field in on_here()):
        pytest.skip("nothing on this device needs these")
    step(f"needed_{'+'.join(needed)}", words(needed))


@pytest.mark.parametrize("field", EVERY)
def test_alone(step, field):
    only_if_here(field)
    needed = toggles.NEEDS.get(field, ())
    step(f"alone_{field}", words([*needed, field]), against=f"needed_{'+'.join(needed)}" if needed else "off")


@pytest.mark.parametrize("field", EVERY)
def test_removed(step, field):
    only_if_here(field)
    without = toggles.without(capstone(), field)
    step(f"removed_{field}", words(without), against=f"ladder_{on_here()[-1]}")
