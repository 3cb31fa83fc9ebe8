"""Define the answer contract, kwanzaa.answer.v1, as pydantic models.

The contract is the JSON format of an answer. Its fields, their types and their bounds are those of the public project's
JSON schema. As in that schema, unknown fields are allowed inside an object, and forbidden at the top level. Two things
are stricter here: an integer must be written as one (``1966``, not ``1966.0``), and the formats of addresses, times and
identifiers are checked.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())


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
