"""Take a reader's guess before the answer is shown, and say how far off it was."""

from typing import Any

from cria_tricks.course.notebook import shown

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
        return f"It is {_number(answer, unit)}. Your guess is no number: {guess!r}."
    if not guessed:
        return f"It is {_number(answer, unit)}."
    said = f"You said {_number(guessed, unit)}, it is {_number(answer, unit)}"
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


def _number(value: float, unit: str) -> str:
    """Write a number with three digits or more, and its unit."""
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".strip()
