"""Find the recipe that was asked for: with the user's settings, and with what its model and its card need besides."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import find_field, same
from cria_tricks.hardware import Device
from cria_tricks.models import is_hub_id
from cria_tricks.models.catalogue import ALIASES, short_name
from cria_tricks.models.shape import Shape
from cria_tricks.predict import model_settings
from cria_tricks.recipe import Recipe, field_names, with_settings

if TYPE_CHECKING:
    from cria_tricks.predict.toggles import Target

Named = Recipe | str | Path
"""A recipe, the name of one, or the path of a ``.toml`` file."""


@dataclass(frozen=True)
class Asked:
    """A recipe as the user wants it.

    Attributes:
        recipe: the recipe.
        own: whether its model is the one that it was written for.
        set: the fields that the user has set; a search leaves them as they are.
        warnings: which settings were added for the model, in one sentence.
    """

    recipe: Recipe
    own: bool
    set: Collection[str]
    warnings: list[str]


def named(recipe: Named, model: str | None, changes: Iterable[str]) -> tuple[Named, list[str]]:
    """Return the recipe that was named, and its changes; a model in its place is taken with the recipe ``qlora``."""
    changes = [f"model={model}", *changes] if model else [*changes]
    if isinstance(recipe, str) and not model and _is_model(recipe):
        return "qlora", [f"model={recipe}", *changes]
    return recipe, changes


def _is_model(name: str) -> bool:
    """Whether a name is that of a model, and not of a recipe."""
    if same(name, recipes.NAMED) or name.endswith(".toml"):
        return False
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    return short_name(name) in ALIASES or is_hub_id(name) or name.startswith("random:") or file.name == "config.json"


def asked(recipe: Named, changes: Iterable[str], device: Device, shape: Shape | None) -> Asked:
    """Find a recipe with the user's changes, for a model and a card.

    Args:
        recipe: what was named.
        changes: the user's settings, written as for ``--set``.
        device: the card.
        shape: the shape of the changed recipe's model; ``None`` if it cannot be estimated.

    Raises:
        BadInput: for a name or a setting that is wrong.
    """
    changes = list(changes)
    before = recipes.get(recipe, device)
    wanted = with_settings(before, changes)
    starter = isinstance(recipe, str) and same(recipe, recipes.STARTERS)
    own = wanted.model == before.model and not starter
    names = {find_field(setting.partition("=")[0].strip(), field_names()) or "" for setting in changes}
    if shape is None:
        return Asked(wanted, own, names, [])
    wanted = _with_room(recipe, wanted, changes, device, shape)
    needed = [] if own else model_settings.needed(wanted, shape, changes)
    return Asked(with_settings(wanted, needed), own, names, model_settings.warning(shape.name, needed))


def workable(target: "Target", wanted: Asked) -> Asked:
    """Change the fields that a refusal asks for, so that a search has a recipe to begin with.

    What the user has set stays, and is refused in the end.

    Args:
        target: the model and the hardware.
        wanted: a recipe that may be refused.
    """
    recipe, added = wanted.recipe, list[str]()
    for _ in range(MOST_ADVICE):
        try:
            target.resolve(recipe)
        except BadInput as error:
            free = [setting for setting in advice(str(error)) if setting.partition("=")[0] not in wanted.set]
            if not free or free[0] in added:
                break
            added.append(free[0])
            recipe = with_settings(recipe, free[:1])
        else:
            break
    warnings = [*wanted.warnings, *model_settings.warning(target.shape.name, added)]
    return replace(wanted, recipe=recipe, warnings=warnings)


MOST_ADVICE = 5
"""A search follows so many refusals, one after the other."""


def advice(refusal: str) -> list[str]:
    """Return the settings that a refusal names as a way out, the first one first: ``["tricks.attention=eager"]``."""
    way_out = refusal.rpartition(";")[2]
    return ["=".join(found) for found in re.findall(r"\b([a-z]+\.[a-z_]+)=([\w-]+)", way_out)]


def _with_room(recipe: Named, wanted: Recipe, changes: list[str], device: Device, shape: Shape) -> Recipe:
    """Return the recipe, or its smaller form if the user's settings need more memory than this card has.

    Some recipes save less memory on a card with room for their own model and rows.
    """
    smaller = with_settings(recipes.get(recipe, replace(device, memory_bytes=0)), changes)
    if not changes or smaller == wanted:
        return wanted
    from cria_tricks.predict.toggles import Target  # it imports torch, and most recipes have one form only

    target = Target(shape, device)
    fits = target.works(wanted) and target.memory(wanted).verdict == "fits"
    return wanted if fits else smaller
