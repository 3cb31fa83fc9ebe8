"""Plan, estimate and film from Python; ``run/train.py`` trains.

Each function takes a recipe in any of three forms: a ``Recipe``, the name of one (``"kwanzaa"``), or the path of a
``.toml`` file. The heavy libraries are imported when a function is called, not before.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, Device, this_device
from cria_tricks.hardware.cards import Host
from cria_tricks.hardware.gpus import find_gpu, this_host
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.recipe import Recipe, several, with_settings
from cria_tricks.run.asked import Asked, Named, asked, named, workable

if TYPE_CHECKING:
    from cria_tricks.bill.bill import Bill
    from cria_tricks.data.lengths import Lengths
    from cria_tricks.predict.answer import PlanAnswer
    from cria_tricks.predict.toggles import Target
    from cria_tricks.report.film_answer import FilmAnswer
    from cria_tricks.run.search import Found


BEST = "best"
"""The search of a plan for which nobody named an aim."""
HERE = "here"
"""What ``gpu`` may be for this machine."""
ALL = "all"
"""What ``--gpu`` may be for all machines that can be rented or are free."""


def plan(
    recipe: Recipe | str | Path,
    *,
    gpu: str | Device | None = None,
    model: str | None = None,
    settings: Iterable[str] = (),
    rows: int | None = None,
    nproc: int = 1,
    dry_run: bool = False,
    advise: bool = False,
    longest: bool = False,
    rows_full: bool = False,
    fit: str = "",
    may_change: Iterable[str] = (),
    as_is: bool = False,
) -> "PlanAnswer":
    """Estimate what a recipe needs on a card, and explain it, without loading any weights.

    The estimate takes the row lengths of the recipe's data, if the data and the tokenizer are files on this machine.
    Otherwise it takes every row as ``data.max_length`` tokens long. ``answer.lengths`` says which.

    Args:
        recipe: a recipe, the name of one, or the path of a ``.toml`` file; or a model, for the recipe ``qlora``.
        gpu: a short name such as ``"t4"`` or ``"t4x2"`` (two of them), an amount of memory such as ``"8GiB:7.5"`` (with
            the compute capability, 8.6 if left out), ``"here"``, or a ``Device``; else this machine's card, or a T4.
        model: another model than the recipe's: a short name, a hub id, a folder or a ``config.json``.
        settings: changes of the recipe, written as for ``--set``, e.g. ``["seq=4096", "tricks.packing=true"]``.
        rows: the number of training rows, for ``prices``; when left out, as many as were read with the lengths.
        nproc: the number of processes, with one card each; ``ddp`` if the recipe names no strategy.
        dry_run: count the bytes in a step of the real modules on tensors without data.
        advise: try all switch sets; the answer then has ``front``.
        longest: find the longest row that fits; the answer then has ``longest``.
        rows_full: take every row as ``data.max_length`` tokens long, whatever the data.
        fit: ``fastest``, ``smallest`` or ``longest``: answer for the switches that a search finds best for this aim.
        may_change: switches that this search may also change, although they change results, e.g. ``["quantization"]``.
        as_is: answer for the recipe's own switches. Otherwise, with another model than the recipe's, and for the
            recipes that are a start for your own, the answer is for the set of switches that is best on this card.

    Raises:
        BadInput: for an unknown name, a switch that cannot work on the card, or a row that training would refuse.
        OutOfMemory: if no set of switches fits.

    Examples:
        >>> answer = plan("kwanzaa", gpu="t4", rows=107)
        >>> answer.prices[0].flavor, answer.verdict
        ('t4-small', 'fits')
    """
    recipe, changes = named(recipe, model, several(settings))
    device, nproc = _device(gpu, nproc)
    wanted, shape, device = find_wanted(recipe, changes, device)
    host = _host(gpu)  # names are checked by now; this machine's card is looked up with torch
    # It imports numpy and torch, which takes seconds; errors in names were raised above.
    from cria_tricks.predict.toggles import Target

    target = Target(shape, device, nproc, host)
    aim = aim_of(wanted, fit, as_is)
    target, wanted, found_lengths, fitted = searched(target, wanted, rows_full, aim, several(may_change))
    rows = (found_lengths.rows or None) if rows is None else rows
    asked = {"dry": dry_run, "advise": advise, "longest": longest, "rows": rows}
    return _answered(target, wanted, found_lengths, asked, fitted)


def film(
    recipe: Recipe | str | Path,
    *,
    gpu: str | Device | None = None,
    model: str | None = None,
    settings: Iterable[str] = (),
    say: Callable[[str], None] = lambda part: None,
) -> "FilmAnswer":
    """Record an optimizer step on tensors without data, as a film: every tensor with its birth and its death.

    It takes some ten seconds, and no weight is loaded. All rows are taken as ``data.max_length`` tokens long.

    Args:
        recipe: a recipe, the name of one, or the path of a ``.toml`` file.
        gpu: one card, as for :func:`plan`.
        model: as for :func:`plan`.
        settings: changes of the recipe, written as for ``--set``.
        say: is told the name of each part of the step when it begins.

    Raises:
        BadInput: as :func:`plan`, for several cards, and for a model that a dry run cannot run.

    Examples:
        >>> film("kwanzaa", gpu="t4").write("film.html")  # doctest: +SKIP
    """
    recipe, changes = named(recipe, model, several(settings))
    device, cards = _device(gpu, 1)
    if cards > 1:
        raise BadInput(f"--gpu {gpu}: a film is of one card")
    wanted, shape, device = find_wanted(recipe, changes, device)
    # It imports numpy and torch, which takes seconds; errors in names were raised above.
    from cria_tricks.predict.toggles import Target
    from cria_tricks.report import film_answer

    return film_answer.answer(Target(shape, device), wanted.recipe, say)


def aim_of(wanted: Asked, fit: str, as_is: bool) -> str:
    """Return the aim of a plan's search; empty if the plan is for the recipe's own switches."""
    if fit:
        return fit
    return "" if as_is or wanted.own else BEST


def searched(
    target: "Target", wanted: Asked, rows_full: bool, aim: str, may_change: list[str]
) -> tuple["Target", Asked, "Lengths", "Found | None"]:
    """Read the lengths of the rows, and search the best switches if there is an aim.

    Several processes share the rows (``ddp``) if the recipe names no strategy.

    Returns:
        The target with the evaluation rows, the recipe, the lengths, and what was found.
    """
    from cria_tricks.data import lengths
    from cria_tricks.kwanzaa import augment
    from cria_tricks.predict.evaluation import rows_of
    from cria_tricks.run import search

    if target.processes > 1 and wanted.recipe.parallel.strategy == "none":
        wanted = replace(wanted, recipe=with_settings(wanted.recipe, ["parallel.strategy=ddp"]))
    if aim:
        wanted = workable(target, wanted)
    target.resolve(wanted.recipe)  # raises for a setting that cannot work, before the data is read
    if rows_full:
        found = lengths.full(wanted.recipe, "--rows-full")
    else:
        found = lengths.read(wanted.recipe, augment.of(wanted.recipe))
    target = replace(target, evaluated=rows_of(found, wanted.recipe))
    recipe = lengths.as_long_as(found.longest, wanted.recipe)
    if not aim:
        return target, replace(wanted, recipe=recipe), found, None
    if aim == BEST:
        fitted = search.whole(search.best_in_steps(target, recipe, found, wanted.set))
    else:
        fitted = search.search(target, recipe, aim, found, may_change, wanted.set)
    return target, replace(wanted, recipe=fitted.chosen.recipe), search.lengths_of(fitted, found), fitted


def _answered(
    target: "Target", wanted: Asked, lengths: "Lengths", asked: dict[str, Any], fitted: "Found | None"
) -> "PlanAnswer":
    from cria_tricks.predict import plan_data
    from cria_tricks.run import search

    found = plan_data.answer(target, wanted.recipe, lengths, **asked)
    suggestions = found.suggestions
    if found.verdict != "fits" and not any(one.fits for one in suggestions):
        more = search.more_suggestions(target, wanted.recipe, lengths, fitted)
        suggestions = [*suggestions, *plan_data.suggestions(target, wanted.recipe, more)]
    warnings = [*wanted.warnings, *found.warnings]
    found = replace(found, warnings=warnings, suggestions=suggestions)
    return replace(found, fit=fitted.for_plan) if fitted else found


def estimate(
    recipe: Recipe | str | Path,
    *,
    gpu: str | Device | None = None,
    settings: Iterable[str] = (),
) -> "Bill":
    """Estimate the memory of a run in one process, with formulas, for rows of ``data.max_length`` tokens.

    With ``rows_full=True``, :func:`plan` gives the same bytes with an explanation, comparisons and times. This function
    returns the object that :func:`plan` counts with; each technique fills in its part.

    Args:
        recipe: a recipe, the name of one, or the path of a ``.toml`` file.
        gpu: as for :func:`plan`.
        settings: changes of the recipe, written as for ``--set``.

    Raises:
        BadInput: for a name that is not known, or a switch that cannot work on the card.

    Examples:
        >>> memory = estimate("kwanzaa", gpu="t4")
        >>> memory.fits, memory.needed_bytes == plan("kwanzaa", gpu="t4").needed_bytes
        (True, True)
    """
    asked_for, shape, device = find_wanted(recipe, several(settings), _device(gpu, 1)[0])
    wanted = asked_for.recipe
    # They import torch, which takes seconds; errors in names were raised above.
    from cria_tricks.predict.toggles import Target

    target = Target(shape, device)
    target.resolve(wanted)  # raises for a setting that cannot work there
    return target.memory(wanted)


def _host(gpu: str | Device | None) -> Host | None:
    """Return the machine around the card that was named: this one if none was and it has a card; else a T4's."""
    if isinstance(gpu, Device):
        return None
    here = gpu is not None and gpu.strip().lower() == HERE
    if here or (gpu is None and this_device().kind == "cuda"):
        return this_host()
    return find_gpu(gpu or "t4").host


