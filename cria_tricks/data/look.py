"""Look at a data set before training on it: forms and kinds of rows, lengths, repeated rows and answers, leaks.

A look changes no row. It uses the same code as the preparation of a run: the same tokens, the same rule for duplicates
and the same rule for leaked evaluation rows.
"""

import importlib.util
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.data.duplicates import Guard, Repeats
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource
from cria_tricks.data.tokens import IGNORED, chunks, document, token_row

KindAndAnswer = Callable[[Chat], tuple[str, str]]
"""A function that returns a row's kind, and the text of its answer."""
OPENING = 4
"""Answers that begin with the same four words have the same opening."""
COMMONEST = 3
"""How many of the commonest answers, and of the commonest openings, are kept."""


@dataclass(frozen=True)
class RowLook:
    """What a look found out about one row.

    Attributes:
        where: file and line.
        form: ``chat``, ``completion`` or ``text``; it decides how the row is tokenised.
        kind: the form, or for a row of the answer contract ``answer``, ``refusal`` or ``placeholder``.
        question: the last turn before the answer, or the prompt; empty for a text.
        answer: what the model learns to write, as text.
        tokens: the row's tokens without any cut; ``None`` if they were not counted.
        trained: those of them that are trained.
        pieces: the rows of ``data.max_length`` tokens into which a text is cut; 1 for every other row.
        cut_to_nothing: whether ``data.max_length`` leaves no trained token, so that training refuses the row.
        refused: why this model's tokenizer cannot write the row; empty if it can.
    """

    where: str
    form: str
    kind: str
    question: str
    answer: str
    tokens: int | None = None
    trained: int = 0
    pieces: int = 1
    cut_to_nothing: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Look:
    """A look at one part of a data set.

    Attributes:
        description: the source in words.
        rows: what was found out about each row.
        max_length: the longest row of a run [tokens].
        exact: the rows that have the same words as an earlier row.
        near: the rows that are nearly an earlier row; ``None`` if the library for it is not installed.
        system_prompts: the different system prompts; an empty one stands for the chats that have none.
    """

    description: str
    rows: tuple[RowLook, ...]
    max_length: int
    exact: tuple[str, ...]
    near: tuple[str, ...] | None
    system_prompts: Counter[str]

    @property
    def kinds(self) -> Counter[str]:
        """How many rows of each kind there are, the commonest first."""
        return Counter(dict(Counter(row.kind for row in self.rows).most_common()))

    @property
    def counted(self) -> list[RowLook]:
        """The rows whose tokens were counted."""
        return [row for row in self.rows if row.tokens is not None]

    @property
    def longer(self) -> list[RowLook]:
        """The rows that are longer than ``max_length``; not the texts, because they are cut into rows."""
        return [row for row in self.counted if row.form != "text" and (row.tokens or 0) > self.max_length]

    def commonest_answers(self) -> list[tuple[str, int]]:
        """The answers that occur more than once, the commonest first, and how often they occur."""
        return _commonest(row.answer.strip() for row in self.rows if row.form != "text")

    def commonest_openings(self) -> list[tuple[str, int]]:
        """The first words of answers that more than one answer begins with, and how many do."""
        answers = (row.answer for row in self.rows if row.form != "text")
        return _commonest(" ".join(answer.split()[:OPENING]) for answer in answers)

    def to_dict(self) -> dict[str, Any]:
        """Return the look as JSON data."""
        near = None if self.near is None else len(self.near)
        answers = {row.answer.strip() for row in self.rows}
        return {
            "description": self.description,
            "rows": len(self.rows),
            "forms": dict(Counter(row.form for row in self.rows)),
            "kinds": self._kinds(),
            "tokens": self._tokens(),
            "duplicates": {"exact": len(self.exact), "near": near, "first": next(iter(self.exact), None)},
            "answers": {
                "different": len(answers),
                "commonest": [{"text": text, "rows": rows} for text, rows in self.commonest_answers()],
                "openings": [{"text": text, "rows": rows} for text, rows in self.commonest_openings()],
            },
            "system_prompts": {
                "different": sum(bool(prompt) for prompt in self.system_prompts),
                "rows_without": self.system_prompts[""],
            },
        }

    def _kinds(self) -> dict[str, dict[str, float]]:
        return {kind: {"rows": rows, "share": rows / len(self.rows)} for kind, rows in self.kinds.items()}

    def _tokens(self) -> dict[str, Any] | None:
        """Summarise the lengths; ``None`` if no row was tokenised."""
        lengths = sorted(row.tokens or 0 for row in self.counted)
        if not lengths:
            return None
        total = sum(lengths)
        trained = sum(row.trained for row in self.counted)
        return {
            "total": total,
            "trained": trained,
            "trained_share": trained / total,
            "min": lengths[0],
            "median": statistics.median_low(lengths),
            "p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
            "max": lengths[-1],
            "max_length": self.max_length,
            "rows_longer": len(self.longer),
            "rows_cut_to_nothing": sum(row.cut_to_nothing for row in self.rows),
            "rows_refused": sum(bool(row.refused) for row in self.rows),
            "rows_of_texts": sum(row.pieces for row in self.counted if row.form == "text"),
        }


