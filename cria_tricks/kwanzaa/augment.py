"""Augment training rows of the contract: copies with the documents in another order, or with fewer of them.

A model that learns that document 1 is always cited first, or that every question has an answer, has learnt habits of
the data. Each kind of copy changes what was retrieved, and then the answer with it: its labels, its sources, its
retrieval summary. A copy is used only if it scores as well as its row: on the contract, citations, grounding and
refusal. So no kind has to know every way in which an answer may speak of its documents.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa import statements
from cria_tricks.kwanzaa.prompt import Document, QARow, read_rows
from cria_tricks.kwanzaa.scores import SCORERS, refuses, should_refuse
from cria_tricks.recipe import Recipe

REFUSAL = "I cannot answer this from the retrieved documents: none of them says it."
NOTHING_ASKED = "No relevant documents were retrieved from the corpus."
"""What a prompt says in place of documents."""


def shuffle_documents(row: QARow, draw: random.Random) -> Chat | None:
    """Put the same documents into another order, and renumber the labels."""
    documents = list(row.prompt.documents)
    if all(document == documents[0] for document in documents):
        return None  # every order is the same
    shuffled = documents
    while shuffled == documents:
        shuffled = draw.sample(documents, len(documents))
    return _with_documents(row, shuffled)


def drop_uncited(row: QARow, draw: random.Random) -> Chat | None:
    """Keep only the documents that the answer cites."""
    cited = _cited(row)
    if not cited or len(cited) == len(row.prompt.documents):
        return None
    return _with_documents(row, cited)


def drop_cited(row: QARow, draw: random.Random) -> Chat | None:
    """Keep only the documents that the answer does not cite, and put a refusal in its place."""
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


KINDS: dict[str, Callable[[QARow, random.Random], Chat | None]] = {
    "shuffle_documents": shuffle_documents,
    "drop_uncited": drop_uncited,
    "drop_cited": drop_cited,
}
"""How a copy is made, by the name of the recipe's field."""


def of(recipe: Recipe) -> Callable[[Chat], Iterable[tuple[str, Chat]]] | None:
    """Find the function that makes the copies that a recipe asks for; ``None`` where it asks for none."""
    shares = {kind: getattr(recipe.data, kind) for kind in KINDS}
    shares = {kind: share for kind, share in shares.items() if share}
    if not shares:
        return None
    return Augment(shares, recipe.train.seed).copies


class Augment:
    """Makes copies of some rows.

    Args:
        shares: share of the rows that get a copy (0 to 1), by kind.
        seed: decides which rows those are, together with the row's own words. So the order of rows does not matter.
    """

    def __init__(self, shares: Mapping[str, float], seed: int):
        self.shares = shares
        self.seed = seed

    def copies(self, chat: Chat) -> Iterable[tuple[str, Chat]]:
        """Yield each copy with its kind; none of a row that does not keep the contract."""
        if not chat.messages:
            return
        [row] = read_rows([chat])
        for kind, share in self.shares.items():
            draw = random.Random(f"{self.seed} {kind} {chat.content}")
            if draw.random() >= share:
                continue
            copy = KINDS[kind](row, draw)
            if copy and _keeps(row, copy):
                yield kind, copy


def _keeps(row: QARow, copy: Chat) -> bool:
    """Tell whether a copy is as good as its row: no score may be lower, and a refusal must be one."""
    [changed] = read_rows([copy])
    if should_refuse(changed) and not refuses(changed.reference):
        return False
    for scorer in SCORERS.values():
        before = scorer(row, row.reference)
        after = scorer(changed, changed.reference)
        if after.value < before.value:
            return False
    return True


def _cited(row: QARow) -> list[Document]:
    labels = set(statements.labels(row.reference.text))
    return [document for document in row.prompt.documents if document.number in labels]


def _with_documents(row: QARow, documents: Sequence[Document]) -> Chat:
    """Leave a row only these of its documents, numbered from 1, and renumber the labels in its answer."""
    numbers = {document.number: new for new, document in enumerate(documents, 1)}
    turn = {"role": "user", "content": _turn_with(row, documents, numbers)}
    fields = json.loads(json.dumps(row.reference.fields))  # a copy
    for part in ("answer", "unknowns"):  # both may speak of [1]
        text = json.dumps(fields[part])
        fields[part] = json.loads(statements.LABELS.sub(lambda match: _renumbered(match, numbers), text))
    fields["sources"] = _in_order(fields["sources"], row.prompt.documents, numbers)
    summary = fields["retrieval_summary"]
    summary["results"] = _in_order(summary["results"], row.prompt.documents, numbers)
    for rank, result in enumerate(summary["results"], 1):
        result["rank"] = rank
    messages = (*row.messages[:-1], turn, {"role": "assistant", "content": ""})
    return _with_answer(Chat(messages, "", "", row.where), row, fields)


def _turn_with(row: QARow, documents: Sequence[Document], numbers: Mapping[int, int]) -> str:
    """Write the user's turn with these documents, separated as the row's own are."""
    turn = row.messages[-1]["content"]
    first = row.prompt.documents[0]
    last = row.prompt.documents[-1]
    begin = turn.index(first.text)
    end = turn.index(last.text) + len(last.text)
    if not documents:
        return NOTHING_ASKED + turn[end:]
    gap = ""
    if first != last:
        gap = turn[begin + len(first.text) :].partition("[")[0]
    blocks = []
    for document in documents:
        _, _, behind_label = document.text.partition("]")
        blocks.append(f"[{numbers[document.number]}]{behind_label}")
    return turn[:begin] + gap.join(blocks) + turn[end:]


def _renumbered(match: re.Match[str], numbers: Mapping[int, int]) -> str:
    found = [int(number) for number in match[1].split(",")]
    return "[" + ", ".join(str(numbers.get(number, number)) for number in found) + "]"


def _in_order(
    entries: Sequence[dict[str, Any]], documents: Sequence[Document], numbers: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Sort the entries of documents that are still there; what is of no document stays, at the end."""
    placed = []
    for entry in entries:
        number = _number(entry, documents)
        if number in numbers:
            placed.append((numbers[number], entry))
        elif number == 0:
            placed.append((len(documents) + 1, entry))
    placed.sort(key=lambda pair: pair[0])
    return [entry for _, entry in placed]


def _number(entry: dict[str, Any], documents: Sequence[Document]) -> int:
    """Find the label of the document that an entry of the answer is about; 0 where it cannot be told."""
    about = entry.get("metadata")  # the real data has label and address there in some rows
    if isinstance(about, dict):
        entry = {**about, **entry}
    label = entry.get("citation_label")
    url = entry.get("canonical_url")
    for document in documents:
        same_url = document.url and document.url == url
        # A label may leave out the end of a title, from a colon on.
        same_title = label and f"{document.title}:".startswith(f"{label}:")
        if same_url or same_title:
            return document.number
    return 0


def _with_answer(chat: Chat, row: QARow, fields: dict[str, Any]) -> Chat:
    """Write the answer as JSON in the row's own style: on one line, or indented."""
    raw = row.reference.raw
    indent = None
    separators = (", ", ": ")
    if "\n" in raw.strip():
        indent = 2
        separators = (",", ": ")
    elif '": ' not in raw:
        separators = (",", ":")
    written = json.dumps(fields, indent=indent, separators=separators, ensure_ascii="\\u" in raw)
    return replace(chat, messages=(*chat.messages[:-1], {"role": "assistant", "content": written}))
