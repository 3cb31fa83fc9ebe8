"""What a model wrote, read as an answer, and what in it breaks the contract."""

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
    """What a model wrote, read as an answer as far as it is one.

    Attributes:
        raw: all of it.
        fields: the JSON object in it; ``None`` where none could be read.
        violations: of the contract; empty when there are none.
    """

    raw: str
    fields: dict[str, Any] | None
    violations: tuple[Violation, ...]

    @cached_property
    def text(self) -> str:
        """What a reader would read: ``answer.text``; of a broken object what can be found of it; else all."""
        if self.fields is None:
            if found := re.search(r'"text"\s*:\s*"((?:[^"\\]|\\.)*)', self.raw, re.DOTALL):
                return _unescaped(found[1])
            return self.raw.strip()
        body = self.fields.get("answer")
        text = body.get("text") if isinstance(body, dict) else body
        return text.strip() if isinstance(text, str) else ""

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The objects under ``sources``, whether or not they are whole."""
        sources = (self.fields or {}).get("sources")
        return [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []

    def said(self, part: str, field: str) -> Any:
        """A field of a part, e.g. ``said("answer", "completeness")``; ``None`` where it is not there."""
        found = (self.fields or {}).get(part)
        return found.get(field) if isinstance(found, dict) else None

    def counts(self) -> Counter[str]:
        """How often each kind of violation is there."""
        return Counter(violation.kind for violation in self.violations)


def read(raw: str) -> Reply:
    """Find the first JSON object in a text, also inside a Markdown fence, and hold it against the contract.

    Args:
        raw: what the model wrote.
    """
    text = raw.strip()
    start = text.find("{")
    if start < 0:
        return Reply(raw, None, (Violation("no JSON object" if text else "empty answer"),))
    try:
        fields, end = json.JSONDecoder(parse_constant=_no_json_number).raw_decode(text, start)
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets thousands deep
        return Reply(raw, None, (Violation("invalid JSON" if _closes(text[start:]) else "truncated JSON"),))
    around = text[:start] + text[end:]
    violations = [Violation("text around the JSON")] if around.strip() else []
    try:
        Answer.model_validate(fields)
    except ValidationError as error:
        violations += [
            Violation(KINDS.get(found["type"], "wrong type"), _path(found["loc"])) for found in error.errors()
        ]
    return Reply(raw, fields, tuple(violations))


def plain(raw: str) -> Reply:
    """Take a text for the whole of an answer, where no contract is asked for."""
    return Reply(raw, {"answer": raw}, ())


def _no_json_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")  # Python's reader takes NaN and Infinity


def _closes(text: str) -> bool:
    """Whether the first brace is closed again somewhere, strings left out."""
    depth = 0
    for brace in re.findall(r"[{}]", re.sub(r'"(?:[^"\\]|\\.)*("|$)', "", text, flags=re.DOTALL)):
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
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")
