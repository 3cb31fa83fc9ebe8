"""Check rows of chats and texts before any model is loaded, so that a wrong row costs nothing.

Several forms of rows are read. A row with the fields of several forms is read as the first of them::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}
    {"instruction": "...", "context": "...", "response": "..."}
    {"question": "...", "answer": "..."}
    {"text": "..."}

They are OpenAI's, TRL's, ShareGPT's, Alpaca's, Dolly's, that of questions and answers, and plain text. All but prompt
and completion, and text, become a list of messages, so the chat template formats them, and the loss is on the
assistant's turns. An instruction or question becomes the user's turn, followed by an empty line and the input or
context if there is one. A text in the field ``system`` becomes the system message.

What changes the text that is trained is used or refused, never dropped: ``weight`` and ``train`` of a message, its
reasoning and tool calls, and the tools of a row.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.data.files import raw_rows

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
"""Our role for each value that ``from`` may have in a ShareGPT row."""
ASKED = (
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("question", "context", "answer"),
)
"""The fields of forms that become one question with its answer: what is asked, what is given with it, the answer."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which a message may hold the reasoning before its answer; which one is read depends on the template."""
UNREAD_ROW = {
    "history": "holds earlier turns, which are not read here; write them all as messages",
    "functions": "is OpenAI's older form; write tools",
    "images": "holds images; only text is trained here",
    "audio": "holds audio; only text is trained here",
    "chosen": "is of preferences, which are not trained here; write messages",
    "rejected": "is of preferences, which are not trained here; write messages",
}
"""Fields of a row that would change what is trained, and are not read."""
UNREAD_MESSAGE = {
    "function_call": "is OpenAI's older form; write tool_calls",
    "refusal": "is an answer that is no content; write it as content",
    "audio": "holds audio; only text is trained here",
    "images": "holds images; only text is trained here",
}
"""The same of a message."""
_QUESTION = re.compile(r"^(?:Query|Question): *(.+?)(?:\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
"""Finds the question in a turn that also holds retrieved documents, as in Kwanzaa's rows and ours. It begins with one
of these marks and ends at an empty line, or at the end of the turn."""


@dataclass(frozen=True)
class Chat:
    """One training example: a chat, a prompt with its completion, or a text.

    Attributes:
        messages: role and content of each turn, and reasoning and tool calls if it has some; empty for a row of another
            kind.
        prompt: the text before the completion, without a loss; empty for a row of another kind.
        completion: the text that the model learns to write; empty for a row of another kind.
        where: file and line, for error messages.
        text: a document, with the loss on all of it; empty for a row of another kind.
        tools: the functions that the assistant may call, as JSON schemas, for the chat template.
        untrained: the numbers of the assistant's turns that are not trained.
    """

    messages: tuple[dict[str, Any], ...]
    prompt: str
    completion: str
    where: str
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    untrained: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """``chat``, ``completion`` or ``text``: this decides how the row is tokenised, and which tokens are trained."""
        if self.messages:
            return "chat"
        return "text" if self.text else "completion"

    @property
    def answer(self) -> str:
        """What a model should write: the last of the assistant's trained turns, the completion, or the text."""
        if self.messages:
            return self.messages[self._asked]["content"]
        return self.text or self.completion

    @property
    def before_answer(self) -> tuple[dict[str, Any], ...]:
        """The turns before :attr:`answer`; empty for a row of another kind than ``chat``."""
        return self.messages[: self._asked] if self.messages else ()

    @property
    def _asked(self) -> int:
        return max(self.trained_turns)

    @property
    def trained_turns(self) -> list[int]:
        """The numbers of the assistant's turns that are trained."""
        turns = enumerate(self.messages)
        return [turn for turn, message in turns if message["role"] == "assistant" and turn not in self.untrained]

    @property
    def content(self) -> str:
        """All text of the row, without the roles."""
        if self.messages:
            return "\n".join(message["content"] for message in self.messages)
        return self.text or f"{self.prompt}\n{self.completion}"

    @property
    def key(self) -> str:
        """All that is trained or read in the row, as one text: equal rows have equal keys."""
        content: list[Any] = [self.messages, self.prompt, self.completion]
        if self.text:
            content.append(self.text)
        if self.tools or self.untrained:
            content += [self.tools, self.untrained]
        return json.dumps(content)


def marked_question(turn: str) -> re.Match[str] | None:
    """Find the question that a user's turn marks with ``Query:`` or ``Question:``, the last one if there are several.

    Returns:
        The match, whose group 1 is the question; ``None`` if none is marked.
    """
    questions = list(_QUESTION.finditer(turn))
    return questions[-1] if questions else None


def read_file(path: str | Path) -> list[Chat]:
    """Read and check a whole file; the errors are those of :func:`reading`."""
    return list(reading(path))


def reading(path: str | Path) -> Iterator[Chat]:
    """Read and check the rows of a file, one after another.

    Raises:
        BadInput: naming file, line and field of the first row that is wrong.
    """
    found = False
    for row in check_rows(raw_rows(Path(path))):
        found = True
        yield row
    if not found:
        raise BadInput(f"data {path}: no rows in it")


def check_rows(rows: Iterable[tuple[Any, str]]) -> Iterator[Chat]:
    """Check parsed rows, each given with its place for error messages.

    Raises:
        BadInput: for the first row that is of none of the forms, or has nothing to train on.
    """
    for row, where in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{where}: a row must be a JSON object, not {type(row).__name__}")
        if not _is_unicode(row):
            raise BadInput(f"{where}: holds half a surrogate pair (\\ud800 to \\udfff), which is no character")
        yield _checked(row, where)


def _checked(row: dict[str, Any], where: str) -> Chat:
    """Read a row as the first of the forms whose fields it has."""
    for name, why in UNREAD_ROW.items():
        if row.get(name):
            raise BadInput(f"{where}: {name} {why}")
    for name in ("weight", "train"):
        if row.get(name) is not None:
            raise BadInput(f"{where}: {name} of a whole row is not read; give answers a weight of 0 or 1 in messages")
    if row.get("messages") is not None:
        return _chat([*_system(row, where), *_list(row, "messages", where)], row, f"{where}: messages")
    if _has(row, "prompt", "completion"):
        return _completion(row, where)
    if row.get("conversations") is not None:
        return _chat(_sharegpt(row, where), row, f"{where}: conversations as messages")
    for asked, given, answer in ASKED:
        if _has(row, asked, answer):
            return _chat(_answered(row, asked, given, answer, where), row, f"{where}: messages")
    if row.get("text") is not None:
        return Chat((), "", "", where, _text(row, "text", where))
    named = [str(name) for name, value in row.items() if value is not None]
    raise BadInput(
        f"{where}: has the fields {', '.join(named) or 'none'}; a row needs messages, prompt and completion, "
        "conversations, instruction and output (or response), question and answer, or text"
    )


def _has(row: Mapping[str, Any], *fields: str) -> bool:
    """Tell whether a row is of the form with these fields; a table has all columns, also those of other forms."""
    return all(name in row for name in fields) and any(row[name] is not None for name in fields)


def _text(row: Mapping[str, Any], name: str, where: str, *, may_be_empty: bool = False) -> str:
    text = row.get(name)
    if may_be_empty and text is None:
        return ""
    if not isinstance(text, str):
        raise BadInput(f"{where}: {name} must be text, not {type(text).__name__}")
    if not may_be_empty and not text.strip():
        raise BadInput(f"{where}: {name} is empty, so there is nothing to train on")
    return text


def _list(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = row[name]
    if not isinstance(found, list) or not found:
        raise BadInput(f"{where}: {name} must be a list with at least one message")
    return found


def _completion(row: dict[str, Any], where: str) -> Chat:
    """Read a prompt with its completion: two texts, or two lists of messages, of which the second is trained."""
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        before = [*_system(row, where), *(_without_loss(message) for message in row["prompt"])]
        return _chat([*before, *row["completion"]], row, f"{where}: prompt and completion as messages")
    for name in ("system", "tools"):
        if row.get(name):
            raise BadInput(f"{where}: {name} has no place beside a prompt and a completion of text; write messages")
    completion = _text(row, "completion", where)
    return Chat((), _text(row, "prompt", where, may_be_empty=True), completion, where)


def _without_loss(message: Any) -> Any:
    if isinstance(message, dict) and message.get("role") == "assistant":
        return {**message, "weight": 0}
    return message


def _sharegpt(row: dict[str, Any], where: str) -> list[Any]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{where}: conversations must be a list with at least one turn")
    messages: list[Any] = _system(row, where)
    for index, turn in enumerate(turns):
        place = f"{where}: conversations[{index}]"
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise BadInput(f"{place} must be an object with from and value; with role and content it is messages")
        said = turn["from"]
        if not isinstance(said, str) or said not in SHAREGPT:
            raise BadInput(f"{place}.from is {reprlib.repr(said)}; it must be one of {', '.join(SHAREGPT)}")
        if not isinstance(turn["value"], str):
            raise BadInput(f"{place}.value must be text, not {type(turn['value']).__name__}")
        rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
        messages.append({**rest, "role": SHAREGPT[said], "content": turn["value"]})
    return messages


def _answered(row: dict[str, Any], asked: str, given: str, answer: str, where: str) -> list[Any]:
    user = _text(row, asked, where)
    more = _text(row, given, where, may_be_empty=True)
    if more.strip():
        user = f"{user}\n\n{more}"
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": _text(row, answer, where)}]
    return [*_system(row, where), *turns]


def _system(row: dict[str, Any], where: str) -> list[Any]:
    """Return the system message of a row, in a list that is empty if the row has none."""
    text = _text(row, "system", where, may_be_empty=True)
    if not text.strip():
        return []
    return [{"role": "system", "content": text}]


def _is_unicode(row: Any) -> bool:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _chat(messages: list[Any], row: Mapping[str, Any], where: str) -> Chat:
    """Check messages and their order.

    Args:
        messages: the messages as they are in the row.
        row: the row.
        where: its place, and how the messages are called in it.
    """
    place, _, name = where.rpartition(": ")
    called = where
    if name != "messages":
        called = f"{where}: messages"
    before = ""
    found = []
    untrained = []
    for index, message in enumerate(messages):
        at = f"{called}[{index}]"
        checked = _message(message, at)
        role = checked["role"]
        if not _may_follow(role, before, index):
            raise BadInput(
                f"{at}.role is {role} after {before or 'nothing'}; the order is: system (or none), then user and "
                "assistant in turn (results of tools between two answers)"
            )
        if role == "assistant" and not _is_trained(message, at):
            untrained.append(index)
        before = role
        found.append(checked)
    chat = Chat(tuple(found), "", "", place, tools=_tools(row, place), untrained=tuple(untrained))
    if not any(message["role"] == "assistant" for message in found):
        raise BadInput(f"{place}: {name} holds no assistant turn, so there is nothing to train on")
    if not chat.trained_turns:
        raise BadInput(f"{place}: no assistant turn has a weight other than 0, so there is nothing to train on")
    return chat


def _may_follow(role: str, before: str, index: int) -> bool:
    if role == "system":
        return index == 0
    if role == "user":
        return before != "user"
    if role == "tool":
        return before in ("assistant", "tool")
    return before in ("user", "tool")


def _message(message: Any, place: str) -> dict[str, Any]:
    """Check one message, and return it with the fields that are used."""
    if not isinstance(message, dict):
        raise BadInput(f"{place} must be an object with role and content")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise BadInput(f"{place}.role is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}")
    for name, why in UNREAD_MESSAGE.items():
        if message.get(name):
            raise BadInput(f"{place}.{name} {why}")
    calls = _calls(message, place)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = _joined(content, place)
    if not isinstance(content, str):
        raise BadInput(f"{place}.content must be text, not {type(content).__name__}")
    if role == "assistant" and not content.strip() and not calls:
        raise BadInput(f"{place}.content is empty, so there is nothing to train on")
    found: dict[str, Any] = {"role": role, "content": content}
    for name in REASONING:
        if message.get(name):
            found[name] = _text(message, name, place)
    if calls:
        found["tool_calls"] = calls
    if role == "tool":
        found |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    return found


def _joined(parts: list[Any], place: str) -> str:
    """Join OpenAI's parts of a content: objects with a type and a text."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadInput(
                f"{place}.content[{number}] is {reprlib.repr(kind)}; only parts of type text, with a text, are trained"
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(message: Mapping[str, Any], place: str) -> list[Any]:
    """Read the calls of tools; templates want their arguments as an object, and OpenAI writes them as a JSON text."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadInput(f"{place}.tool_calls must be a list, not {type(calls).__name__}")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadInput(f"{place}.tool_calls[{number}] must be an object with a function, which has a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise BadInput(f"{place}.tool_calls[{number}].function.arguments is not valid JSON") from None
        found.append(_said({**call, "type": "function", "function": {**function, "arguments": arguments}}))
    return found


def _tools(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = row.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise BadInput(f"{where}: tools is a text that is not valid JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInput(f"{where}: tools must be a list of objects")
    return tuple(map(_said, tools))


def _said(value: Any) -> Any:
    """Leave out what is null: a table gives each object the fields of all others in its column."""
    if isinstance(value, dict):
        return {name: _said(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_said(inner) for inner in value]
    return value


def _is_trained(message: Mapping[str, Any], place: str) -> bool:
    """Tell whether an answer is trained, by OpenAI's ``weight`` (0 or 1), or ``train`` (false or true)."""
    said = [message[name] for name in ("weight", "train") if message.get(name) is not None]
    for value in said:
        if value not in (0, 1):
            raise BadInput(f"{place} has the weight {reprlib.repr(value)}; an answer is trained (1) or not (0)")
    return all(said)
