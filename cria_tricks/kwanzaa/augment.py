"""More training rows from a row of the contract: what was retrieved in another order, or less of it.

Whoever learns that document 1 is always cited first, or that every question has an answer, has learnt the data's
habits. Each kind here changes what was retrieved and then the answer with it: its labels, its sources, its retrieval
summary. A copy is made only of a row whose copy keeps what the row kept: the contract, and its scores for citations,
grounding and refusal. So no kind has to know every way in which an answer may speak of its documents.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa import statements
from cria_tricks.kwanzaa.prompt import Document, Row, read_rows
from cria_tricks.kwanzaa.scores import SCORERS, refuses, should_refuse
from cria_tricks.recipe import Recipe

REFUSAL = "I cannot answer this from the retrieved documents: none of them says it."
NOTHING_ASKED = "No relevant documents were retrieved from the corpus."
_LABELS = re.compile(r"\[(\d+(?:\s*,\s*\d+)*)\]")


def shuffle_documents(row: Row, draw: random.Random) -> Chat | None:
    """The same documents in another order, with the labels of the new one."""
    documents = list(row.prompt.documents)
    if len(documents) < 2:
        return None
    shuffled = documents
    while shuffled == documents:
        shuffled = draw.sample(documents, len(documents))
    return _with_documents(row, shuffled)


def drop_uncited(row: Row, draw: random.Random) -> Chat | None:
    """Only the documents that the answer cites."""
    cited = _cited(row)
    return _with_documents(row, cited) if 0 < len(cited) < len(row.prompt.documents) else None


def drop_cited(row: Row, draw: random.Random) -> Chat | None:
    """Only the documents that the answer does not cite, and a refusal in its place."""
    cited = _cited(row)
    if not cited or should_refuse(row) or row.reference.said("toggles", "creative_mode"):
        return None
    left = [document for document in row.prompt.documents if document not in cited]
    copy = _with_documents(row, left)
    fields = json.loads(copy.messages[-1]["content"])
    fields["answer"] |= {"text": REFUSAL, "completeness": "insufficient_data"}
    fields["answer"].pop("confidence", None)  # of an answer that is not there
    fields["sources"] = []
    fields["unknowns"] |= {"unsupported_claims": [], "missing_context": [f"A document on: {row.prompt.query}"[:1000]]}
    if "integrity" in fields:
        fields["integrity"] |= {
            "citations_provided": False,
            "retrieval_confidence": "low" if left else "none",
            "fallback_behavior": "refusal",
        }
    return _with_answer(copy, row, fields)


KINDS: dict[str, Callable[[Row, random.Random], Chat | None]] = {
    "shuffle_documents": shuffle_documents,
    "drop_uncited": drop_uncited,
    "drop_cited": drop_cited,
}
"""By the recipe's fields."""


def of(recipe: Recipe) -> Callable[[Chat], Iterable[tuple[str, Chat]]] | None:
    """What makes the copies that a recipe asks for; nothing where it asks for none."""
    shares = {kind: share for kind in KINDS if (share := getattr(recipe.data, kind))}
    return Augment(shares, recipe.train.seed).copies if shares else None


class Augment:
    """Makes copies of some rows.

    Args:
        shares: of the rows, 0 to 1, by kind.
        seed: with the row's own words it decides which rows those are, so that it does not matter when a row is met.
    """

    def __init__(self, shares: Mapping[str, float], seed: int):
        self.shares, self.seed = shares, seed

    def copies(self, chat: Chat) -> Iterable[tuple[str, Chat]]:
        """Each copy with its kind; none of a row that is no question and answer of the contract."""
        if not chat.messages:
            return
        try:
            [row] = read_rows([chat])
        except BadInput:
            return
        for kind, share in self.shares.items():
            draw = random.Random(f"{self.seed} {kind} {chat.content}")
            if draw.random() >= share:
                continue
            copy = KINDS[kind](row, draw)
            if copy and _keeps(row, copy):
                yield kind, copy


