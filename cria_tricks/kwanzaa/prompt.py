"""Rows split into question, retrieved documents and the data's own answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cria_tricks.data.rows import Chat, marked_question
from cria_tricks.kwanzaa.reply import Reply, plain_reply, read_reply

_DOCUMENT = re.compile(r"^\[(\d+)\] +(\S.*)$", re.MULTILINE)
_URL = re.compile(r"^URL: *(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """A document that was retrieved.

    Attributes:
        number: its label: 1 for ``[1]``.
        title: the rest of the label's line.
        text: the whole document, with title, source, content and address.
        url: its address; empty where none is given.
    """

    number: int
    title: str
    text: str
    url: str


@dataclass(frozen=True)
class RetrievalPrompt:
    """A user's turn, split into what was retrieved and what is asked.

    Attributes:
        documents: the documents that were retrieved; empty when there were none.
        query: the question; the whole turn where none is marked as one.
    """

    documents: tuple[Document, ...]
    query: str

    @property
    def evidence(self) -> str:
        """The text on which an answer may rest: the documents and the question."""
        return "\n".join([*(document.text for document in self.documents), self.query])


@dataclass(frozen=True)
class QARow:
    """A row, split into what is asked and the data's own answer.

    Attributes:
        where: file and line.
        messages: the turns before the answer.
        prompt: the last of these turns, split into documents and question.
        reference: the data's own answer.
        contract: whether the reference keeps the answer contract, so that answers to the row can be scored.
    """

    where: str
    messages: tuple[dict[str, str], ...]
    prompt: RetrievalPrompt
    reference: Reply
    contract: bool = True


def read_prompt(turn: str) -> RetrievalPrompt:
    """Find documents and question in a user's turn.

    A document begins with a line ``[1] title``. The question stands behind ``Query:`` or ``Question:``, after the
    documents.
    """
    question = marked_question(turn)
    if question is None:
        return RetrievalPrompt(_read_documents(turn), turn.strip())
    return RetrievalPrompt(_read_documents(turn[: question.start()]), question[1].strip())


def _read_documents(text: str) -> tuple[Document, ...]:
    begins = list(_DOCUMENT.finditer(text))
    ends = [*(match.start() for match in begins[1:]), len(text)]
    documents = []
    for match, end in zip(begins, ends, strict=False):  # without documents there is an end and no begin
        block = text[match.start() : end].strip()
        url = _URL.search(block)
        documents.append(Document(int(match[1]), match[2].strip(), block, url[1] if url else ""))
    return tuple(documents)


def read_rows(chats: Sequence[Chat]) -> list[QARow]:
    """Split rows into what is asked and what the data answers.

    If one of them has no answer of the contract, none is taken for a row of the contract: a mean over some of the rows
    would be taken for one over all.
    """
    if all(map(keeps_contract, chats)):
        return [QARow(c.where, c.before_answer, read_prompt(_last(c)), read_reply(c.answer)) for c in chats]
    return [QARow(c.where, c.before_answer, RetrievalPrompt((), _last(c)), plain_reply(c.answer), False) for c in chats]


def keeps_contract(chat: Chat) -> bool:
    """Tell whether a row is a chat that ends with an answer of the contract: a JSON object with ``answer.text``."""
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        return False
    reference = read_reply(chat.answer)
    return reference.fields is not None and bool(reference.text)


def _last(chat: Chat) -> str:
    """The last thing that is asked; nothing for a text."""
    if chat.messages:
        return chat.before_answer[-1]["content"]
    return chat.prompt
