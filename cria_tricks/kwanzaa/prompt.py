"""What a row asks: the documents and the question in the user's turn, and the answer that the data gives."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cria_tricks.data.chat import Chat
from cria_tricks.errors import BadInput
from cria_tricks.kwanzaa.reply import Reply, read

_DOCUMENT = re.compile(r"^\[(\d+)\] +(\S.*)$", re.MULTILINE)
_QUESTION = re.compile(r"^(?:Query|Question): *(.+?)(?:\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
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
    """

    where: str
    messages: tuple[dict[str, str], ...]
    prompt: Prompt
    reference: Reply


def read_prompt(turn: str) -> Prompt:
    """Find documents and question in a user's turn.

    A document begins with a line ``[1] title``. The question stands behind ``Query:`` or ``Question:``, after the
    documents.
    """
    questions = list(_QUESTION.finditer(turn))
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
    """Split chat rows into what is asked and what the data answers.

    Raises:
        BadInput: for the first row whose last turn is no answer of the contract.
    """
    rows = []
    for chat in chats:
        if not chat.messages or chat.messages[-1]["role"] != "assistant":
            raise BadInput(f"{chat.where}: to be evaluated, a row needs messages that end with the assistant's")
        reference = read(chat.messages[-1]["content"])
        if reference.fields is None or not reference.text:
            raise BadInput(
                f"{chat.where}: the assistant's turn is no answer of the contract (a JSON object with answer.text, "
                "sources, ...), so there is nothing to score against; --data takes rows like kwanzaa or nguzo_saba"
            )
        before = chat.messages[:-1]
        rows.append(Row(chat.where, before, read_prompt(before[-1]["content"]), reference))
    return rows
