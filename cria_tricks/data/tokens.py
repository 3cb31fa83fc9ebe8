"""Tokenise chats, with labels on the assistant's tokens only, and texts, cut into rows that are trained whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.data.counts import Tally
from cria_tricks.data.rows import Chat

TokenRow = dict[str, list[int]]
"""``input_ids`` and ``labels`` of one row, T integers each; of a packed one its ``position_ids`` too."""

IGNORED = -100
"""The label of a token that is not trained."""

DATE = "26 Jul 2024"
"""Llama 3's template writes today's date into the system turn. The same rows must give the same tokens tomorrow."""


@dataclass(frozen=True)
class TokenRows:
    """The tokenised rows of a data set, and counts of what was cut and left out.

    Attributes:
        rows: the tokens of each.
        cut: how many rows were longer than ``max_length`` and lost their end.
        dropped: how many were longer and were left out.
        tally: what was left out and added before they were tokens.
    """

    rows: list[TokenRow]
    cut: int
    dropped: int
    tally: Tally = field(default_factory=Tally)

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(len(row["input_ids"]) for row in self.rows)

    @property
    def highest_id(self) -> int:
        """The largest token id."""
        return max(max(row["input_ids"]) for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        """Tokens with a label."""
        return sum(trained(row) for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row["input_ids"]) for row in self.rows)

    def most_trained(self, batch_size: int) -> int:
        """Tokens with a label in the fullest micro-batch that may come."""
        return sum(sorted(map(trained, self.rows))[-batch_size:])


def trained(row: TokenRow) -> int:
    """Count the tokens of a row that have a label."""
    return sum(label != IGNORED for label in row["labels"])


def tokenize(
    chats: Sequence[Chat],
    tokenizer: Any,
    max_length: int,
    overflow: str = "truncate",
    overlap: int = 1,
    tally: Tally | None = None,
) -> TokenRows:
    """Tokenise rows and mark what is trained.

    The assistant's turns are found by prefix: the tokens of the conversation up to a turn are a prefix of the
    tokens with it. Never by the padding id, which is the end-of-turn id in many tokenizers. A text becomes as many rows
    as it takes, and all of it is trained.

    Args:
        chats: checked rows.
        tokenizer: with a chat template, where there are chat rows.
        max_length: tokens kept of each row.
        overflow: what happens to a longer one: ``"truncate"`` cuts its end off, ``"drop"`` leaves it out,
            ``"error"`` refuses it.
        overlap: tokens that neighbouring rows of a text share.
        tally: what happened to the rows before; it counts their kinds, too.

    Raises:
        BadInput: if the template does not fit, a row has nothing left to train on, or none is left.
    """
    rows: list[TokenRow] = []
    cut = dropped = 0
    tally = tally or Tally()
    for chat in chats:
        if chat.text:
            tally.kinds[chat.kind] += 1
            rows += chunks(document(chat, tokenizer), max_length, overlap)
            continue
        row, longer = token_row(chat, tokenizer, max_length, overflow)
        if row is None:
            dropped += 1
            continue
        cut += longer
        tally.kinds[chat.kind] += 1
        rows.append(row)
    if not rows:
        raise BadInput(
            f"{chats[0].where}: all {dropped} rows are longer than data.max_length={max_length} tokens and were "
            "dropped; raise it, or set data.overflow=truncate"
        )
    return TokenRows(rows, cut, dropped, tally)


def document(chat: Chat, tokenizer: Any) -> list[int]:
    """Tokenise a text, and add the token that ends it."""
    return tokenizer(chat.text)["input_ids"] + [tokenizer.eos_token_id]


def chunks(ids: Sequence[int], length: int, overlap: int) -> Iterator[TokenRow]:
    """Cut a document's tokens into rows.

    Args:
        ids: the document, of N tokens.
        length: T, the tokens of a row.
        overlap: how many of them are the last ones of the row before; 1 <= overlap < length.

    Yields:
        Rows with ``input_ids`` and ``labels``, the last one as long as it comes. What was in the row before has no
        label, nor has the document's first token: nothing comes before it that could predict it.
    """
    end = 0
    while end < len(ids):
        begin = max(0, end - overlap)
        unlabelled = max(end, 1) - begin
        end = min(begin + length, len(ids))
        row = list(ids[begin:end])
        yield {"input_ids": row, "labels": [IGNORED] * unlabelled + row[unlabelled:]}


def token_row(chat: Chat, tokenizer: Any, max_length: int, overflow: str) -> tuple[TokenRow | None, bool]:
    """Tokenise one row that is no text.

    Returns:
        The row, with ``input_ids`` and ``labels``, or ``None`` if it was dropped; and whether it was too long.

    Raises:
        BadInput: if the template does not fit, or the row has nothing left to train on.
    """
    ids, labels = _chat(chat, tokenizer) if chat.messages else _completion(chat, tokenizer)
    if all(label == IGNORED for label in labels[1:]):
        raise BadInput(f"{chat.where}: this model's chat template leaves out what the assistant says")
    labels[0] = IGNORED  # nothing comes before the first token, so nothing can predict it
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


def _chat(chat: Chat, tokenizer: Any) -> tuple[list[int], list[int]]:
    ids = template(chat.messages, tokenizer, chat.where)
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            prefix = template(chat.messages[:turn], tokenizer, chat.where, add_generation_prompt=True)
            until = template(chat.messages[: turn + 1], tokenizer, chat.where)
            if ids[: len(prefix)] != prefix or ids[: len(until)] != until:
                raise BadInput(
                    f"{chat.where}: this model's chat template rewrites earlier turns, so the assistant's tokens "
                    "cannot be told from the prompt; use rows with one assistant turn"
                )
            end = len(until)
            while end > len(prefix) + 1 and until[end - 1] != tokenizer.eos_token_id:
                end -= 1  # a line break after the end of the turn is the template's, not the assistant's
            if until[end - 1] != tokenizer.eos_token_id:
                end = len(until)
            labels[len(prefix) : end] = ids[len(prefix) : end]
    return ids, labels


def _completion(chat: Chat, tokenizer: Any) -> tuple[list[int], list[int]]:
    # As in TRL: the two texts as they are, and the end token, without a chat template.
    prompt = tokenizer(chat.prompt)["input_ids"]
    completion = tokenizer(chat.completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + completion, [IGNORED] * len(prompt) + completion


def template(messages: Sequence[dict[str, str]], tokenizer: Any, where: str, **options: Any) -> list[int]:
    """Write turns as the model's chat template does, the same on every day.

    Args:
        messages: role and content of each.
        tokenizer: with a chat template.
        where: the row's place, for errors.
        **options: for the template, e.g. ``add_generation_prompt``.

    Returns:
        Token ids.

    Raises:
        BadInput: if there is no template, or it cannot write these turns.
    """
    if not tokenizer.chat_template:
        raise BadInput(
            f"{where}: this model's tokenizer has no chat template, so it is no chat model; use an -Instruct "
            "model, or rows with prompt and completion"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, date_string=DATE, **options
        )
    except Exception as error:  # a template is a program that came with the model, and may refuse a row
        raise BadInput(f"{where}: this model's chat template cannot write the row: {first_line(error)}") from None
