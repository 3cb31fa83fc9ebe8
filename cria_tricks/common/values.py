"""Convert values of a recipe's fields from the way they are typed, in a file or behind ``--set``."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo


def seconds(value: Any) -> Any:
    """Convert ``"1h30m"``, ``"20m"``, ``"90s"`` or ``"90"`` to seconds; leave a value that is no text to pydantic."""
    if not isinstance(value, str):
        return value
    # Every part may be missing, but not all of them: (?=.) asks for one character at least.
    parts = re.fullmatch(r"(?=.)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", value.replace(" ", ""))
    if parts:
        return float(sum(int(number or 0) * unit for number, unit in zip(parts.groups(), (3600, 60, 1), strict=True)))
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a time such as 90s, 20m or 1h30m") from None


Duration = Annotated[float, BeforeValidator(seconds)]
"""Seconds; written as ``"90s"``, ``"20m"`` or ``"1h30m"``, or as a number."""


def parts(text: str) -> list[str]:
    """Split a list as it is typed: ``"[q_proj, v_proj]"`` -> ["q_proj", "v_proj"]."""
    found = [part.strip(" \"'") for part in text.strip("[] ").split(",")]
    return [part for part in found if part]


def _words(value: Any) -> Any:
    """Convert ``"none"`` to (), ``"tensorboard"`` to ("tensorboard",), and a list to a tuple."""
    words = value
    if isinstance(words, str):
        words = (words,)
    if isinstance(words, list):
        words = tuple(words)
    if words == ("none",):
        return ()
    return words


Trackers = Annotated[tuple[Literal["tensorboard", "trackio"], ...], BeforeValidator(_words)]
"""The trackers that get the history during the run: ``"none"``, one name, or a list of names."""


def _switch_or_number(value: Any, info: ValidationInfo, number_of: str) -> Any:
    """Convert ``"true"``, ``"false"`` or ``"8"``, as ``--set`` gives them, and 0 to False; take no other value."""
    found = value
    if isinstance(value, str) and info.mode == "python":  # in a file, which has types, a text is wrong
        text = value.strip().lower()
        found = {"true": True, "false": False}.get(text, text)
        if text.isdecimal() and len(text) <= 9:
            found = int(text)
    # type() and not isinstance(), because True is an int, too.
    if type(found) is int and 0 <= found < 10**9:
        return found or False
    if type(found) is bool:
        return found
    raise ValueError(f"must be true, false, or the number of {number_of}, 0 or more")


def _all_or_number(value: Any, info: ValidationInfo) -> Any:
    return _switch_or_number(value, info, "blocks")


def _auto_or_tokens(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return True
    return _switch_or_number(value, info, "tokens of a tile")


AllOrNumber = Annotated[bool | int, BeforeValidator(_all_or_number)]
"""true for all, false for none, or a number of blocks. 1 is one block and not true; 0 is read as false."""

AutoOrTokens = Annotated[bool | int, BeforeValidator(_auto_or_tokens)]
"""true (or auto) for tiles as long as the model is wide, false for none, or a number of tokens; 0 is read as false."""
