"""tools/notes/*.toml -> cria_tricks/data/history_notes_*.jsonl: notes and questions, written out as chats.

    python -m tools.history_notes

A TOML file has ``[notes]``, short passages of our own, and ``[[rows]]``: the notes that a question is asked over, the
question, the answer with its labels, and what is missing if the answer is a refusal. The chat of a row keeps the answer
contract, which its system prompt shows. The parts ``train`` and ``eval`` share no note and no question.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.data.sources import CONTRACT

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("train", "eval")
LABEL = re.compile(r"\[(\d)\]")
NOTHING = "No documents were found."
"""What stands in the place of the documents where there are none."""


def document(key: str, note: Mapping[str, Any]) -> str:
    """Write a note as a retrieved document, without its label: title, text, and what an answer says of its source."""
    return f"{note['title']}: {note['text']} ({key}, {note['year']}, {note['namespace']})"


def source(key: str, note: Mapping[str, Any]) -> dict[str, Any]:
    """Return a note as an entry of an answer's sources."""
    return {
        "citation_label": note["title"],
        "canonical_url": f"urn:cria:{key}",
        "source_org": "cria_tricks",
        "year": note["year"],
        "content_type": "note",
        "license": "Apache-2.0",
        "namespace": note["namespace"],
        "doc_id": key,
        "chunk_id": f"{key}:1",
    }


def answer(row: Mapping[str, Any], notes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answer of a row in the form of the contract."""
    cited = sorted({int(label) for label in LABEL.findall(row["answer"])})
    namespaces = sorted({notes[key]["namespace"] for key in row["notes"]}) or ["none"]
    return {
        "version": "kwanzaa.answer.v1",
        "answer": {
            "text": row["answer"],
            "completeness": "insufficient_data" if "missing" in row else "complete",
        },
        "sources": [source(key, notes[key]) for key in (row["notes"][number - 1] for number in cited)],
        "retrieval_summary": {
            "query": row["ask"],
            "top_k": max(1, len(row["notes"])),
            "namespaces": namespaces,
            "results": [],
        },
        "unknowns": {
            "unsupported_claims": [],
            "missing_context": [row["missing"]] if "missing" in row else [],
            "clarifying_questions": [],
        },
    }


def chat(row: Mapping[str, Any], notes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a row as a chat of three turns."""
    documents = [f"[{number}] {document(key, notes[key])}" for number, key in enumerate(row["notes"], 1)]
    asked = "\n".join(["Documents:", *(documents or [NOTHING]), "", f"Question: {row['ask']}"])
    written = json.dumps(answer(row, notes), ensure_ascii=False, separators=(",", ":"))
    turns = {"system": CONTRACT, "user": asked, "assistant": written}
    return {"messages": [{"role": role, "content": content} for role, content in turns.items()]}


def read(part: str) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Read the notes and the rows of a part, ``train`` or ``eval``."""
    found = tomllib.loads((ROOT / "tools" / "notes" / f"{part}.toml").read_text(encoding="utf-8"))
    return found["notes"], found["rows"]


def lines(part: str) -> str:
    """Return the content of a part's JSON lines."""
    notes, rows = read(part)
    return "".join(json.dumps(chat(row, notes), ensure_ascii=False) + "\n" for row in rows)


def path(part: str) -> Path:
    """Return where a part's JSON lines are."""
    return ROOT / "cria_tricks" / "data" / f"history_notes_{part}.jsonl"


if __name__ == "__main__":
    for part in PARTS:
        path(part).write_text(lines(part), encoding="utf-8")
