"""Check the arguments of a command before it imports torch, so that it reports wrong names, rows or folders at once."""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from cria_tricks import models, recipes
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.data import rules as data_settings
from cria_tricks.data import sources
from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.store import run_folder


def recipe(wanted: Recipe | str | Path, changes: Iterable[str], device: Device | None = None) -> Recipe:
    """Find a recipe, change it as with ``--set``, and check its names and its data settings.

    A named recipe chooses its precision for a device. Only torch can tell this machine's device, so if none is given,
    the recipe is made for a T4. For these checks it makes no difference.

    Raises:
        BadInput: naming the first thing that is wrong.
    """
    found = with_settings(recipes.get(wanted, device or T4), changes)
    if found.lora.continue_from and Path(found.model).is_absolute() and not Path(found.model).exists():
        raise BadInput(
            f"lora.continue_from={found.lora.continue_from}: was trained over the folder {found.model}, which is not "
            "there; name the folder of that base with --set model=DIR"
        )
    models.refuse_unknown(found.model)
    data_settings.refuse(found)
    return found


def training(wanted: Recipe, out: str | Path | None, resume: bool, other_base: bool = False) -> None:
    """Check what a run would read, write and need.

    Args:
        wanted: the recipe.
        out: the run's folder, if it was given.
        resume: whether the run continues from a checkpoint in this folder.
        other_base: whether a resumed run, or one that continues from an adapter, may have another base model.

    Raises:
        BadInput: if the model, the first rows or the folder cannot be used, a library is not installed, or
            ``other_base`` is set for any other run.
    """
    if other_base and not resume and not wanted.lora.continue_from:
        raise BadInput(
            "--other-base: is for a resumed run, and for one that continues from an adapter; give --resume too, or "
            "leave it out"
        )
    _refuse_missing_trackers(wanted.train.report_to)
    data_settings.refuse_missing_libraries(wanted.data)
    sources.glance(wanted.data.train, "train")
    if wanted.data.eval:
        sources.glance(wanted.data.eval, "eval")
    if out:
        run_folder.refuse_taken("--out", usable_path("--out", out), resume)
    models.refuse_out_of_reach(wanted.model)


def _refuse_missing_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker (``train.report_to``) whose library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise BadInput(
                f"train.report_to={name}: the package {name} is not installed; pip install 'cria_tricks[monitor]', or "
                "leave it out"
            )
