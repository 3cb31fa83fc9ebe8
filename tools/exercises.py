"""What is done in a lesson's own kernel, before its first cell and after its last; see ``executed.py``."""

import socket
from typing import Any

from IPython.display import display

from cria_tricks import course
from cria_tricks.course.notebook import CHECKS
from tools import made_of, processors

MEASURED: list[list[str]] = []
"""What the lesson would measure on a card."""

VALUES = ("words", object(), {"a": 1}, lambda: 1)
"""Answers that are of the wrong kind where a value is asked for."""
FUNCTIONS = (
    5,
    "words",
    lambda: 1,
    lambda *given, **named: "words",
    lambda *given, **named: object(),
    lambda *given: 1 / 0,
)
"""Answers that are of the wrong kind where a function is asked for."""


def begin() -> None:
    """Refuse the network, multiply as on the processor that is asked for, and note what the lesson says of a GPU."""
    processors.multiply_as_held_to()
    socket.socket.connect = socket.socket.connect_ex = _refuse  # type: ignore[method-assign, assignment]
    on_a_gpu = course.on_a_gpu

    def noted(bench: str, off: str, on: str, shorter: int = 1) -> None:
        MEASURED.append([bench, off, on])
        on_a_gpu(bench, off, on, shorter)

    course.on_a_gpu = noted


def answer(shell: Any, asked: dict[str, Any]) -> None:
    """Hand over what the checks say: of the exercises as they stand, of the solutions and of each wrong answer."""
    found: dict[str, Any] = {"on a GPU": MEASURED, "as it stands": [list(check) for check in CHECKS]}
    if asked["checks"]:
        found |= try_answers(shell.user_ns, asked["checks"], asked["solutions"], asked["wrong"])
    found["used"] = made_of.used()
    display({"application/json": found}, raw=True)


def try_answers(names: dict[str, Any], checks: list[str], solutions: str, wrong: list[list[Any]]) -> dict[str, Any]:
    """Find what a lesson's checks say of its solutions, of wrong answers, and of answers of the wrong kind.

    Args:
        names: the lesson's variables after its last cell; each answer is removed from them again.
        checks: the cells that call ``course.check``.
        solutions: code that answers all exercises rightly.
        wrong: number of an exercise and code that answers it wrongly.

    Returns:
        ``solutions``: what was found for each exercise; ``wrong``: the same for each wrong answer, in its order;
        ``kinds``: for each exercise, the words that describe a right answer and what was found for each answer of the
        wrong kind.
    """
    kinds: dict[int, dict[str, Any]] = {}

    def of_the_wrong_kind(exercise: int, right: Any, grade: Any, returns: str = "") -> None:
        CHECKS.clear()
        for nonsense in FUNCTIONS if callable(right) else VALUES:
            check(exercise, nonsense, grade, returns)
        kinds[exercise] = {"exercise": exercise, "returns": returns, "found": [list(one) for one in CHECKS]}

    check = course.check
    found = {"wrong": [_found(names, checks, code, exercise)[0] for exercise, code in wrong]}
    found["solutions"] = _found(names, checks, solutions)
    _found(names, checks, solutions, instead=of_the_wrong_kind)
    return found | {"kinds": [kinds[exercise] for exercise in sorted(kinds)]}


def _found(
    names: dict[str, Any], checks: list[str], code: str, only: int | None = None, instead: Any = None
) -> list[list[Any]]:
    """Find what the checks say of a piece of code, for exercise ``only`` or for all; ``instead`` replaces the check."""
    before, check = dict(names), course.check

    def chosen(exercise: int, *rest: Any, **more: Any) -> None:
        if only in (None, exercise):
            (instead or check)(exercise, *rest, **more)

    CHECKS.clear()
    course.check = chosen
    try:
        exec(code, names)
        for cell in checks:
            exec(cell, names)
    finally:
        course.check = check
        names.clear()
        names.update(before)
    return [list(one) for one in CHECKS]


def _refuse(self: socket.socket, address: Any) -> None:
    raise AssertionError(f"a lesson went to {address}")
