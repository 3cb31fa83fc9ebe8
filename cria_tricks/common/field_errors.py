"""Say what is wrong with a field of a recipe, and in which line of its file."""

import re
import reprlib
from collections.abc import Sequence

from pydantic import ValidationError

from cria_tricks.common.fields import a_group, unknown_field
from cria_tricks.common.names import nearest


def line_of(place: list[str], text: str) -> int:
    """Find the line of a TOML file that sets a field, or opens its table; 0 if there is none."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*(\[?)\s*([\w.\"'-]+)", line)
        if not found:
            continue
        names = [name.strip("\"'") for name in found[2].split(".")]
        if found[1]:  # the line opens a table: [train]
            table = names
            full = table
        else:
            full = [*table, *names]
        # One of the two names begins with the other. But a line that opens the table around a field does not set it.
        if full[: len(place)] == place[: len(full)] and (len(full) >= len(place) or not found[1]):
            return number
    return 0


def in_one_line(error: ValidationError, known: Sequence[str]) -> str:
    """Say in one line, in our words instead of pydantic's, which field is wrong first, and what would be right.

    Args:
        error: what pydantic found.
        known: every field of a recipe, dotted.
    """
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_field(key, known, is_table=isinstance(first["input"], dict))
    message = first["msg"].replace("Input should be", "must be").replace("Value error, ", "").replace("'", "")
    near = ""
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        allowed = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        close = nearest(first["input"], allowed)
        if close:
            near = f"; did you mean {close}?"
    if first["type"] in ("too_short", "string_too_short"):
        message = "must not be empty"
    if first["type"] == "model_type":
        return f"{key} = {reprlib.repr(first['input'])}: {a_group(key, known)}"
    return f"{key} = {reprlib.repr(first['input'])}: {message[0].lower()}{message[1:]}{near}"