def _device(gpu: str | Device | None, processes: int) -> tuple[Device | None, int]:
    """Find the card that was named, and the number of processes: one for each card, where several were named."""
    if processes < 1:
        raise BadInput(f"nproc={processes}: must be a whole number above 0")
    if not isinstance(gpu, str):
        return gpu, processes
    if gpu.strip().lower() == HERE:
        return this_device(), processes
    if gpu.strip().lower() == ALL:
        raise BadInput(
            f"gpu={ALL}: this is about one machine; name it, such as t4; cria plan RECIPE --gpu {ALL} compares all"
        )
    found = find_gpu(gpu)
    if found.count == 1:
        return found.device, processes
    if processes not in (1, found.count):
        raise BadInput(f"--gpu {gpu} with --nproc {processes}: it has {found.count} cards; leave --nproc out")
    return found.device, found.count


def find_wanted(recipe: Named, changes: list[str], card: Device | None) -> tuple[Asked, Shape, Device]:
    """Find the changed recipe, the shape of its model, and the card.

    All names are checked before this machine's card is looked up, because that imports torch.
    """
    # Its checks of rows import numpy, and importing this package should stay quick.
    from cria_tricks.run import given

    shape = find_shape(given.recipe(recipe, changes, card).model)
    if card is None:
        here = this_device()
        card = here if here.kind == "cuda" else T4
    return asked(recipe, changes, card, shape), shape, card
