"""Split rows into the retrieved documents, the question, and the data's own answer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cria_tricks.data.rows import Chat, marked_question
from cria_tricks.kwanzaa.contract import Reply, plain_reply, read_reply

_DOCUMENT = re.compile(r"\[(\d+)\] +(\S.*)")
_URL = re.compile(r"^URL: *(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """A document that was retrieved for the question.

    Attributes:
        number: its label, 1 for ``[1]``.
        title: the rest of the line that begins with the label.
        text: the whole document: label, title, source, content and URL.
        url: its URL; empty if none is given.
    """

    number: int
    title: str
    text: str
    url: str

    def is_named_by(self, entry: Mapping[str, Any]) -> bool:
        """Tell whether an entry of an answer's list, such as a source, names this document by its URL or title."""
        if self.url and entry.get("canonical_url") == self.url:
            return True
        label = entry.get("citation_label")
        # The label may be a shortened title: one that ends before a colon. "A" stands for the title "A: B".
        return isinstance(label, str) and label != "" and f"{self.title}:".startswith(f"{label.strip()}:")


@dataclass(frozen=True)
class QARow:
    """A row, split into what is asked and the data's own answer.

    Attributes:
        where: file and line of the row.
        messages: the turns before the answer; the last of them holds documents and question.
        documents: the documents that were retrieved; empty if there were none.
        query: the question; the whole turn if no question is marked.
        reference: the data's own answer.
        contract: whether the reference keeps the answer contract, so that answers to the row can be scored.
    """

    where: str
    messages: tuple[dict[str, str], ...]
    documents: tuple[Document, ...]
    query: str
    reference: Reply
    contract: bool = True

    @property
    def evidence(self) -> str:
        """The text that may support an answer: the documents and the question."""
        return "\n".join([*(document.text for document in self.documents), self.query])


def read_prompt(turn: str) -> tuple[tuple[Document, ...], str]:
    """Find the documents and the question in a user's turn.

    Each document begins with a line such as ``[1] title``. The question follows the documents, after ``Query:`` or
    ``Question:``.
    """
    query = turn.strip()
    question = marked_question(turn)
    if question:
        query = question[1].strip()
        turn = turn[: question.start()]
    documents = []
    # What stands before the first document makes no match.
    for block in re.split(r"^(?=\[\d+\] +\S)", turn, flags=re.MULTILINE):
        begin = _DOCUMENT.match(block)
        if begin:
            url = _URL.search(block)
            documents.append(Document(int(begin[1]), begin[2].strip(), block.strip(), url[1] if url else ""))
    return tuple(documents), query


def read_rows(chats: Sequence[Chat]) -> list[QARow]:
    """Split rows into what is asked and the data's own answer.

    If the answer of one row is not in the form of the contract, all rows are read as plain text and none gets scores.
    Otherwise a mean over some of the rows would be mistaken for a mean over all rows.
    """
    if all(map(keeps_contract, chats)):
        return [QARow(c.where, c.before_answer, *read_prompt(_last(c)), read_reply(c.answer)) for c in chats]
    return [QARow(c.where, c.before_answer, (), _last(c), plain_reply(c.answer), contract=False) for c in chats]


def keeps_contract(chat: Chat) -> bool:
    """Tell whether a row is a chat that ends with an answer of the contract: a JSON object with ``answer.text``.

    Other violations of the contract do not matter here; :func:`cria_tricks.kwanzaa.contract.read_reply` lists them.
    """
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        return False
    reference = read_reply(chat.answer)
    return reference.fields is not None and bool(reference.text)


def _last(chat: Chat) -> str:
    """Return the last turn before the answer, or the prompt of a completion; empty for a text."""
    if chat.before_answer:
        return chat.before_answer[-1]["content"]
    return chat.prompt
