"""Tokenise chats, completions and texts, and label the tokens that are trained: answers, or all tokens of a text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.data.counts import Tally
from cria_tricks.data.rows import REASONING, Chat
from cria_tricks.models import ends

TokenRow = dict[str, list[int]]
"""``input_ids`` and ``labels`` of one row, T integers each; a packed row also has ``position_ids``."""

IGNORED = -100
"""The label of a token that is not trained: torch's cross-entropy ignores it."""

DATE = "26 Jul 2024"
"""The date for chat templates. Llama 3's writes today's date into the system turn, but the same rows must give the same
tokens on every day."""


def _unknown() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class TokenRows:
    """The tokenised rows of a data set, and how many rows were cut or left out.

    Attributes:
        rows: the tokens and labels of each row, in a list or in a file (``table.py``).
        cut: how many rows were longer than ``max_length`` and lost their end.
        dropped: how many rows were longer and were left out.
        tally: counts of the rows that were left out and added before tokenising.
        lengths: the tokens of each row, shape (N,), int64; counted here when left out.
        trained: the trained tokens of each row, those with a label, shape (N,), int64; counted here when left out.
        highest_id: the largest token id; found here when left out.
    """

    rows: Sequence[TokenRow]
    cut: int
    dropped: int
    tally: Tally = field(default_factory=Tally)
    lengths: np.ndarray = field(default_factory=_unknown)
    trained: np.ndarray = field(default_factory=_unknown)
    highest_id: int = -1

    def __post_init__(self) -> None:
        if self.highest_id >= 0:
            return
        counts = {
            "lengths": np.array([len(row["input_ids"]) for row in self.rows], np.int64),
            "trained": np.array([trained(row) for row in self.rows], np.int64),
            "highest_id": max((max(row["input_ids"]) for row in self.rows), default=0),
        }
        for name, value in counts.items():
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """The number of tokens in all rows."""
        return int(self.lengths.sum())

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens in all rows."""
        return int(self.trained.sum())

    @property
    def longest(self) -> int:
        """The number of tokens in the longest row."""
        return int(self.lengths.max())

    def most_trained(self, batch_size: int) -> int:
        """The most trained tokens that a micro-batch of this many rows can have."""
        return int(np.sort(self.trained)[-batch_size:].sum())


def trained(row: TokenRow) -> int:
    """Count the tokens of a row that have a label."""
    return sum(label != IGNORED for label in row["labels"])


class Tokenized:
    """Tokenise rows one after another, and label the tokens that are trained.

    The assistant's turns are found by prefix: the tokens of a conversation up to a turn are a prefix of the tokens of
    the whole conversation. They are not found by the padding id, because in many tokenizers it is also the id of the
    end-of-turn token. A text becomes as many rows as it takes, and all of it is trained.

    Args:
        chats: checked rows.
        tokenizer: a transformers tokenizer; for chat rows it needs a chat template.
        max_length: the most tokens in a row.
        overflow: what happens to a longer row: ``"truncate"`` cuts its end off, ``"drop"`` leaves it out, ``"error"``
            raises an error. A text is never longer, because it is cut into rows.
        overlap: how many tokens two neighbouring rows of a text share.
        tally: counts of what happened to the rows before; the kinds of rows are added to it.
        add_eos: whether the last answer of a chat gets the EOS token if its template writes no end (``data.eos``).

    Attributes:
        cut: how many rows lost their end so far.
        dropped: how many rows were left out so far.
        first_dropped: file and line of the first of them.
        given: how many token rows came out so far.
    """

    def __init__(
        self,
        chats: Iterable[Chat],
        tokenizer: Any,
        max_length: int,
        overflow: str = "truncate",
        overlap: int = 1,
        tally: Tally | None = None,
        add_eos: bool = False,
    ):
        self.chats = chats
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.overflow = overflow
        self.overlap = overlap
        self.tally = tally or Tally()
        self.add_eos = add_eos
        self.cut = self.dropped = self.given = 0
        self.first_dropped = ""

    def __iter__(self) -> Iterator[TokenRow]:
        """Yield the token rows, once.

        Raises:
            BadInput: if the chat template does not fit, or a row has nothing left to train on.
        """
        for chat in self.chats:
            for row in self.of(chat):
                self.given += 1
                yield row

    def of(self, chat: Chat) -> list[TokenRow]:
        """Return the token rows of one row, and count it."""
        if chat.text:
            self.tally.kinds[chat.kind] += 1
            return list(chunks(document(chat, self.tokenizer), self.max_length, self.overlap))
        row, longer = token_row(chat, self.tokenizer, self.max_length, self.overflow, self.add_eos)
        if row is None:
            self.dropped += 1
            self.first_dropped = self.first_dropped or chat.where
            return []
        self.cut += longer
        self.tally.kinds[chat.kind] += 1
        return [row]

    def refuse_if_empty(self) -> None:
        """Refuse that no row has come out.

        Raises:
            BadInput: with the reason.
        """
        if self.given:
            return
        if not self.dropped:
            raise BadInput(f"{self.tally.in_words() or 'no rows'}, so there is nothing to train on")
        raise BadInput(
            f"{self.first_dropped}: all {self.dropped} rows are longer than data.max_length={self.max_length} tokens "
            "and were dropped; raise it, or set data.overflow=truncate"
        )


def listed(tokenized: Tokenized) -> TokenRows:
    """Collect all rows in a list.

    Raises:
        BadInput: as the rows do, or if there is none.
    """
    rows = list(tokenized)
    tokenized.refuse_if_empty()
    return TokenRows(rows, tokenized.cut, tokenized.dropped, tokenized.tally)


def tokenize(
    chats: Iterable[Chat], tokenizer: Any, max_length: int, overflow: str = "truncate", **options: Any
) -> TokenRows:
    """Tokenise rows into a list; the arguments and errors are those of :class:`Tokenized` and :func:`listed`."""
    return listed(Tokenized(chats, tokenizer, max_length, overflow, **options))


def document(chat: Chat, tokenizer: Any) -> list[int]:
    """Tokenise a text, and add the tokenizer's EOS token."""
    return [*_once(chat.text, tokenizer), tokenizer.eos_token_id]


