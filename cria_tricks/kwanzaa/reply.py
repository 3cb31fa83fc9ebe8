"""Model output, parsed as an answer, and its violations of the contract."""

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
"""What pydantic calls an error, and what we call it; its other names, all ``..._type``, are ``"wrong type"``."""

_TEXT_FIELD = re.compile(r'"text"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)
"""The field ``text`` of an object that may break off inside it."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|$)', re.DOTALL)
"""A JSON string, or the beginning of one that is never closed."""

UNREADABLE = ("empty answer", "no JSON object", "invalid JSON", "truncated JSON")
"""Violations that leave nothing to hold against the contract."""
VIOLATIONS = (*UNREADABLE, "text around the JSON", *dict.fromkeys(KINDS.values()), "wrong type")
"""Every kind of violation."""


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong.

    Attributes:
        kind: one of :data:`VIOLATIONS`.
        where: the field, e.g. ``sources[0].year``; empty for the answer as a whole.
    """

    kind: str
    where: str = ""


@dataclass(frozen=True)
class Reply:
    """Model output, parsed as an answer as far as it is one.

    Attributes:
        raw: all that the model wrote.
        fields: the JSON object in it; ``None`` where none could be read.
        violations: all violations of the contract; empty when there are none.
    """

    raw: str
    fields: dict[str, Any] | None
    violations: tuple[Violation, ...]

    @cached_property
    def text(self) -> str:
        """The answer's words: ``answer.text``; as much of it as a broken object holds; all of what is no object."""
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
        """The objects under ``sources``, whether or not they are whole."""
        sources = (self.fields or {}).get("sources")
        if not isinstance(sources, list):
            return []
        return [source for source in sources if isinstance(source, dict)]

    def said(self, part: str, field: str) -> Any:
        """A field of a part, e.g. ``said("answer", "completeness")``; ``None`` where it is not there."""
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
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets thousands deep
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
    """Take a text for the whole of an answer, where no contract is asked for."""
    return Reply(raw, {"answer": raw}, ())


def _no_json_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")  # Python's reader takes NaN and Infinity


def _closes(text: str) -> bool:
    """Tell whether the first brace is closed again somewhere; braces inside strings do not count."""
    depth = 0
    for brace in re.findall(r"[{}]", _STRING.sub("", text)):
        depth += 1 if brace == "{" else -1
        if depth == 0:
            return True
    return False


def _unescaped(text: str) -> str:
    try:
        return json.loads(f'"{text}"', strict=False).strip()
    except ValueError:
        return text.strip()


def _path(place: tuple[int | str, ...]) -> str:
    """Write the place of a field as ``sources[0].year``."""
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return path.removeprefix(".")
