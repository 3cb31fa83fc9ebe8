"""What a row asks, and the answer that the data gives: with documents, where both keep the answer contract."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cria_tricks.data.rows import QUESTION, Chat
from cria_tricks.kwanzaa.reply import Reply, plain, read

_DOCUMENT = re.compile(r"^\[(\d+)\] +(\S.*)$", re.MULTILINE)

_URL = re.compile(r"^URL: *(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """A document that was retrieved.

    Attributes:
        number: its label, as in ``[1]``.
        title: the rest of the label's line.
        text: all of it, with title, source, content and address.
        url: its address; empty where none is given.
    """

    number: int
    title: str
    text: str
    url: str


@dataclass(frozen=True)
class Prompt:
    """A user's turn.

    Attributes:
        documents: what was retrieved; empty when nothing was.
        query: the question; the whole turn where none is marked as one.
    """

    documents: tuple[Document, ...]
    query: str

    @property
    def evidence(self) -> str:
        """All that an answer may rest on."""
        return "\n".join([*(document.text for document in self.documents), self.query])


@dataclass(frozen=True)
class Row:
    """A held-out row.

    Attributes:
        where: file and line.
        messages: the turns before the answer.
        prompt: the last of them, read.
        reference: the data's own answer.
        contract: whether it keeps the answer contract, so that answers to the row can be scored.
    """

    where: str
    messages: tuple[dict[str, str], ...]
    prompt: Prompt
    reference: Reply
    contract: bool = True


def read_prompt(turn: str) -> Prompt:
    """Find documents and question in a user's turn.

    A document begins with a line ``[1] title``. The question stands behind ``Query:`` or ``Question:``, after the
    documents.
    """
    questions = list(QUESTION.finditer(turn))
    question = questions[-1] if questions else None
    listed = turn[: question.start()] if question else turn
    begins = list(_DOCUMENT.finditer(listed))
    ends = [*(match.start() for match in begins[1:]), len(listed)]
    documents = []
    for match, end in zip(begins, ends, strict=False):
        text = listed[match.start() : end].strip()
        url = _URL.search(text)
        documents.append(Document(int(match[1]), match[2].strip(), text, url[1] if url else ""))
    return Prompt(tuple(documents), (question[1] if question else turn).strip())


def read_rows(chats: Sequence[Chat]) -> list[Row]:
    """Split rows into what is asked and what the data answers.

    If one of them has no answer of the contract, none is taken for a row of the contract: a mean over some of the rows
    would be taken for one over all.
    """
    if all(map(keeps_contract, chats)):
        return [Row(c.where, c.before_answer, read_prompt(_last(c)), read(c.answer)) for c in chats]
    return [Row(c.where, c.before_answer, Prompt((), _last(c)), plain(c.answer), False) for c in chats]


def keeps_contract(chat: Chat) -> bool:
    """Whether a row is a chat that ends with an answer of the contract: a JSON object with ``answer.text``."""
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        return False
    reference = read(chat.answer)
    return reference.fields is not None and bool(reference.text)


def _last(chat: Chat) -> str:
    """The last thing that is asked; nothing for a text."""
    return chat.before_answer[-1]["content"] if chat.messages else chat.prompt
