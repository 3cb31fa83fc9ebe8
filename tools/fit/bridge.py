"""Carry the questions of the page "Will it fit?" to :mod:`tools.fit.answers`, and the answers back, as JSON."""

import json
from collections.abc import Generator
from typing import Any

from cria_tricks.run.search import Steps, whole
from tools.fit import answers, others, show
from tools.fit.answers import Choice
from tools.fit.fields import BEST, BY_NAME
from tools.fit.words import plain


def steps(job: str, given: str) -> Generator[str, None, str]:
    """Do a job of the page in small steps; ``fit-worker.js`` calls this, and listens for other questions in between.

    Args:
        job: ``answer``, ``beside`` or ``search``.
        given: its arguments as JSON.

    Yields:
        How many of how many sets of switches were tried, as JSON.
    """
    jobs: Any = {"answer": answer, "beside": beside, "search": search}
    work = jobs[job](**json.loads(given))
    while True:
        try:
            yield json.dumps(next(work))
        except StopIteration as end:
            return json.dumps(end.value, allow_nan=False)


def call(job: str, given: str) -> str:
    """Do a job to its end."""
    return whole(steps(job, given))


def answer(choice: Choice, pinned: Choice | None = None) -> Steps[dict[str, Any]]:
    """Answer for a choice, and for one that was pinned beside it: numbers, HTML and commands.

    Where the choice does not fit and the reader wants a set that does, such a set is searched, or one that fits
    tightly. ``changes`` are the fields that differ then.
    """
    changes: dict[str, str] = {}
    try:
        found = answers.answer(choice)
        if choice["set"] == BEST and found["verdict"] != "fits":
            given = [setting.partition("=")[0] for setting in answers.asked(choice).settings]
            changes = yield from others.nearest(choice, given)
            choice = {**choice, **changes}
            found = answers.answer(choice)
    except answers.REFUSALS as error:
        return _refused(choice, str(error))
    packing = choice["packing"] == "true"
    html = show.whole(found, packing)
    if pinned:
        try:
            html = show.pair(answers.answer(pinned), found, packing)
        except answers.REFUSALS as error:
            return {"refused": f"A: {error}", "says": f"A: {plain(str(error))}", "at": []}
    commands = {verb: answers.command(choice, verb) for verb in ("plan", "train")}
    return {"data": found, "html": html, "commands": commands, "changes": changes}


def beside(choice: Choice) -> Steps[dict[str, Any]]:
    """Say what each value of each switch would change, in words, and which row is the longest that fits."""
    try:
        found = yield from others.beside(choice)
    except answers.REFUSALS:
        return {"values": {}, "longest": None, "context": 0}
    for name, values in found["values"].items():
        for value, one in values.items():
            if "saved_bytes" in one:
                one |= show.hint(BY_NAME[name], value, one)
            if "refused" in one:
                one["why"] = plain(one["refused"])
            if "says" in one:
                one["says"] = plain(one["says"])
    return found


def search(choice: Choice, aim: str) -> Steps[dict[str, Any]]:
    """Search switches with which a choice fits."""
    try:
        return (yield from others.searched(choice, aim))
    except answers.REFUSALS as error:
        return _refused(choice, str(error))


def _refused(choice: Choice, message: str) -> dict[str, Any]:
    """Say why a choice cannot be: in the package's words, in those of the form, and at which fields."""
    return {"refused": message, "says": plain(message), "at": answers.fields_in(message, choice)}
