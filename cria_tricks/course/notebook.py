"""Show things in a notebook, take a reader's guesses, check answers, and run commands of ``cria`` in a cell.

A lesson also runs as a plain script. A guess is taken before the answer is shown. The answer to an exercise is right,
wrong (with a hint), or not there yet.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

CRIA = (sys.executable, "-m", "cria_tricks")


def shown(data: dict[str, Any]) -> bool:
    """Show an output in a notebook, and return whether it was shown.

    Args:
        data: the output in several formats, by MIME type; a notebook takes the richest that it knows.
    """
    try:
        # Imported here, because a lesson also runs as a plain script on a machine without IPython.
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return False
    if get_ipython() is None:
        return False
    display(data, raw=True)
    return True


def show_table(text: str) -> None:
    """Show a Markdown table as a table, or print it where there is no notebook."""
    if not shown({"text/markdown": text, "text/plain": text}):
        print(text)


def cria(*arguments: object, right: int = 0) -> str:
    """Run a command and show what it says, as it comes.

    Args:
        arguments: words of the command, as they would follow ``cria`` in a terminal.
        right: the exit code that is expected.

    Returns:
        What the command said.

    Raises:
        RuntimeError: if the exit code is another one.
    """
    words = [str(argument) for argument in arguments]
    print("$ cria", shlex.join(words))
    process = subprocess.Popen(
        [*CRIA, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", env=_plain()
    )
    assert process.stdout
    said = ""
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            said += line
    except KeyboardInterrupt:  # the stop button; cria heard it too, and saves before it ends
        process.wait()
        raise
    if process.wait() != right:
        raise RuntimeError(f"cria {words[0]} ended with exit code {process.returncode}; its last line says why")
    return said


def ask(*arguments: object) -> dict[str, Any]:
    """Run a command for its answer as data."""
    words = [*CRIA, *map(str, arguments), "--json"]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, env=_plain(), check=True).stdout)


def _plain() -> dict[str, str]:
    """Return an environment without colours: a notebook is no terminal, and a bar would be drawn over and over."""
    return os.environ | {"FORCE_COLOR": ""}


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


PREDICTION = "application/vnd.cria.prediction+json"
"""The MIME type under which the site finds an answer, which it hides until the reader has guessed."""
NO_GUESS = "no guess"
"""What a form with choices says before the reader chooses."""
FACTOR = 2
"""From here on a guess is off by a factor, below it by per cent."""


def reveal(guess: float | str | None, answer: float | str, unit: str = "") -> None:
    """Print the answer to a prediction, and how far the reader's guess was from it.

    Args:
        guess: the reader's guess, from the form cell before; 0, None or "no guess" until there is one.
        answer: what the lesson counted: a number, or one of the form's choices.
        unit: the unit of both numbers, e.g. ``MiB``.
    """
    if not isinstance(answer, str):
        answer = float(answer)
    said = verdict(guess, answer, unit)
    if not shown({"text/plain": said, PREDICTION: {"answer": answer, "unit": unit}}):
        print(said)


def verdict(guess: Any, answer: float | str, unit: str = "") -> str:
    """Say in one sentence what the answer is, and how far a guess was from it.

    The page's script says the same (``docs/assets/predictions.js``); a test compares them.
    """
    if isinstance(answer, str):
        if not guess or guess == NO_GUESS:
            return f"The answer: {answer}."
        return f"You said {guess}, which is right." if guess == answer else f"You said {guess}, the answer is {answer}."
    try:
        guessed = float(guess or 0)
    except (TypeError, ValueError):  # a reader may write anything into a cell
        return f"It is {_in_words(answer, unit)}. Your guess is no number: {guess!r}."
    if not guessed:
        return f"It is {_in_words(answer, unit)}."
    said = f"You said {_in_words(guessed, unit)}, it is {_in_words(answer, unit)}"
    return f"{said}: {off}." if (off := _off(guessed, answer)) else f"{said}."


def _off(guess: float, answer: float) -> str:
    """Say how far off a guess is, in per cent or as a factor; nothing where neither means anything."""
    if not answer or guess / answer <= 0:
        return ""
    ratio = guess / answer
    way = "too high" if abs(guess) > abs(answer) else "too low"
    if max(ratio, 1 / ratio) > FACTOR:
        return f"{way} by a factor of {max(ratio, 1 / ratio):,.1f}"
    return f"{abs(ratio - 1):.0%} {way}" if abs(ratio - 1) >= 0.005 else "right"


def _in_words(value: float, unit: str) -> str:
    """Write a number with three digits or more, and its unit."""
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".strip()
