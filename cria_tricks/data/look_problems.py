"""Name what a look at a data set found that is worth acting on: what, how many rows, and what to do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cria_tricks.data.look import Leaks, Look, RowLook

REPEATED = 0.05
"""The share of rows from which an answer that repeats is worth a line; it must also occur at least three times."""
SHOWN = 6
"""How many words of such an answer are shown."""
FORMS = ("chat", "completion", "text")
"""The kinds of rows that do not keep the answer contract: a JSON object with the answer and the sources that it cites
(docs/guide/evaluate.md). ``kwanzaa/scores.py`` names those that do. It is a layer above, so their names are texts here.
"""


@dataclass(frozen=True)
class Problem:
    """Something about a data set that is worth acting on.

    Attributes:
        what: what was found, with the number of rows.
        rows: that number.
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
        found += _that_stop(look, NAMES[part])
    if leaks and leaks.rows:
        what = f"{_rows(leaks.rows, NAMES['train'], 'ask')} what an evaluation row asks, or nearly"
        what += f", {leaks.same} of them word for word" if leaks.same else ""
        do = "data.leakage=drop leaves them out, so that the evaluation loss is not too good"
        found.append(Problem(what, leaks.rows, do, " is near ".join(leaks.first)))
    # Only of training rows, because no setting leaves evaluation rows out, and no model learns their answers.
    found += _of_repeats(looks["train"])
    found += _of_answers(looks["train"])
    for part, look in looks.items():
        found += _of_lengths(look, NAMES[part])
        found += _of_the_contract(look, NAMES[part])
    return found


NAMES = {"train": "training row", "eval": "evaluation row"}
"""What a row of each part is called."""
SINGULAR = {"are": "is", "have": "has", "do": "does"}
"""The verbs whose singular is not the plural with an s."""


def _rows(number: int, name: str, verb: str) -> str:
    """Begin a sentence, e.g. ``1 training row repeats`` or ``2 training rows repeat``."""
    if number == 1:
        return f"1 {name} {SINGULAR.get(verb, f'{verb}s')}"
    return f"{number:,} {name}s {verb}"


def _that_stop(look: Look, name: str) -> Iterator[Problem]:
    """Name the rows that training would refuse."""
    refused = [row.refused for row in look.rows if row.refused]
    if refused:
        number = len(refused)
        do = "training stops there; name another model, or take the rows out"
        yield Problem(f"{_rows(number, name, 'do')} not fit this model", number, do, refused[0])
    nothing = [row for row in look.rows if row.cut_to_nothing]
    if nothing:
        number = len(nothing)
        what = f"{_rows(number, name, 'have')} no answer within the first data.max_length={look.max_length} tokens"
        do = f"training stops there; set data.max_length={_longest(nothing)}, or take the rows out"
        yield Problem(what, number, do, nothing[0].where)


def _of_repeats(look: Look) -> Iterator[Problem]:
    exact = len(look.exact)
    if exact:
        what = f"{_rows(exact, NAMES['train'], 'repeat')} an earlier row word for word"
        yield Problem(what, exact, "data.duplicates=exact leaves such rows out", look.exact[0])
    if look.near:
        near = len(look.near)
        what = f"{_rows(near, NAMES['train'], 'are')} nearly the same as an earlier row"
        yield Problem(what, near, "data.duplicates=near leaves such rows out, and exact repeats, too", look.near[0])


def _of_answers(look: Look) -> Iterator[Problem]:
    """Name answers that give none, and an answer that stands in many rows."""
    total = len(look.rows)
    placeholders = look.kinds["placeholder"]
    if placeholders:
        what = f"{placeholders:,} of {total:,} answers are placeholders, which announce an answer and give none"
        do = "write the answers or take these rows out, because an adapter learns placeholders, too"
        yield Problem(what, placeholders, do)
    empty = look.kinds["empty answer"]
    if empty:
        yield Problem(f"{empty:,} of {total:,} answers hold no text", empty, "write them, or take these rows out")
    for text, rows in look.commonest_answers()[:1]:
        if text and rows >= max(3, REPEATED * total):
            what = f"{rows:,} of {total:,} rows have the same answer, {_shortened(text)}"
            yield Problem(what, rows, "vary it or take some of these rows out, because the model will often give it")


def _of_lengths(look: Look, name: str) -> Iterator[Problem]:
    longer = [row for row in look.longer if not row.cut_to_nothing]
    if longer:
        number = len(longer)
        what = f"{_rows(number, name, 'are')} longer than data.max_length={look.max_length} tokens"
        do = f"the end is cut off; data.max_length={_longest(longer)} keeps it, data.overflow=drop leaves such rows out"
        yield Problem(what, number, do, longer[0].where)


def _longest(rows: Sequence[RowLook]) -> int:
    return max(row.tokens or 0 for row in rows)


def _of_the_contract(look: Look, name: str) -> Iterator[Problem]:
    """Name the rows without the answer contract, where others keep it."""
    plain = sum(look.kinds[form] for form in FORMS)
    if 0 < plain < len(look.rows):
        what = f"{_rows(plain, name, 'do')} not keep the answer contract, and the others do"
        yield Problem(what, plain, "mend or take them out, because cria eval gives scores only if all rows keep it")


def _shortened(text: str) -> str:
    words = text.split()
    if len(words) <= SHOWN:
        return f'"{" ".join(words)}"'
    return f'"{" ".join(words[:SHOWN])} ..."'
