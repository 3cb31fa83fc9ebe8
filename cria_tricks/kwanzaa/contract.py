"""Define the answer contract, kwanzaa.answer.v1, as pydantic models, and read a model's output as such an answer.

The contract is the JSON format of an answer. Its fields, their types and their bounds are those of the public project's
JSON schema. As in that schema, unknown fields are allowed inside an object, and forbidden at the top level. Two things
are stricter here: an integer must be written as one (``1966``, not ``1966.0``), and the formats of addresses, times and
identifiers are checked.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ABSENT: Any = None
"""Default of a field that may be left out. pydantic does not check defaults, but a ``null`` in the JSON is an error."""

Label = Annotated[str, Field(min_length=1, max_length=500)]
Id = Annotated[str, Field(min_length=1, max_length=200)]
Tag = Annotated[str, Field(max_length=100)]
Note = Annotated[str, Field(max_length=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Year = Annotated[int, Field(ge=1600, le=2100)]
Address = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.\-]*:[^\s]+$")]
Uuid = Annotated[str, Field(pattern=r"^(?i:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})$")]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)$")]


class ContractObject(BaseModel):
    """Base class of all objects of an answer, checked strictly: ``"3"`` is no number, and ``1`` is no boolean."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Toggles(ContractObject):
    """The settings that the user has switched on or off."""

    require_citations: bool
    primary_sources_only: bool
    creative_mode: bool


class Body(ContractObject):
    """The answer itself."""

    text: Annotated[str, Field(min_length=1, max_length=10_000)]
    confidence: Share = ABSENT
    tone: Literal["neutral", "educational", "conversational", "formal", "creative"] = ABSENT
    completeness: Literal["complete", "partial", "insufficient_data"] = ABSENT


class CitedSource(ContractObject):
    """A document that the answer cites."""

    citation_label: Label
    canonical_url: Address
    source_org: Id
    year: Year
    content_type: Annotated[str, Field(min_length=1, max_length=100)]
    license: Id
    namespace: Annotated[str, Field(min_length=1, max_length=100)]
    doc_id: Id
    chunk_id: Id
    tags: Annotated[list[Tag], Field(max_length=50)] = ABSENT
    relevance_score: Share = ABSENT


class Filters(ContractObject):
    """The filters that narrowed the search."""

    content_type: list[str] = ABSENT
    year: int = ABSENT
    year_gte: Year = ABSENT
    year_lte: Year = ABSENT
    source_org: list[str] = ABSENT
    tags: list[str] = ABSENT


class Result(ContractObject):
    """A document that the search found."""

    rank: Annotated[int, Field(ge=1)]
    score: Share
    citation_label: Label
    canonical_url: Address
    doc_id: Id
    chunk_id: Id
    namespace: Annotated[str, Field(min_length=1, max_length=100)]
    snippet: Annotated[str, Field(max_length=2000)] = ABSENT


class RetrievalSummary(ContractObject):
    """What was searched, and what was found."""

    query: Annotated[str, Field(min_length=1, max_length=1000)]
    top_k: Annotated[int, Field(ge=1, le=100)]
    namespaces: Annotated[list[Tag], Field(min_length=1, max_length=20)]
    results: Annotated[list[Result], Field(max_length=100)]
    filters: Filters = ABSENT
    execution_time_ms: Annotated[int, Field(ge=0)] = ABSENT
    embedding_model: str = ABSENT


class Unknowns(ContractObject):
    """What the answer could not say."""

    unsupported_claims: list[Note]
    missing_context: list[Note]
    clarifying_questions: list[Annotated[str, Field(max_length=500)]]
    out_of_scope: list[Note] = ABSENT


class Integrity(ContractObject):
    """What the answer says about its own citations."""

    citation_required: bool = ABSENT
    citations_provided: bool = ABSENT
    retrieval_confidence: Literal["high", "medium", "low", "none"] = ABSENT
    fallback_behavior: Literal["not_needed", "creative_generation", "refusal", "clarification_requested"] = ABSENT
    safety_flags: list[Annotated[str, Field(max_length=200)]] = ABSENT


class Provenance(ContractObject):
    """When the answer was made, and by which model."""

    generated_at: Time
    retrieval_run_id: Uuid = ABSENT
    assistant_message_id: Uuid = ABSENT
    session_id: Uuid = ABSENT
    model_version: str = ABSENT
    adapter_version: str = ABSENT


class Answer(ContractObject):
    """A whole answer: the object at the top level."""

    model_config = ConfigDict(extra="forbid")  # pydantic adds this to the config of the base class

    version: Annotated[str, Field(pattern=r"^kwanzaa\.answer\.v[0-9]+$")]
    answer: Body
    sources: Annotated[list[CitedSource], Field(max_length=100)]
    retrieval_summary: RetrievalSummary
    unknowns: Unknowns
    persona: Literal["educator", "researcher", "creator", "builder"] = ABSENT
    model_mode: Literal["base_adapter_rag", "base_only", "adapter_only", "creative"] = ABSENT
    toggles: Toggles = ABSENT
    integrity: Integrity = ABSENT
    provenance: Provenance = ABSENT


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
    """One violation of the contract: its kind in :data:`VIOLATIONS`, and its field; empty for the whole answer."""

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
    """Find the first JSON object in a text, also inside a Markdown fence, and validate it against the contract."""
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
