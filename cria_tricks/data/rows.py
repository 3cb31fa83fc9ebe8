"""Read and check rows of chats and texts before any model is loaded, so that a wrong row costs nothing.

Five kinds of JSONL rows are read. A row with the fields of several kinds is read as the first of them::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}

The fourth is ShareGPT's, the fifth Alpaca's. Both become a list of messages, so the chat template formats them and the
loss is on the assistant's turns. An Alpaca row becomes two turns. The user's turn is the instruction, followed by an
empty line and the input if there is one. The assistant's turn is the output. In both kinds, a text in the field
``system`` becomes the system message.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.common.names import repeated

ROLES = ("system", "user", "assistant")
SHAREGPT = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
"""Our role for each value that ``from`` may have in a ShareGPT row."""
ONE_A_LINE = "write one object a line: jq -c '.[]' FILE > FILE.jsonl"
"""The advice for a file that is one JSON list."""
_QUESTION = re.compile(r"^(?:Query|Question): *(.+?)(?:\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
"""Finds the question in a turn that also holds retrieved documents, as in Kwanzaa's rows and ours. It begins with one
of these marks and ends at an empty line, or at the end of the turn."""


@dataclass(frozen=True)
class Chat:
    """One training example: a chat, a prompt with its completion, or a text.

    Attributes:
        messages: role and content of each turn; empty for a row of another kind.
        prompt: the text before the completion, without a loss; empty for a row of another kind.
        completion: the text that the model learns to write; empty for a row of another kind.
        where: file and line, for error messages.
        text: a document, with the loss on all of it; empty for a row of another kind.
    """

    messages: tuple[dict[str, str], ...]
    prompt: str
    completion: str
    where: str
    text: str = ""

    @property
    def kind(self) -> str:
        """``chat``, ``completion`` or ``text``: this decides how the row is tokenised, and which tokens are trained."""
        if self.messages:
            return "chat"
        return "text" if self.text else "completion"

    @property
    def answer(self) -> str:
        """What a model should write: the last of the assistant's turns, the completion, or the text."""
        if self.messages:
            return self.messages[self._asked]["content"]
        return self.text or self.completion

    @property
    def before_answer(self) -> tuple[dict[str, str], ...]:
        """The turns before :attr:`answer`; empty for a row of another kind than ``chat``."""
        return self.messages[: self._asked] if self.messages else ()

    @property
    def _asked(self) -> int:
        return max(turn for turn, message in enumerate(self.messages) if message["role"] == "assistant")

    @property
    def content(self) -> str:
        """All text of the row, without the roles."""
        if self.messages:
            return "\n".join(message["content"] for message in self.messages)
        return self.text or f"{self.prompt}\n{self.completion}"


def marked_question(turn: str) -> re.Match[str] | None:
    """Find the question that a user's turn marks with ``Query:`` or ``Question:``, the last one if there are several.

    Returns:
        The match, whose group 1 is the question; ``None`` if none is marked.
    """
    questions = list(_QUESTION.finditer(turn))
    return questions[-1] if questions else None


def read_jsonl(path: str | Path) -> list[Chat]:
    """Read and check a whole file; the errors are those of :func:`reading`."""
    return list(reading(path))


def reading(path: str | Path) -> Iterator[Chat]:
    """Read and check the rows of a file, one after another.

    Raises:
        BadInput: naming file, line and field of the first row that is wrong.
    """
    found = False
    for row in check_rows(_parsed(path)):
        found = True
        yield row
    if not found:
        raise BadInput(f"data {path}: no rows; one JSON object a line is expected")


def _parsed(path: str | Path) -> Iterator[tuple[Any, str]]:
    number = 0
    try:
        # In binary, lines end at a line feed alone: U+2028 is no end of a line, and may stand inside a JSON string.
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    where = f"{path}:{number}"
                    yield parse(text, where), where
    except UnicodeDecodeError as error:
        raise BadInput(f"data {path}:{number}: not UTF-8 text (byte {error.start} of the line)") from None
    except OSError as error:
        raise BadInput(f"data {path}: cannot be read: {error.strerror}") from None


