"""The checks of a lesson's exercises: right, wrong with a hint, or not there yet."""

from collections.abc import Callable
from typing import Any

CHECKS: list[tuple[int, str, str]] = []
"""The exercises that were checked in this process: number, ``right``, ``no`` or ``not yet``, and the words said."""


def check(exercise: int, answer: Any, grade: Callable[[Any], Any], returns: str = "") -> None:
    """Print whether an answer to an exercise is right, wrong (with a hint) or not there yet, in one line.

    Args:
        exercise: its number in the lesson.
        answer: ``None`` until there is one.
        grade: raises ``AssertionError`` with a hint for a wrong answer, ``NotImplementedError`` for none, as when a
            function of the reader's returns nothing.
        returns: what a right answer is, with shape and units: ``"a number of MiB"``. It is the hint where the answer is
            of another kind, so that a reader never meets a bare traceback.
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
    """Make a grade for a number: an answer is right within a share of it.

    Args:
        right: the answer.
        hint: what is printed for a wrong number.
        within: the share.
        mistakes: wrong numbers that a known mistake leads to, each with the hint that fits it better.
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
    """Make a grade for an answer that is right or wrong, with nothing between; a number may be of any numeric type."""

    def grade(answer: Any) -> None:
        value = answer
        if isinstance(right, int | float) and not isinstance(right, bool):
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
