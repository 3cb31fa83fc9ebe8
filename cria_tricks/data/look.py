"""Look at a data set before training on it: kinds of rows, lengths, duplicates, leaks, and what is worth acting on.

A look changes no row. It uses the same code as the preparation of a run: the same tokens, the same rule for duplicates
and the same rule for leaked evaluation rows.
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cria_tricks.common.errors import BadInput
from cria_tricks.data.duplicates import Guard, Repeats
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource
from cria_tricks.data.tokens import IGNORED, document, token_row

KindAndAnswer = Callable[[Chat], tuple[str, str]]
"""A function that returns a row's kind, and the text of its answer."""
PLACEHOLDER = "placeholder"
EMPTY = "empty answer"
PLAIN = ("chat", "completion", "text")
"""The kinds of rows that do not keep the answer contract: a JSON object with the answer and the sources that it cites
(docs/guide/evaluate.md). ``kwanzaa/scores.py`` names those that do. It is a layer above, so their names are texts here.
"""
REPEATED = 0.05
"""The share of rows from which an answer that repeats is worth a line; it must also occur at least three times."""
SHOWN = 6
"""How many words of such an answer are shown."""
NAMES = {"train": "training rows", "eval": "evaluation rows"}
"""What the rows of each part are called."""


@dataclass(frozen=True)
class RowLook:
    """What a look found out about one row.

    Attributes:
        where: file and line.
        kind: ``chat``, ``completion`` or ``text``, or for a row of the answer contract ``answer``, ``refusal``,
            ``placeholder`` or ``empty answer``.
        question: the last turn before the answer, or the prompt; empty for a text.
        answer: what the model learns to write, as text.
        tokens: the row's tokens without any cut; ``None`` if they were not counted.
        trained: those of them that are trained.
        cut_to_nothing: whether ``data.max_length`` leaves no trained token, so that training refuses the row.
        refused: why this model's tokenizer cannot write the row; empty if it can.
    """

    where: str
    kind: str
    question: str
    answer: str
    tokens: int | None = None
    trained: int = 0
    cut_to_nothing: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Look:
    """A look at one part of a data set.

    Attributes:
        description: the source in words.
        rows: what was found out about each row.
        max_length: the longest row of a run [tokens].
        exact: the rows that are equal to an earlier row.
        near: the rows that are nearly an earlier row; ``None`` if the library for it is not installed.
    """

    description: str
    rows: tuple[RowLook, ...]
    max_length: int
    exact: tuple[str, ...]
    near: tuple[str, ...] | None

    @property
    def kinds(self) -> Counter[str]:
        """How many rows of each kind there are, the commonest first."""
        return Counter(dict(Counter(row.kind for row in self.rows).most_common()))

    @property
    def longer(self) -> list[RowLook]:
        """The rows that are longer than ``max_length``; not the texts, because they are cut into rows."""
        return [row for row in self.rows if row.kind != "text" and (row.tokens or 0) > self.max_length]

    def answers(self) -> Counter[str]:
        """How often each answer occurs."""
        return Counter(row.answer.strip() for row in self.rows if row.kind != "text")

    def counts(self) -> dict[str, int | None]:
        """Return the numbers of rows and tokens by name; lengths are of whole rows, before any cut.

        Near duplicates are ``None`` where nobody looked for them, and there are no lengths if no row was tokenised.
        """
        found: dict[str, int | None] = {"rows": len(self.rows)}
        lengths = [row.tokens for row in self.rows if row.tokens is not None]
        if lengths:
            # With inverted_cdf each of them is the length of a row, and the median is the lower one of the two.
            shortest, median, most, longest = np.percentile(lengths, (0, 50, 95, 100), method="inverted_cdf").tolist()
            found |= {
                "tokens": sum(lengths),
                "trained tokens": sum(row.trained for row in self.rows),
                "shortest row": shortest,
                "median row": median,
                "95 % of rows at most": most,
                "longest row": longest,
                "rows too long": len(self.longer),
            }
        return found | {
            "exact duplicates": len(self.exact),
            "near duplicates": None if self.near is None else len(self.near),
            "different answers": len(self.answers()),
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
        kind, answer = kind_and_answer(chat)
        question = chat.before_answer[-1]["content"] if chat.messages else chat.prompt
        lengths: dict[str, Any] = {}
        if tokenizer is not None:
            lengths = _lengths(chat, tokenizer, max_length)
        rows.append(RowLook(chat.where, kind, question, answer, **lengths))
    return Look(source.description, tuple(rows), max_length, tuple(exact), tuple(near) if has_near else None)


def _lengths(chat: Chat, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Count a row's tokens, as fields of :class:`RowLook`."""
    if chat.text:
        ids = document(chat, tokenizer)
        return {"tokens": len(ids), "trained": len(ids) - 1}
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


@dataclass(frozen=True)
class Problem:
    """Something about a data set that is worth acting on.

    Attributes:
        what: which rows it is about, in the plural.
        rows: how many they are.
        do: what to do about it.
        first: where the first of these rows stands; empty if that does not help.
    """

    what: str
    rows: int
    do: str
    first: str = ""


def problems(looks: Mapping[str, Look], leaks: Leaks | None) -> list[Problem]:
    """List the problems of a data set, those that stop a training first.

    Args:
        looks: the look at the rows of ``train``, and of ``eval`` if there are some.
        leaks: the leaked evaluation rows; ``None`` without evaluation rows.
    """
    found: list[Problem] = []
    for part, look in looks.items():
        found += _that_stop(look, part)
    if leaks and leaks.rows:
        what = f"training rows that ask what an evaluation row asks, or nearly ({leaks.same} word for word)"
        do = "data.leakage=drop leaves them out, so that the evaluation loss is not too good"
        found.append(Problem(what, leaks.rows, do, " is near ".join(leaks.first)))
    # Only of training rows, because no setting leaves evaluation rows out, and no model learns their answers.
    found += _of_repeats(looks["train"])
    found += _of_answers(looks["train"])
    for part, look in looks.items():
        found += _of_the_rest(look, part)
    return found


def _that_stop(look: Look, part: str) -> Iterator[Problem]:
    """Name the rows that training would refuse."""
    refused = [row.refused for row in look.rows if row.refused]
    if refused:
        do = "training stops there; name another model, or take the rows out"
        yield Problem(f"{NAMES[part]} that do not fit this model", len(refused), do, refused[0])
    nothing = [row for row in look.rows if row.cut_to_nothing]
    if nothing:
        what = f"{NAMES[part]} without an answer in the first data.max_length={look.max_length} tokens"
        do = f"training stops there; set data.max_length={_longest(nothing)}, or take the rows out"
        yield Problem(what, len(nothing), do, nothing[0].where)


def _of_repeats(look: Look) -> Iterator[Problem]:
    if look.exact:
        do = "data.duplicates=exact leaves such rows out"
        yield Problem("training rows that repeat an earlier row word for word", len(look.exact), do, look.exact[0])
    if look.near:
        do = "data.duplicates=near leaves such rows out, and exact repeats, too"
        yield Problem("training rows that are nearly the same as an earlier row", len(look.near), do, look.near[0])


def _of_answers(look: Look) -> Iterator[Problem]:
    """Name answers that give none, and an answer that stands in many rows."""
    if look.kinds[PLACEHOLDER]:
        do = "write the answers or take these rows out, because an adapter learns placeholders, too"
        yield Problem("placeholders, which announce an answer and give none", look.kinds[PLACEHOLDER], do)
    if look.kinds[EMPTY]:
        yield Problem("answers without text", look.kinds[EMPTY], "write them, or take these rows out")
    for text, rows in look.answers().most_common(1):
        if text and rows >= max(3, REPEATED * len(look.rows)):
            words = text.split()
            short = " ".join([*words[:SHOWN], *["..."] * (len(words) > SHOWN)])
            do = "vary it or take some of these rows out, because the model will often give it"
            yield Problem(f'training rows with the same answer, "{short}"', rows, do)


def _of_the_rest(look: Look, part: str) -> Iterator[Problem]:
    """Name the rows whose end is cut off, and those without the answer contract, where others keep it."""
    longer = [row for row in look.longer if not row.cut_to_nothing]
    if longer:
        what = f"{NAMES[part]} longer than data.max_length={look.max_length} tokens"
        do = f"the end is cut off; data.max_length={_longest(longer)} keeps it, data.overflow=drop leaves such rows out"
        yield Problem(what, len(longer), do, longer[0].where)
    plain = sum(look.kinds[kind] for kind in PLAIN)
    if 0 < plain < len(look.rows):
        do = "mend or take them out, because cria eval gives scores only if all rows keep it"
        yield Problem(f"{NAMES[part]} that do not keep the answer contract, as others do", plain, do)


def _longest(rows: Sequence[RowLook]) -> int:
    return max(row.tokens or 0 for row in rows)
