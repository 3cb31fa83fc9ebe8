"""Rows and answers made by hand, about a subject of our own words, for the scorers to be held against."""

import copy
import json
from typing import Any

from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa.contract import Reply, read_reply
from cria_tricks.kwanzaa.prompt import QARow, read_rows

DOCUMENTS = """Retrieved Documents:

[1] Baraza Press (1971) — The Mat and the Candles
Relevance Score: 0.90
Source: Baraza Press (1971)
Content: The kinara of Amani Hall holds seven candles. Ruth Adeyemi carved it in 1969, and 1,200 people came to see it.
URL: https://example.org/kinara

[2] Harbor Letters (1980) — What Ujima Asks
Relevance Score: 0.80
Source: Harbor Letters (1980)
Content: Ujima is collective work. "We mend the roof together," wrote the third keeper of the hall.
URL: https://example.org/ujima

"""
NOTHING_FOUND = "Nothing was found.\n\n"
QUERY = "Who carved the kinara of Amani Hall?"
GOOD = "Ruth Adeyemi carved the kinara of Amani Hall in 1969 [1]. It holds 7 candles [1]."
REFUSAL = "I cannot say who paid for the kinara, because no document tells."
SOURCES = [
    {
        "citation_label": label,
        "canonical_url": f"https://example.org/{name}",
        "source_org": "Example",
        "year": year,
        "content_type": "book",
        "license": "CC0",
        "namespace": "hall",
        "doc_id": name,
        "chunk_id": f"{name}:1",
    }
    for label, name, year in (
        ("Baraza Press (1971) — The Mat and the Candles", "kinara", 1971),
        ("Harbor Letters (1980) — What Ujima Asks", "ujima", 1980),
    )
]
_RESULT_FIELDS = ("citation_label", "canonical_url", "doc_id", "chunk_id", "namespace")


def answer(text: str = GOOD, sources: int = 2, refuses: bool = False) -> dict[str, Any]:
    """A whole answer that keeps the contract, with every optional part."""
    results = [
        {"rank": rank, "score": 0.9, "snippet": "...", **{name: source[name] for name in _RESULT_FIELDS}}
        for rank, source in enumerate(SOURCES, 1)
    ]
    return copy.deepcopy(
        {
            "version": "kwanzaa.answer.v1",
            "persona": "builder",
            "model_mode": "base_adapter_rag",
            "toggles": {"require_citations": True, "primary_sources_only": False, "creative_mode": False},
            "answer": {
                "text": text,
                "confidence": 0.5,
                "tone": "neutral",
                "completeness": "insufficient_data" if refuses else "complete",
            },
            "sources": [{**source, "tags": ["hall"], "relevance_score": 1} for source in SOURCES[:sources]],
            "retrieval_summary": {
                "query": QUERY,
                "top_k": 2,
                "namespaces": ["hall"],
                "filters": {"year_gte": 1960, "tags": ["hall"]},
                "results": results,
                "execution_time_ms": 3,
            },
            "unknowns": {"unsupported_claims": [], "missing_context": ["who paid"], "clarifying_questions": []},
            "integrity": {
                "citation_required": True,
                "citations_provided": not refuses,
                "retrieval_confidence": "high",
                "fallback_behavior": "refusal" if refuses else "not_needed",
            },
            "provenance": {
                "generated_at": "2026-11-21T10:00:00Z",
                "session_id": "123e4567-e89b-12d3-a456-426614174000",
            },
        }
    )


def row(documents: str = DOCUMENTS, query: str = QUERY, refuses: bool = False) -> QARow:
    """A held-out row, whose reference answers or refuses."""
    turn = f"{documents}Query: {query}\n\nAnswer in valid JSON."
    reference = json.dumps(answer(REFUSAL if refuses else GOOD, refuses=refuses))
    messages = ({"role": "user", "content": turn}, {"role": "assistant", "content": reference})
    return read_rows([Chat(messages, "", "", "made:1")])[0]


def reply(text: str, sources: int = 2) -> Reply:
    """An answer that keeps the contract, with this text."""
    return read_reply(json.dumps(answer(text, sources)))