def _once(text: str, tokenizer: Any, **options: Any) -> list[int]:
    """Tokenise a text with at most one BOS token in front, and no EOS token behind.

    Some tokenizers write an EOS token themselves (``add_eos_token``), and some rows have the text of a BOS or EOS token
    in them already.
    """
    ids = list(tokenizer(text, **options)["input_ids"])
    while ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
        ids.pop()
    begins = getattr(tokenizer, "bos_token_id", None)
    while begins is not None and ids[:2] == [begins, begins]:
        ids.pop(0)
    return ids


def prompt(chat: Chat, tokenizer: Any) -> list[int]:
    """Tokenise the prompt of a row. A text, or a completion without a prompt, has an empty one.

    Raises:
        BadInput: if the tokenizer's chat template cannot format it.
    """
    if not chat.messages:
        if not chat.prompt:
            return []
        return _once(chat.prompt, tokenizer)
    ids = template(chat.before_answer, tokenizer, chat.where, chat.tools, add_generation_prompt=True)
    if not ids:
        raise BadInput("the tokenizer's chat template writes nothing; is the folder whole?")
    return ids


def chunks(ids: Sequence[int], length: int, overlap: int) -> Iterator[TokenRow]:
    """Cut a document's tokens into rows.

    Args:
        ids: the document's tokens.
        length: tokens of a row; the last row may be shorter.
        overlap: how many tokens of the row before are repeated at a row's beginning, as context; 1 <= overlap < length.

    Yields:
        Rows with ``input_ids`` and ``labels``. The overlapping tokens have no label, because the row before has trained
        them. The document's first token has none, because no token comes before it to predict it from.
    """
    end = 0
    while end < len(ids):
        begin = max(0, end - overlap)
        unlabelled = max(end, 1) - begin  # the overlap; in the first row, the first token
        end = min(begin + length, len(ids))
        yield labelled(list(ids[begin:end]), unlabelled)


def labelled(ids: list[int], unlabelled: int) -> TokenRow:
    """Make a row whose tokens are trained, except the first ``unlabelled`` ones."""
    return {"input_ids": ids, "labels": [IGNORED] * unlabelled + ids[unlabelled:]}


