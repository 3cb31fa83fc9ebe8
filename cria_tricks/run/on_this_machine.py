"""Find the recipe that trains on this machine: with its precision and, for ``--fit``, with what a search finds."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput
from cria_tricks.data import lengths
from cria_tricks.hardware import this_device
from cria_tricks.hardware.gpus import this_host
from cria_tricks.kwanzaa import augment
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.predict.evaluation import rows_of
from cria_tricks.predict.toggles import Target
from cria_tricks.processes import numbers
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import search
from cria_tricks.run.asked import Asked, asked, workable


def recipe(
    named: Recipe | str | Path,
    changes: list[str],
    model: str,
    fit: str,
    may_change: list[str],
    console: Console | None,
) -> Recipe:
    """Return the recipe for this machine, and print what was changed in it.

    Args:
        named: a recipe, its name, or its file.
        changes: the user's settings.
        model: the changed recipe's model.
        fit: the aim of a search; empty for none.
        may_change: switches that the search may also change.
        console: where it is printed, in the main process only; standard error when left out.

    Raises:
        BadInput: for a name or a setting that is wrong; for a search also, if its aim is not known or the model cannot
            be estimated.
        NothingFits: if no set of switches fits.
    """
    try:
        shape = find_shape(model)
    except BadInput:
        if fit:
            raise
        shape = None  # a type that cannot be estimated may train all the same
    wanted = asked(named, changes, this_device(), shape)
    if fit and shape:  # without a shape it was refused
        wanted = _fitted(wanted, shape, fit, may_change)
    if not numbers.rank():
        for line in wanted.warnings:
            (console or Aside()).print(line, markup=False)
    return wanted.recipe


def _fitted(wanted: Asked, shape: Shape, fit: str, may_change: Iterable[str]) -> Asked:
    """Return the recipe with the switches that a search finds for this machine; it also says which."""
    target = Target(shape, this_device(), numbers.processes(), this_host())
    wanted = workable(target, wanted)
    found_lengths = lengths.read(wanted.recipe, augment.of(wanted.recipe))
    target = replace(target, evaluated=rows_of(found_lengths, wanted.recipe))
    # Rows are trained as long as they are, so a shorter data.max_length is for the estimate only.
    estimated = lengths.as_long_as(found_lengths.longest, wanted.recipe)
    found = search.search(target, estimated, fit, found_lengths, may_change, wanted.set)
    changed = with_settings(wanted.recipe, found.chosen.set)
    return replace(wanted, recipe=changed, warnings=[*wanted.warnings, search.in_words(found)])
