"""Augment training rows that keep the answer contract: copy them with shuffled documents, or with fewer documents.

A model may learn habits of the data, such as that document 1 is always cited first, or that every question has an
answer. The copies break these habits. Each kind of copy changes the documents that were retrieved, and adapts the
answer to them: its labels, its sources, its retrieval summary. A copy is used only if it scores as well as its row on
all four scores: contract, citations, grounding and refusal. Because of this check, the functions that make copies need
not know every way in which an answer may mention its documents.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa import statements
from cria_tricks.kwanzaa.prompt import Document, QARow, read_rows
from cria_tricks.kwanzaa.scores import SCORERS, refuses, should_refuse
from cria_tricks.recipe import Recipe

REFUSAL = "I cannot answer this from the retrieved documents: none of them says it."
"""The answer of a copy whose cited documents are removed."""
NOTHING_RETRIEVED = "No relevant documents were retrieved from the corpus."
"""What a prompt says in place of the documents if a copy has none."""


def shuffle_documents(row: QARow, draw: random.Random) -> Chat | None:
    """Shuffle the documents and renumber the labels in the answer; ``None`` if there are fewer than two documents."""
    documents = list(row.documents)
    if all(document == documents[0] for document in documents):
        return None  # every order is the same
    shuffled = documents
    while shuffled == documents:
        shuffled = draw.sample(documents, len(documents))
    return _with_documents(row, shuffled)


def drop_uncited(row: QARow, draw: random.Random) -> Chat | None:
    """Keep only the documents that the answer cites; ``None`` if it cites none or all of them."""
    cited = _cited(row)
    if not cited or len(cited) == len(row.documents):
        return None
    return _with_documents(row, cited)


def drop_cited(row: QARow, draw: random.Random) -> Chat | None:
    """Remove the documents that the answer cites, and replace the answer by a refusal.

    Returns:
        The copy; ``None`` if the answer cites nothing, is a refusal already, or was allowed to be creative.
    """
    cited = _cited(row)
    if not cited or should_refuse(row) or row.reference.said("toggles", "creative_mode"):
        return None
    left = [document for document in row.documents if document not in cited]
    copy = _with_documents(row, left)
    fields = json.loads(copy.messages[-1]["content"])
    fields["answer"] |= {"text": REFUSAL, "completeness": "insufficient_data"}
    fields["answer"].pop("confidence", None)  # it was the confidence in the old answer
    # The contract allows 1,000 characters for what is missing.
    fields["sources"] = []
    fields["unknowns"] |= {"unsupported_claims": [], "missing_context": [f"A document on: {row.query}"[:1000]]}
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
"""The function that makes each kind of copy, by the name of the kind's field in ``recipe.data``."""


def of(recipe: Recipe) -> Callable[[Chat], Iterable[tuple[str, Chat]]] | None:
    """Return a function that makes the copies of a row that a recipe asks for; ``None`` if it asks for none."""
    shares = {kind: getattr(recipe.data, kind) for kind in KINDS}
    shares = {kind: share for kind, share in shares.items() if share}
    if not shares:
        return None
    return Augment(shares, recipe.train.seed).copies


@dataclass(frozen=True)
class Augment:
    """Make copies of randomly chosen rows.

    Attributes:
        shares: the share of the rows that get a copy (0 to 1), by kind.
        seed: decides, together with the text of a row, whether that row gets a copy. So the choice does not depend on
            the order of the rows.
    """

    shares: Mapping[str, float]
    seed: int

    def copies(self, chat: Chat) -> Iterable[tuple[str, Chat]]:
        """Yield each copy of a row with its kind; no copies if the row does not keep the contract."""
        if not chat.messages:
            return
        [row] = read_rows([chat])
        for kind, share in self.shares.items():
            draw = random.Random(f"{self.seed} {kind} {chat.content}")
            if draw.random() >= share:
                continue
            copy = KINDS[kind](row, draw)
            if copy and _keeps(row, copy):
                yield kind, replace(copy, tools=chat.tools, untrained=chat.untrained)