def _keeps(row: Row, copy: Chat) -> bool:
    """Whether a copy is as good as its row: no score may be lower, and a refusal must be one."""
    [changed] = read_rows([copy])
    if should_refuse(changed) and not refuses(changed.reference):
        return False
    return all(s(changed, changed.reference).value >= s(row, row.reference).value for s in SCORERS.values())


def _cited(row: Row) -> list[Document]:
    labels = set(statements.labels(row.reference.text))
    return [document for document in row.prompt.documents if document.number in labels]


def _with_documents(row: Row, documents: Sequence[Document]) -> Chat:
    """The row with these of its documents, numbered from 1, and its answer with the labels that they have now."""
    numbers = {document.number: new for new, document in enumerate(documents, 1)}
    turn = row.messages[-1]["content"]
    first, last = row.prompt.documents[0], row.prompt.documents[-1]
    begin, end = turn.index(first.text), turn.index(last.text) + len(last.text)
    blocks = [f"[{numbers[document.number]}]" + document.text.partition("]")[2] for document in documents]
    gap = turn[begin + len(first.text) :][: turn[begin + len(first.text) :].index("[")] if first != last else ""
    listed = gap.join(blocks) or NOTHING_ASKED
    head = turn[:begin] if blocks else ""
    asked = ({"role": "user", "content": f"{head}{listed}{turn[end:]}"},)

    fields = json.loads(json.dumps(row.reference.fields))
    for part in ("answer", "unknowns"):  # both may speak of [1]
        fields[part] = json.loads(_LABELS.sub(lambda match: _renumbered(match, numbers), json.dumps(fields[part])))
    fields["sources"] = _in_order(fields["sources"], row.prompt.documents, numbers)
    summary = fields["retrieval_summary"]
    summary["results"] = _in_order(summary["results"], row.prompt.documents, numbers)
    for rank, result in enumerate(summary["results"], 1):
        result["rank"] = rank
    chat = Chat((*row.messages[:-1], *asked, {"role": "assistant", "content": ""}), "", "", row.where)
    return _with_answer(chat, row, fields)


def _renumbered(match: re.Match[str], numbers: Mapping[int, int]) -> str:
    return "[" + ", ".join(str(numbers.get(int(n), n)) for n in match[1].split(",")) + "]"


def _in_order(
    entries: Sequence[dict[str, Any]], documents: Sequence[Document], numbers: Mapping[int, int]
) -> list[dict[str, Any]]:
    """The entries of documents that are still there, in their order; what is of no document stays at the end."""
    placed = [(_number(entry, documents), entry) for entry in entries]
    kept = [(numbers.get(number, len(documents) + 1), entry) for number, entry in placed if number in (0, *numbers)]
    return [entry for _, entry in sorted(kept, key=lambda pair: pair[0])]


def _number(entry: dict[str, Any], documents: Sequence[Document]) -> int:
    """The label of the document that an entry of the answer is about; 0 where it cannot be told."""
    about = entry.get("metadata")  # the real data has it there in some rows
    told = {**about, **entry} if isinstance(about, dict) else entry
    label, url = told.get("citation_label"), told.get("canonical_url")
    for document in documents:
        if (document.url and document.url == url) or (label and f"{document.title}:".startswith(f"{label}:")):
            return document.number
    return 0


def _with_answer(chat: Chat, row: Row, fields: dict[str, Any]) -> Chat:
    """Write the answer as the row's own is written: on one line, or indented."""
    raw = row.reference.raw
    indent = 2 if "\n" in raw.strip() else None
    separators = (",", ": ") if indent else (", ", ": ") if '": ' in raw else (",", ":")
    written = json.dumps(fields, indent=indent, separators=separators, ensure_ascii="\\u" in raw)
    return replace(chat, messages=(*chat.messages[:-1], {"role": "assistant", "content": written}))