def look(source: DataSource, kind_and_answer: KindAndAnswer, tokenizer: Any, max_length: int) -> Look:
    """Look at one part of a data set.

    Args:
        source: its rows.
        kind_and_answer: returns a row's kind and the text of its answer.
        tokenizer: the model's tokenizer; without one (``None``) no lengths are counted.
        max_length: the longest row of a run [tokens].
    """
    has_near = importlib.util.find_spec("datasketch") is not None
    repeats = Repeats(near=has_near)
    exact = []
    near = []
    rows = []
    for chat in source.rows:
        reason = repeats.reason(chat)
        if reason == "duplicate":
            exact.append(chat.where)
        elif reason:
            near.append(chat.where)
        rows.append(_row(chat, kind_and_answer, tokenizer, max_length))
    prompts = Counter(_system_prompt(chat) for chat in source.rows if chat.messages)
    return Look(source.description, tuple(rows), max_length, tuple(exact), tuple(near) if has_near else None, prompts)


def _row(chat: Chat, kind_and_answer: KindAndAnswer, tokenizer: Any, max_length: int) -> RowLook:
    kind, answer = kind_and_answer(chat)
    question = chat.before_answer[-1]["content"] if chat.messages else chat.prompt
    found: dict[str, Any] = {}
    if tokenizer is not None:
        found = _lengths(chat, tokenizer, max_length)
    return RowLook(chat.where, chat.kind, kind, question, answer, **found)


def _lengths(chat: Chat, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Count a row's tokens, as fields of :class:`RowLook`."""
    if chat.text:
        ids = document(chat, tokenizer)
        pieces = sum(1 for _ in chunks(ids, max_length, 1))
        return {"tokens": len(ids), "trained": len(ids) - 1, "pieces": pieces}
    try:
        row, _ = token_row(chat, tokenizer, sys.maxsize, "truncate")
    except BadInput as error:
        return {"refused": str(error)}
    assert row is not None, "only overflow=drop drops a row"
    labels = row["labels"]
    return {
        "tokens": len(labels),
        "trained": sum(label != IGNORED for label in labels),
        "cut_to_nothing": all(label == IGNORED for label in labels[:max_length]),
    }


def _system_prompt(chat: Chat) -> str:
    first = chat.messages[0]
    return first["content"] if first["role"] == "system" else ""


def _commonest(texts: Any) -> list[tuple[str, int]]:
    counts = Counter(texts)
    return [(text, rows) for text, rows in counts.most_common(COMMONEST) if rows > 1]


@dataclass(frozen=True)
class Leaks:
    """The training rows that ask what an evaluation row asks, or nearly.

    Attributes:
        rows: training rows that leak.
        same: those of them that ask exactly the same.
        held_out: evaluation rows for which there is such a training row.
        first: file and line of the first leaked training row, and of its evaluation row; empty without leaks.
    """

    rows: int
    same: int
    held_out: int
    first: tuple[str, ...]


def leaks(train: Sequence[Chat], held_out: Sequence[Chat]) -> Leaks:
    """Find the training rows that ask what an evaluation row asks, by the rule of ``data.leakage``."""
    found = [leak for leak in map(Guard(held_out).find, train) if leak is not None]
    # A training row names only the most similar evaluation row, so the evaluation rows are counted the other way round.
    met = [leak for leak in map(Guard(train).find, held_out) if leak is not None]
    first: tuple[str, ...] = (found[0].row, found[0].held_out) if found else ()
    return Leaks(len(found), sum(leak.same for leak in found), len(met), first)