def _keeps(row: QARow, copy: Chat) -> bool:
    """Tell whether a copy is as good as its row: no score is lower, and it refuses if its reference fields say so."""
    [changed] = read_rows([copy])
    if should_refuse(changed) and not refuses(changed.reference):
        return False
    scorers = SCORERS.values()
    return all(score(changed, changed.reference).value >= score(row, row.reference).value for score in scorers)


def _cited(row: QARow) -> list[Document]:
    """List the documents whose labels are in the text of the answer."""
    labels = set(statements.labels(row.reference.text))
    return [document for document in row.documents if document.number in labels]


def _with_documents(row: QARow, documents: Sequence[Document]) -> Chat:
    """Copy a row with only these of its documents, numbered from 1, and with the labels in its answer renumbered."""
    numbers = {document.number: new for new, document in enumerate(documents, 1)}  # old label -> new label
    turn = {"role": "user", "content": _turn_with(row, documents, numbers)}
    fields = json.loads(json.dumps(row.reference.fields))  # a deep copy
    for part in ("answer", "unknowns"):  # both may contain labels, such as [1]
        text = json.dumps(fields[part])
        fields[part] = json.loads(statements.LABELS.sub(lambda match: _renumbered(match, numbers), text))
    fields["sources"] = _in_order(fields["sources"], row.documents, numbers)
    summary = fields["retrieval_summary"]
    summary["results"] = _in_order(summary["results"], row.documents, numbers)
    for rank, result in enumerate(summary["results"], 1):
        result["rank"] = rank
    messages = (*row.messages[:-1], turn, {"role": "assistant", "content": ""})
    return _with_answer(Chat(messages, "", "", row.where), row, fields)


def _turn_with(row: QARow, documents: Sequence[Document], numbers: Mapping[int, int]) -> str:
    """Write the user's turn with these documents, and between them the same separator as in the row."""
    turn = row.messages[-1]["content"]
    first = row.documents[0]
    last = row.documents[-1]
    begin = turn.index(first.text)
    end = turn.index(last.text) + len(last.text)
    if not documents:
        return NOTHING_RETRIEVED + turn[end:]
    gap = ""
    if first != last:
        # The separator: what stands between the first document and the label of the second one.
        gap = turn[begin + len(first.text) :].partition("[")[0]
    blocks = []
    for document in documents:
        _, _, behind_label = document.text.partition("]")
        blocks.append(f"[{numbers[document.number]}]{behind_label}")
    return turn[:begin] + gap.join(blocks) + turn[end:]


def _renumbered(match: re.Match[str], numbers: Mapping[int, int]) -> str:
    """Rewrite a label such as ``[1, 2]`` with the new numbers; the number of a removed document stays."""
    found = [int(number) for number in match[1].split(",")]
    return "[" + ", ".join(str(numbers.get(number, number)) for number in found) + "]"


def _in_order(
    entries: Sequence[dict[str, Any]], documents: Sequence[Document], numbers: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Sort the entries of an answer's list by the new numbers of their documents.

    Entries of removed documents are dropped. An entry whose document cannot be told stays, at the end.
    """
    placed = []
    for entry in entries:
        about = entry.get("metadata")  # in some rows of the real data, label and URL are in there
        named = {**about, **entry} if isinstance(about, dict) else entry
        number = next((document.number for document in documents if document.is_named_by(named)), 0)
        if number in numbers or not number:
            placed.append((numbers.get(number, len(documents) + 1), entry))
    placed.sort(key=lambda pair: pair[0])
    return [entry for _, entry in placed]


def _with_answer(chat: Chat, row: QARow, fields: dict[str, Any]) -> Chat:
    """Replace the last turn of a chat by an answer, as JSON in the style of the row: on one line, or indented."""
    raw = row.reference.raw
    indent = None
    separators = (", ", ": ")
    if "\n" in raw.strip():
        indent = 2
        separators = (",", ": ")
    elif '": ' not in raw:
        separators = (",", ":")
    # Non-ASCII letters are escaped only if the row escapes them.
    written = json.dumps(fields, indent=indent, separators=separators, ensure_ascii="\\u" in raw)
    return replace(chat, messages=(*chat.messages[:-1], {"role": "assistant", "content": written}))
