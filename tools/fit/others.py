"""Look at other choices than the one that was made: what each would change, which cannot be, and which one fits.

This takes seconds in a browser. So it is done in small steps, and the page can ask something else between two of them.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.predict.toggles import Change, Setting
from cria_tricks.run import search
from cria_tricks.run.search import NothingFits, Steps
from tools.fit import ways
from tools.fit.answers import Asked, Choice, asked
from tools.fit.fields import BY_NAME, MODELS, OF_SETTING, SWITCHES, TARGETS, as_text

LISTS: Mapping[str, Iterable[str]] = {"model": MODELS, "card": GPUS, "targets": TARGETS}
"""The lists of the page beside the switches, of which some values may be impossible."""
ADVICE = re.compile(r"(?:set|use) ([a-z_.]+)=([\w-]+)")
"""How a refusal ends: with what can be set in place of what was refused."""


def beside(choice: Choice) -> Steps[dict[str, Any]]:
    """Say for each value of each switch what it would change, or why it cannot be; and the longest row that fits.

    Returns:
        ``values``: name -> value -> ``refused`` (the reason), or ``saved_bytes`` and ``slowdown`` as in ``cria plan``;
        ``also`` names switches that would have to go as well, and whose bytes and seconds are counted; ``instead`` is a
        value of another field with which a refused one would work. Of models, cards and LoRA's targets only the refused
        are there. ``longest``: tokens; ``None`` if the choice is refused. ``context``: the model's longest row
        [tokens]; 0 if not known.
    """
    of = asked(choice)
    works = of.target.works(of.recipe)
    now = of.target.bill(of.recipe) if works else None
    found: dict[str, dict[str, Any]] = {name: {} for name in (*LISTS, *SWITCHES)}
    for name in SWITCHES:
        for value in BY_NAME[name].values:
            if value != as_text(getattr(of.recipe.tricks, name)):
                yield 0, 0
                found[name][value] = _changed(of, now, name, value)
    if not works:
        return {"values": found, "longest": None, "context": 0}
    for change in toggles.removed(of.target, of.recipe):
        name = change.set.partition("=")[0]
        if name in SWITCHES:
            off = as_text(getattr(type(of.recipe.tricks)(), name))
            also = [setting.partition("=")[0] for setting in change.beside]
            found[name][off] = {"saved_bytes": -change.saved_bytes, "slowdown": _inverse(change), "also": also}
    yield 0, 0
    longest = toggles.longest(of.target, of.recipe)
    for name, values in LISTS.items():
        for value in values:
            yield 0, 0
            if value != choice[name] and (reason := refusal({**choice, name: value})):
                found[name][value] = {"refused": reason}
    for name, others in found.items():
        for value, one in others.items():
            if "refused" in one:
                yield 0, 0
                others[value] = _with_way_out({**choice, name: value}, name, one)
    return {"values": found, "longest": longest, "context": of.target.shape.context}


def refusal(choice: Choice) -> str:
    """Return why a choice cannot be; empty if it can."""
    try:
        of = asked(choice)
        of.target.resolve(of.recipe)
    except BadInput as error:
        return str(error)
    return ""


def _with_way_out(refused: Choice, name: str, one: dict[str, Any]) -> dict[str, Any]:
    """Add to a refused value what else could be set so that it works, if its refusal says so."""
    whole = {**refused, "chunked_loss": "false"}
    if name == "model" and find_shape(refused["model"]).beside_head and not refusal(whole):
        return {"also": ["chunked_loss"]}  # cria plan, too, switches it off where nobody asked for it
    for setting, value in ADVICE.findall(one["refused"]):
        other = OF_SETTING.get(setting, name)
        if other != name and not refusal({**refused, other: value}):
            return one | {"instead": {other: value}}
    return one


def _inverse(change: Change) -> float | None:
    return 1 / change.slowdown if change.slowdown else None


def _changed(of: Asked, now: Setting | None, name: str, value: str) -> dict[str, Any]:
    """Say what one other value of a switch would change."""
    parsed: Any = {"true": True, "false": False}.get(value, value)
    recipe = toggles.with_toggles(of.recipe, {name: parsed})
    try:
        plan = of.target.resolve(recipe)
    except BadInput as error:
        return {"refused": str(error)}
    if now is None:
        return {"mends": True}
    change = Change(name, (), now, of.target.bill(recipe, name))
    new = [words for words in plan.warnings if words not in of.target.resolve(of.recipe).warnings]
    return {"saved_bytes": change.saved_bytes, "slowdown": change.slowdown, "says": new[0] if new else ""}


def nearest(choice: Choice, keep: Collection[str]) -> Steps[dict[str, str]]:
    """Search the fewest changes with which a choice fits, or at least tightly; return the fields that differ, if any.

    Args:
        choice: what is wanted.
        keep: fields of a recipe that stay as they are.
    """
    of = asked(choice)
    try:
        (found, *_), _ = yield from search.in_steps(of.target, of.recipe, search.NEAREST, of.lengths, keep=keep)
        return ways.changes_of(found.set)
    except NothingFits as error:
        tight = of.target.memory(error.smallest).fits
        return ways.changes_of(search.differences(of.recipe, error.smallest)) if tight else {}


def searched(choice: Choice, aim: str) -> Steps[dict[str, Any]]:
    """Search the switches with which a choice fits.

    Args:
        choice: what is wanted.
        aim: ``fit``: the fewest changes with which it fits; or an aim of :mod:`cria_tricks.run.search`.

    Returns:
        ``changes``, the fields that differ, and ``set``, the same as ``--set`` takes it; or, if no set of switches
        fits, what :func:`tools.fit.ways.nothing_fits` returns.

    Raises:
        BadInput: for a choice that the package refuses.
    """
    of = asked(choice)
    if aim == "fastest" and of.target.card is None:
        raise BadInput("The speed of this card is not known, so we cannot say which set of switches is faster.")
    try:
        aim = search.NEAREST if aim == "fit" else aim
        (found, *_), _ = yield from search.in_steps(of.target, of.recipe, aim, of.lengths)
    except NothingFits as error:
        return ways.nothing_fits(choice, of, error)
    return {"changes": ways.changes_of(found.set), "set": list(found.set)}