def token_row(
    chat: Chat, tokenizer: Any, max_length: int, overflow: str, add_eos: bool = False
) -> tuple[TokenRow | None, bool]:
    """Tokenise one chat or completion row.

    Returns:
        The row with ``input_ids`` and ``labels``, or ``None`` if it was dropped; and whether it was too long.

    Raises:
        BadInput: if the chat template does not fit, or the row has nothing left to train on.
    """
    ids, labels = _chat(chat, tokenizer, add_eos) if chat.messages else _completion(chat, tokenizer)
    if all(label == IGNORED for label in labels[1:]):
        raise BadInput(f"{chat.where}: this model's chat template leaves out what the assistant says")
    labels[0] = IGNORED  # no token comes before the first one to predict it from
    longer = len(ids) > max_length
    if longer and overflow == "error":
        raise BadInput(
            f"{chat.where}: the row takes {len(ids)} tokens, data.max_length is {max_length}; raise it, or set "
            "data.overflow to truncate or drop"
        )
    if longer and overflow == "drop":
        return None, True
    row = {"input_ids": ids[:max_length], "labels": labels[:max_length]}
    if not trained(row):
        prompt = next(index for index, label in enumerate(labels) if label != IGNORED)
        raise BadInput(
            f"{chat.where}: the prompt alone takes {prompt} tokens, so data.max_length={max_length} leaves "
            "nothing to train on; raise it or take the row out"
        )
    return row, longer


def _chat(chat: Chat, tokenizer: Any, add_eos: bool = False) -> tuple[list[int], list[int]]:
    ids = template(chat.messages, tokenizer, chat.where, chat.tools)
    refuse_unwritten(chat, tokenizer)
    labels = [IGNORED] * len(ids)
    for turn in chat.trained_turns:
        begin, end = _answer(chat, turn, ids, tokenizer)
        if end is None:  # the template writes no end: train the whole turn; data.eos asks for an EOS token behind it
            end = len(ids)
            if add_eos:
                end += 1
                ids = [*ids, tokenizer.eos_token_id]
                labels.append(IGNORED)
        labels[begin:end] = ids[begin:end]
    return ids, labels


def _answer(chat: Chat, turn: int, ids: list[int], tokenizer: Any) -> tuple[int, int | None]:
    """Find the tokens of an answer: where it begins, and the place behind the token that ends it.

    Returns:
        The two places; the second is ``None`` if the answer is the last turn, and no token ends it.
    """

    def written(turns: int, **options: Any) -> list[int]:
        return template(chat.messages[:turns], tokenizer, chat.where, chat.tools, **options)

    prefix = written(turn, add_generation_prompt=True)
    begin = len(prefix)
    if ids[:begin] != prefix:
        begin = _other_begin(chat, turn, ids, prefix, tokenizer)
    # The next turn may change how this one ends, so only what both ways of writing share is certain. Train up to the
    # token that ends the turn. The template may write more after it, such as a line break; that is not trained.
    until = _shared(ids, written(turn + 1))
    found = _ends(ids, begin, until, tokenizer)
    if found:
        return begin, found[-1]
    if turn + 2 <= len(chat.messages):  # some templates write reasoning in the last turn alone
        found = _ends(ids, begin, _shared(ids, written(turn + 2)), tokenizer)
        if found:
            return begin, found[0]
        if until <= begin:
            raise _rewritten(chat)
    if until == len(ids):
        return begin, None
    return begin, until


def _other_begin(chat: Chat, turn: int, ids: list[int], prefix: list[int], tokenizer: Any) -> int:
    """Find where an answer begins whose generation prompt is no prefix of the row.

    An answer that begins with a line break may share its first token with the end of the prompt: then that token is not
    trained. Or the generation prompt ends with the beginning of a reasoning which the row does not have.

    Raises:
        BadInput: if the template writes the turns before in another way.
    """
    options: dict[str, Any] = {"tokenize": False}
    whole = template(chat.messages, tokenizer, chat.where, chat.tools, **options)
    before = template(chat.messages[:turn], tokenizer, chat.where, chat.tools, add_generation_prompt=True, **options)
    shared = _shared(whole, before)
    asked = template(chat.messages[:turn], tokenizer, chat.where, chat.tools, **options)
    if shared < _shared(asked, before):
        raise _rewritten(chat)
    ends_at_prompt = shared == len(before)
    spans = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True).get("offset_mapping")
    if not spans:  # a tokenizer in Python does not know them
        return _shared(ids, prefix) + ends_at_prompt
    for place, (start, end) in enumerate(spans):
        if start >= shared or (end > shared and not ends_at_prompt):
            return place
    return len(ids)


def _rewritten(chat: Chat) -> BadInput:
    return BadInput(
        f"{chat.where}: this model's chat template writes the turns before an answer differently once the answer "
        "follows, so its tokens cannot be told from the prompt; use rows with one answer, or another model"
    )


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the equal items at the beginning of two sequences."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _ends(ids: Sequence[int], begin: int, until: int, tokenizer: Any) -> list[int]:
    """List the places behind tokens that end a turn: the EOS tokens, or if there are none, those of the template."""
    found = [place + 1 for place in range(begin, until) if ids[place] == tokenizer.eos_token_id]
    if found:
        return found
    end = ends.of_template(tokenizer)
    return [place + 1 for place in range(begin, until) if ids[place] == end]


