"""Answers that need no model: they cite every document, and refuse if there is none. An adapter must do better."""

import json
import re
from typing import Any

from cria_tricks.kwanzaa.contract import Reply, read_reply
from cria_tricks.kwanzaa.prompt import Document, QARow

_CONTENT = re.compile(r"^Content: *(.+)$", re.MULTILINE)
REFUSAL = "I cannot answer this: no documents were found."


def trivial_reply(row: QARow) -> Reply:
    """Copy the first sentence of each document with its label; without documents, refuse.

    The reply keeps the contract, because a program writes it. Everything that its fields need and the documents do not
    tell is filled in with the same words for each row.
    """
    documents = row.documents
    text = " ".join(f"{_first_sentence(document)} [{document.number}]." for document in documents)
    fields = {
        "version": "kwanzaa.answer.v1",
        "answer": {"text": text or REFUSAL, "completeness": "complete" if documents else "insufficient_data"},
        "sources": [_source(document) for document in documents],
        "retrieval_summary": {
            "query": row.query[:1000] or "none",
            "top_k": max(1, len(documents)),
            "namespaces": ["none"],
            "results": [],
        },
        "unknowns": {"unsupported_claims": [], "missing_context": [], "clarifying_questions": []},
    }
    return read_reply(json.dumps(fields))


def _first_sentence(document: Document) -> str:
    """Return the first sentence of a document's content, without its final dot; of its first line if none is marked."""
    content = _CONTENT.search(document.text)
    text = content[1] if content else document.title
    return text.split(". ")[0].rstrip(".")


def _source(document: Document) -> dict[str, Any]:
    return {
        "citation_label": document.title,
        "canonical_url": document.url or "urn:none",
        "source_org": "none",
        "year": 2000,
        "content_type": "document",
        "license": "none",
        "namespace": "none",
        "doc_id": str(document.number),
        "chunk_id": str(document.number),
    }
