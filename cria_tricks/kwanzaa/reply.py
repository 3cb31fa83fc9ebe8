"""Parse model output as an answer, and list how it violates the contract."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from cria_tricks.kwanzaa.contract import Answer

KINDS = {
    "missing": "missing field",
    "extra_forbidden": "unknown field",
    "literal_error": "unknown value",
    "greater_than_equal": "out of range",
    "less_than_equal": "out of range",
    "string_too_short": "wrong length",
    "string_too_long": "wrong length",
    "too_short": "wrong length",
    "too_long": "wrong length",
    "string_pattern_mismatch": "bad format",
}
"""pydantic's names of errors, and our names. Its other names all end in ``_type``; we call these ``"wrong type"``."""

_TEXT_FIELD = re.compile(r'"text"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)
"""The field ``text`` in broken JSON; the text may break off before its closing quote."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)
"""A JSON string, or the beginning of a string that is never closed."""

UNREADABLE = ("empty answer", "no JSON object", "invalid JSON", "truncated JSON")
"""Violations that leave no JSON object to compare with the contract."""
VIOLATIONS = (*UNREADABLE, "text around the JSON", *dict.fromkeys(KINDS.values()), "wrong type")
"""Every kind of violation."""


@dataclass(frozen=True)
class Violation:
    """One violation of the contract.

    Attributes:
        kind: one of :data:`VIOLATIONS`.
        where: the field, e.g. ``sources[0].year``; empty for the answer as a whole.
    """

    kind: str
    where: str = ""


@dataclass(frozen=True)
class Reply:
    """Model output, parsed as an answer as far as possible.

    Attributes:
        raw: all that the model wrote.
        fields: the JSON object in it; ``None`` if none could be read.
        violations: all violations of the contract; empty if there are none.
    """

    raw: str
    fields: dict[str, Any] | None
    violations: tuple[Violation, ...]

    @cached_property
    def text(self) -> str:
        """The text of the answer, that is, ``answer.text``, or ``answer`` itself if it is a string.

        If no JSON object could be read, it is what follows ``"text":`` in the output, or else the whole output.
        """
        if self.fields is None:
            found = _TEXT_FIELD.search(self.raw)
            if found:
                return _unescaped(found[1])
            return self.raw.strip()
        text = self.fields.get("answer")
        if isinstance(text, dict):
            text = text.get("text")
        if not isinstance(text, str):
            return ""
        return text.strip()

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The objects in the list ``sources``, whether or not they keep the contract."""
        sources = (self.fields or {}).get("sources")
        if not isinstance(sources, list):
            return []
        return [source for source in sources if isinstance(source, dict)]

    def said(self, part: str, field: str) -> Any:
        """Return a field of a part, e.g. ``said("answer", "completeness")``; ``None`` if it is not there."""
        found = (self.fields or {}).get(part)
        if not isinstance(found, dict):
            return None
        return found.get(field)

    def counts(self) -> Counter[str]:
        """Count the violations of each kind."""
        return Counter(violation.kind for violation in self.violations)


def read_reply(raw: str) -> Reply:
    """Find the first JSON object in a text, also inside a Markdown fence, and validate it against the contract.

    Args:
        raw: what the model wrote.
    """
    text = raw.strip()
    start = text.find("{")
    if start < 0:
        kind = "no JSON object" if text else "empty answer"
        return Reply(raw, None, (Violation(kind),))
    try:
        fields, end = json.JSONDecoder(parse_constant=_no_json_number).raw_decode(text, start)
    except (ValueError, RecursionError):  # also a number of thousands of digits, or brackets thousands deep
        kind = "invalid JSON" if _closes(text[start:]) else "truncated JSON"
        return Reply(raw, None, (Violation(kind),))
    violations = []
    around = text[:start] + text[end:]
    if around.strip():
        violations.append(Violation("text around the JSON"))
    try:
        Answer.model_validate(fields)
    except ValidationError as error:
        for found in error.errors():
            kind = KINDS.get(found["type"], "wrong type")
            violations.append(Violation(kind, _path(found["loc"])))
    return Reply(raw, fields, tuple(violations))


def plain_reply(raw: str) -> Reply:
    """Take a whole text as the answer, for rows that do not use the contract."""
    return Reply(raw, {"answer": raw}, ())


def _no_json_number(name: str) -> None:
    """Refuse ``NaN`` and ``Infinity``, which are not JSON, but which Python's JSON reader accepts."""
    raise ValueError(f"{name} is no JSON number")


def _closes(text: str) -> bool:
    """Tell whether the first brace is closed again somewhere; braces inside strings do not count."""
    depth = 0
    for brace in re.findall(r"[{}]", _STRING.sub("", text)):
        depth += 1 if brace == "{" else -1
        if depth == 0:
            return True
    return False


def _unescaped(text: str) -> str:
    """Replace the escapes of a JSON string; if they are broken, return the text as it is."""
    try:
        return json.loads(f'"{text}"', strict=False).strip()
    except ValueError:
        return text.strip()


def _path(place: tuple[int | str, ...]) -> str:
    """Write the place of a field as ``sources[0].year``."""
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return path.removeprefix(".")
