"""Carry the questions of the page "Will it fit?" to :mod:`tools.fit.answers`, and the answers back, as JSON."""

import json
from collections.abc import Callable
from typing import Any

from tools.fit import answers, show
from tools.fit.answers import Choice


def call(job: str, given: str) -> str:
    """Do a job of the page; ``fit-worker.js`` calls this.

    Args:
        job: ``answer``, ``beside`` or ``search``.
        given: its arguments as JSON.
    """
    jobs: dict[str, Callable[..., dict[str, Any]]] = {"answer": answer, "beside": beside, "search": search}
    return json.dumps(jobs[job](**json.loads(given)), allow_nan=False)


def answer(choice: Choice, pinned: Choice | None = None) -> dict[str, Any]:
    """Answer for a choice, and for one that was pinned beside it: numbers, HTML and commands."""
    try:
        found = answers.answer(choice)
    except answers.REFUSALS as error:
        return {"refused": str(error), "at": answers.fields_in(str(error))}
    packing = choice["packing"] == "true"
    html = show.whole(found, packing)
    if pinned:
        try:
            html = show.pair(answers.answer(pinned), found, packing)
        except answers.REFUSALS as error:
            return {"refused": f"A: {error}", "at": []}
    commands = {verb: answers.command(choice, verb) for verb in ("plan", "train")}
    return {"data": found, "html": html, "commands": commands}


def beside(choice: Choice) -> dict[str, Any]:
    """Say what each value of each switch would change, in words, and which row is the longest that fits."""
    try:
        found = answers.beside(choice)
    except answers.REFUSALS:
        return {"switches": {}, "longest": None}
    for values in found["switches"].values():
        for one in values.values():
            if "saved_bytes" in one:
                one["words"] = show.saving(one)
    return found


def search(choice: Choice, aim: str) -> dict[str, Any]:
    """Search toggles with which a choice fits."""
    try:
        return answers.searched(choice, aim)
    except answers.REFUSALS as error:
        return {"refused": str(error), "at": answers.fields_in(str(error))}