def parse(line: str, where: str) -> Any:
    """Parse one line.

    Args:
        line: the line.
        where: its place, for error messages.

    Raises:
        BadInput: if it is not JSON, or an object in it has a key twice.
    """
    try:
        return json.loads(line, object_pairs_hook=_without_repeats)
    except _Repeated as error:
        raise BadInput(f"{where}: the key {error} is there twice, and only one value can count; keep one") from None
    except json.JSONDecodeError as error:
        if line.strip() == "[":
            raise BadInput(f"{where}: begins a JSON list over several lines; {ONE_A_LINE}") from None
        raise BadInput(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or lists too deep
        raise BadInput(f"{where}: not a row: {str(error).partition(';')[0]}") from None  # after it: Python's own advice


class _Repeated(Exception):
    """A JSON object has a key twice; Python's reader would silently take the last value."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _Repeated(reprlib.repr(repeated([key for key, _ in pairs])))
    return row


def check_rows(rows: Iterable[tuple[Any, str]]) -> Iterator[Chat]:
    """Check parsed rows, each given with its place for error messages.

    Raises:
        BadInput: for the first row that is of none of the five kinds, or has nothing to train on.
    """
    for row, where in rows:
        if not isinstance(row, dict):
            is_list_of_rows = isinstance(row, list) and row and isinstance(row[0], dict)
            cure = f"; {ONE_A_LINE}" if is_list_of_rows else ""
            raise BadInput(f"{where}: a row must be a JSON object, not {type(row).__name__}{cure}")
        if not _is_unicode(row):
            raise BadInput(f"{where}: holds half a surrogate pair (\\ud800 to \\udfff), which is no character")
        yield _checked(row, where)


def _checked(row: dict[str, Any], where: str) -> Chat:
    """Read a row as the first of the kinds whose fields it has."""
    if row.get("messages") is not None:
        return Chat(_checked_messages(row["messages"], where), "", "", where)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt = row["prompt"]
        completion = row["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadInput(f"{where}: prompt and completion must be text")
        if not completion.strip():
            raise BadInput(f"{where}: completion is empty, so there is nothing to train on")
        return Chat((), prompt, completion, where)
    if row.get("text") is not None:
        if not isinstance(row["text"], str):
            raise BadInput(f"{where}: text must be text, not {type(row['text']).__name__}")
        if not row["text"].strip():
            raise BadInput(f"{where}: text is empty, so there is nothing to train on")
        return Chat((), "", "", where, row["text"])
    if row.get("conversations") is not None:
        return Chat(_sharegpt(row, where), "", "", where)
    if row.get("instruction") is not None and row.get("output") is not None:
        return Chat(_alpaca(row, where), "", "", where)
    raise BadInput(
        f"{where}: a row needs the field messages, the fields prompt and completion, or text; or those of ShareGPT "
        "(conversations) or Alpaca (instruction and output)"
    )


def _sharegpt(row: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{where}: conversations must be a list with at least one turn")
    messages = _system(row, where)
    for index, turn in enumerate(turns):
        place = f"{where}: conversations[{index}]"
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise BadInput(f"{place} must be an object with from and value; with role and content it is messages")
        said = turn["from"]
        if not isinstance(said, str) or said not in SHAREGPT:
            raise BadInput(f"{place}.from is {reprlib.repr(said)}; it must be one of {', '.join(SHAREGPT)}")
        if not isinstance(turn["value"], str):
            raise BadInput(f"{place}.value must be text, not {type(turn['value']).__name__}")
        messages.append({"role": SHAREGPT[said], "content": turn["value"]})
    return _checked_messages(messages, f"{where}: conversations as messages")


def _alpaca(row: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    asked = row["instruction"]
    given = row.get("input") or ""
    answer = row["output"]
    for name, text in (("instruction", asked), ("input", given), ("output", answer)):
        if not isinstance(text, str):
            raise BadInput(f"{where}: {name} must be text, not {type(text).__name__}")
    for name, text in (("instruction", asked), ("output", answer)):
        if not text.strip():
            raise BadInput(f"{where}: {name} is empty, so there is nothing to train on")
    if row.get("history"):
        raise BadInput(f"{where}: history holds earlier turns, which are not read here; write them all as messages")
    user = f"{asked}\n\n{given}" if given.strip() else asked
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return _checked_messages([*_system(row, where), *turns], where)


def _system(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """Return the system message of a ShareGPT or Alpaca row, in a list that is empty if the row has none."""
    text = row.get("system") or ""
    if not isinstance(text, str):
        raise BadInput(f"{where}: system must be text, not {type(text).__name__}")
    if not text.strip():
        return []
    return [{"role": "system", "content": text}]


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
        role = message.get("role")
        content = message.get("content")
        if role not in ROLES:
            raise BadInput(f"{place}.role is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadInput(f"{place}.content must be text, not {type(content).__name__}")
        if role == "assistant" and not content.strip():
            raise BadInput(f"{place}.content is empty, so there is nothing to train on")
        late_system = role == "system" and index > 0
        unasked_answer = role == "assistant" and before != "user"
        if late_system or unasked_answer or role == before:
            raise BadInput(
                f"{place}.role is {role} after {before or 'nothing'}; the order is: system (or none), then user "
                "and assistant in turn"
            )
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInput(f"{where}: messages holds no assistant turn, so there is nothing to train on")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)