def _without_reasoning(content: str) -> str:
    return content.rpartition("</think>")[2].strip()


def refuse_unwritten(chat: Chat, tokenizer: Any) -> None:
    """Refuse a chat of which the template leaves something out that would be read or trained.

    Templates leave reasoning out of all answers but the last, also when the model is used, so only the last one counts.

    Raises:
        BadInput: naming the field of the row.
    """
    known = str(tokenizer.chat_template)
    if chat.tools and "tools" not in known:
        raise BadInput(f"{chat.where}: tools: this model's chat template writes no tools; take them out of the row")
    last = max(chat.trained_turns)
    wanted: dict[str, str] = {}
    for number, message in enumerate(chat.messages):
        place = f"messages[{number}]"
        if message.get("tool_calls") and "tool_calls" not in known:
            raise BadInput(
                f"{chat.where}: {place}.tool_calls: this model's chat template writes no calls of tools; take another "
                "model, or write the call as content"
            )
        reasons = [name for name in REASONING if name in message]
        if reasons and not any(name in known for name in (*REASONING, "think")):
            raise BadInput(
                f"{chat.where}: {place}.{reasons[0]}: this model's chat template writes no reasoning; take it out of "
                "the row"
            )
        if message["role"] in ("system", "user") or number in chat.trained_turns:
            wanted[f"{place}.content of {message['role']}"] = _without_reasoning(message["content"])
    for name in REASONING:
        wanted[f"messages[{last}].{name}"] = chat.messages[last].get(name, "")
    reasoning, mark, _ = chat.messages[last]["content"].rpartition("</think>")
    if mark:
        wanted[f"messages[{last}].content before </think>"] = reasoning.rpartition("<think>")[2]
    whole = template(chat.messages, tokenizer, chat.where, chat.tools, tokenize=False)
    for name, text in wanted.items():
        if text.strip() not in whole:
            raise BadInput(
                f"{chat.where}: {name} is left out by this model's chat template; take it out of the row, or put it "
                "where the template writes it"
            )


def _completion(chat: Chat, tokenizer: Any) -> tuple[list[int], list[int]]:
    # As in TRL: the two texts as they are and one EOS token, without a chat template.
    prompt = _once(chat.prompt, tokenizer)
    completion = [*_once(chat.completion, tokenizer, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt + completion, [IGNORED] * len(prompt) + completion


def template(
    messages: Sequence[dict[str, Any]], tokenizer: Any, where: str, tools: Sequence[Any] = (), **options: Any
) -> Any:
    """Write turns by the model's chat template, with the same result on every day (:data:`DATE`).

    Args:
        messages: role and content of each turn.
        tokenizer: the model's tokenizer, with a chat template.
        where: the row's place, for error messages.
        tools: the functions that the assistant may call.
        **options: options of the template, e.g. ``add_generation_prompt``.

    Returns:
        Token ids; with ``tokenize=False`` the text.

    Raises:
        BadInput: if there is no chat template, or it cannot write these turns.
    """
    if not tokenizer.chat_template:
        raise BadInput(
            f"{where}: this model's tokenizer has no chat template, so it is no chat model; use an -Instruct "
            "model, or rows with prompt and completion"
        )
    options = {"tokenize": True, "return_dict": False, "date_string": DATE, **options}
    if tools:
        options["tools"] = list(tools)
    if "strftime_now" in str(tokenizer.chat_template):  # else it writes the day of today
        options["chat_template"] = f"{{% macro strftime_now(form) %}}{DATE}{{% endmacro %}}{tokenizer.chat_template}"
    try:
        return tokenizer.apply_chat_template(_named_for(messages, str(tokenizer.chat_template)), **options)
    except Exception as error:  # a template is a program that came with the model, and may refuse a row
        raise BadInput(f"{where}: this model's chat template cannot write the row: {first_line(error)}") from None


def _named_for(messages: Sequence[dict[str, Any]], chat_template: str) -> list[dict[str, Any]]:
    """Give reasoning the name under which the template looks for it."""
    read = next((name for name in REASONING if f".{name}" in chat_template or f"'{name}'" in chat_template), "")
    if not read:
        return list(messages)
    found = []
    for message in messages:
        reasoning = next((message[name] for name in REASONING if name in message), None)
        rest = {name: value for name, value in message.items() if name not in REASONING}
        found.append({**rest, read: reasoning} if reasoning else rest)
    return found
