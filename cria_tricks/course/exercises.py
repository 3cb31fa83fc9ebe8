"""Check the answers to a lesson's exercises: each is right, wrong (with a hint), or not there yet."""

from collections.abc import Callable
from typing import Any

CHECKS: list[tuple[int, str, str]] = []
"""The exercises checked in this process: number, verdict (``right``, ``no`` or ``not yet``), and the printed text."""


def check(exercise: int, answer: Any, grade: Callable[[Any], Any], returns: str = "") -> None:
    """Print whether an answer to an exercise is right, wrong (with a hint) or not there yet, in one line.

    Args:
        exercise: the exercise's number in the lesson.
        answer: the reader's answer; ``None`` until there is one.
        grade: checks the answer. It raises ``AssertionError`` with a hint if the answer is wrong, and
            ``NotImplementedError`` if there is none, for example if the reader's function returns nothing.
        returns: what a right answer is, with shape and units: ``"a number of MiB"``. If the answer is of another kind,
            this is the hint, so that a reader never sees a bare traceback.
    """
    found = "no"
    try:
        if answer is None:
            raise NotImplementedError
        grade(answer)
        found = said = "right"
    except NotImplementedError:
        found = said = "not yet"
        if callable(answer):
            said = "not yet, it returns nothing"
    except AssertionError as wrong:
        hint = str(wrong) or f"the answer is {returns}"
        said = f"no: {hint}"
    except Exception as error:  # whatever a reader's code does, the lesson goes on
        said = f"no: the answer is {returns} ({type(error).__name__}: {error})"
    CHECKS.append((exercise, found, said))
    print(f"{exercise}: {said}")


def about(
    right: float, hint: str, within: float = 0.01, mistakes: dict[float, str] | None = None
) -> Callable[[Any], None]:
    """Return a grading function for a number with a relative tolerance.

    Args:
        right: the right answer.
        hint: what is printed for a wrong number.
        within: the tolerance, as a share of the right answer.
        mistakes: wrong numbers that common mistakes lead to, each with a hint on that mistake.
    """

    def is_it(number: float, other: float) -> bool:
        return abs(number - other) <= within * abs(other)

    def grade(answer: Any) -> None:
        number = float(_number(answer))
        fitting = [its for wrong, its in (mistakes or {}).items() if is_it(number, wrong)]
        said = [*fitting, hint][0]
        assert is_it(number, right), f"not {number:,}; {said}"

    return grade


def equal(right: Any, hint: str = "") -> Callable[[Any], None]:
    """Return a grading function for an answer that must be exactly right; a number may be of any numeric type."""

    def grade(answer: Any) -> None:
        value = answer
        if isinstance(right, bool) and hasattr(answer, "item"):
            value = answer.item()  # of numpy or torch
        elif isinstance(right, int | float) and not isinstance(right, bool):
            value = _number(answer)
        if type(right) in (list, tuple, set, dict, str, bool) and not isinstance(value, type(right)):
            raise TypeError(f"this is a {type(value).__name__}")
        reason = f"; {hint}" if hint else ""
        assert value == right, f"not {value}{reason}"

    return grade


def _number(answer: Any) -> int | float:
    """Return a reader's number as an int or a float; it may also be an element of a torch or numpy array."""
    value = answer
    if hasattr(answer, "item"):
        value = answer.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"this is a {type(answer).__name__}, not a number")
    return value
