"""Rows of chats and texts: read and checked before any model is loaded, so that a wrong row costs nothing.

Three kinds of JSONL rows are read: a list of messages, a pair of texts, or one text::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
"""

import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.errors import BadInput

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Chat:
    """One row.

    Attributes:
        messages: role and content of each turn; empty for a row of another kind.
        prompt: text before what is trained; empty for a row of another kind.
        completion: text that is trained; empty for a row of another kind.
        where: file and line, for error messages.
        text: a document, all of which is trained; empty for a row of another kind.
    """

    messages: tuple[dict[str, str], ...]
    prompt: str
    completion: str
    where: str
    text: str = ""

    @property
    def kind(self) -> str:
        """``chat``, ``completion`` or ``text``: how it is written as tokens, and what of it is trained."""
        return "chat" if self.messages else "text" if self.text else "completion"

    @property
    def content(self) -> str:
        """All that it says, roles left out."""
        if self.messages:
            return "\n".join(message["content"] for message in self.messages)
        return self.text or f"{self.prompt}\n{self.completion}"


def read_jsonl(path: str | Path) -> list[Chat]:
    """Read and check a whole file.

    Raises:
        BadInput: naming file, line and field of the first row that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"data {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise BadInput(f"data {path}: cannot be read: {error.strerror}") from None
    rows = list(check_rows(_parsed(text, path)))
    if not rows:
        raise BadInput(f"data {path}: no rows; one JSON object a line is expected")
    return rows


def _parsed(text: str, path: str | Path) -> Iterator[tuple[Any, str]]:
    # Not splitlines(): it also splits at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield parse(line, where), where


def parse(line: str, where: str) -> Any:
    """Read one line.

    Raises:
        BadInput: if it is no JSON.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or lists too deep
        raise BadInput(f"{where}: not a row: {error}") from None


def check_rows(rows: Iterable[tuple[Any, str]]) -> Iterator[Chat]:
    """Check parsed rows, each with its place.

    Raises:
        BadInput: for the first row that is of no kind, or holds nothing to train on.
    """
    for row, where in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{where}: a row must be a JSON object, not {type(row).__name__}")
        if not _is_unicode(row):
            raise BadInput(f"{where}: holds half a surrogate pair (\\ud800 to \\udfff), which is no character")
        if row.get("messages") is not None:
            yield Chat(_checked_messages(row["messages"], where), "", "", where)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            prompt, completion = row["prompt"], row["completion"]
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise BadInput(f"{where}: prompt and completion must be text")
            if not completion.strip():
                raise BadInput(f"{where}: completion is empty, so there is nothing to train on")
            yield Chat((), prompt, completion, where)
        elif row.get("text") is not None:
            if not isinstance(row["text"], str):
                raise BadInput(f"{where}: text must be text, not {type(row['text']).__name__}")
            if not row["text"].strip():
                raise BadInput(f"{where}: text is empty, so there is nothing to train on")
            yield Chat((), "", "", where, row["text"])
        else:
            raise BadInput(f"{where}: a row needs the field messages, the fields prompt and completion, or text")


def _is_unicode(row: Any) -> bool:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_messages(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise BadInput(f"{where}: messages must be a list with at least one message")
    before = ""
    for index, message in enumerate(messages):
        place = f"{where}: messages[{index}]"
        if not isinstance(message, dict):
            raise BadInput(f"{place} must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadInput(f"{place}.role is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadInput(f"{place}.content must be text, not {type(content).__name__}")
        if role == "assistant" and not content.strip():
            raise BadInput(f"{place}.content is empty, so there is nothing to train on")
        if (role == "system" and index > 0) or role == before or (role == "assistant" and before != "user"):
            raise BadInput(
                f"{place}.role is {role} after {before or 'nothing'}; the order is: system (or none), then user "
                "and assistant in turn"
            )
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInput(f"{where}: messages holds no assistant turn, so there is nothing to train on")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)
