"""Checks of what a command was given, before it imports torch: a wrong name, row or folder is said within a second.

What passes here may still be refused later, by the function that uses it. Nothing here is the only check of anything.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from cria_tricks import artifact, folders, models, recipes
from cria_tricks.data import settings as data_settings
from cria_tricks.data import sources
from cria_tricks.errors import BadInput, usable_path
from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, with_settings


def recipe(wanted: Recipe | str | Path, changes: Iterable[str], device: Device | None = None) -> Recipe:
    """Find a recipe, change it, and look at its names; a named one is as for a T4 when no device is given.

    A named recipe chooses its precision for the device, and only torch can tell what this machine's is.

    Raises:
        BadInput: naming the first thing that is wrong.
    """
    found = with_settings(recipes.get(wanted, device or T4), changes)
    models.refuse_unknown(found.model)
    data_settings.refuse(found)
    return found


def training(wanted: Recipe, out: str | Path | None, resume: bool, other_base: bool = False) -> None:
    """Look at what a run would read and write.

    Raises:
        BadInput: if its model, its first rows or its folder cannot be used, or a library is not there.
    """
    if other_base and not resume:
        raise BadInput("--other-base: lets a resumed run go on over another base; give --resume too, or leave it out")
    trackers(wanted.train.report_to)
    sources.glance(wanted.data.train, "train")
    sources.glance(wanted.data.eval, "eval")
    if out:
        folders.refuse_taken("--out", usable_path("--out", out), resume)
    models.refuse_out_of_reach(wanted.model)


def trackers(names: Sequence[str]) -> None:
    """Refuse a library for the history that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise BadInput(
                f"train.report_to={name}: the package {name} is not installed; pip install 'cria_tricks[monitor]', or "
                "leave it out"
            )


def adapter(
    folder: str | Path, base: str | Path | None = None, look_at_base: bool = True, other_base: bool = False
) -> Path:
    """Look at the folder of an adapter or of a whole model.

    Args:
        folder: as it was given.
        base: where its base lies now, if not where it says.
        look_at_base: whether the base that an adapter names must be there, or to be had.
        other_base: whether another base than it was trained over may be used.

    Raises:
        BadInput: if it is none, is damaged or not safe to read, or its base cannot be had.
    """
    path = usable_path("adapter", folder)
    artifact.refuse_another(path)
    if named := artifact.named_base(path):
        artifact.refuse_unsafe(path)
        if look_at_base and not base:
            artifact.refuse_moved_base(path, named)
        if look_at_base:
            models.refuse_out_of_reach(str(base or named))
    elif (base or other_base) and artifact.is_whole(path):
        option = f"--base {base}" if base else "--other-base"
        raise BadInput(f"{option}: {path} is a whole model and has no base below it; leave {option.split()[0]} out")
    return path
