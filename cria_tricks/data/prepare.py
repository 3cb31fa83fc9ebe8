"""Turn the rows of a file into training rows: filter, deduplicate, augment and tokenise them.

Rows are filtered one by one: by length, language and repetition, and whether they leak evaluation rows.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import ADDED, KEPT, LEAK, LEAK_KEPT, READ, Tally
from cria_tricks.data.duplicates import Guard, Repeats, sequences, words
from cria_tricks.data.rows import Chat
from cria_tricks.data.rules import refuse_missing_libraries
from cria_tricks.data.sources import DataSource, OpenedSource
from cria_tricks.data.tokens import Tokenized, TokenRows, listed, tokenize
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Data

LOOKED_AT = 4000
"""How many characters of a row, from its beginning, are used to detect its language."""


class RowFilter:
    """Filter rows by the recipe's ``data`` fields, and by whether they leak evaluation rows.

    Args:
        settings: the recipe's ``data`` fields.
        held_out: the evaluation rows.
        say: prints one sentence, when the first leaked row is found and kept (``leakage="warn"``).

    Raises:
        BadInput: for a language that cannot be detected.
    """

    def __init__(self, settings: Data, held_out: Sequence[Chat], say: Callable[[str], None] = lambda sentence: None):
        self.settings = settings
        self.say = say
        self.guard: Guard | None = None
        if held_out and settings.leakage != "ignore":
            self.guard = Guard(held_out)
        self.language: Language | None = None
        if settings.language:
            self.language = Language(settings.language)
        self.first_leak = ""

    def keeps(self, row: Chat, tally: Tally) -> bool:
        """Return whether a row passes the filters and the leakage check, and count it."""
        tally.count(READ, row)
        reason = self._unfit(row)
        if reason:
            tally.count(reason, row)
        return not reason and self.may_be_trained(row, tally)

    def may_be_trained(self, row: Chat, tally: Tally) -> bool:
        """Return whether a row may be trained on, by the leakage check only.

        A row that is similar to an evaluation row is left out with ``leakage="drop"``, and kept but counted with
        ``leakage="warn"``. Augmented copies pass only this check, not the filters.

        Raises:
            BadInput: for such a row with ``leakage="error"``.
        """
        leak = self.guard.find(row) if self.guard else None
        if leak is None:
            return True
        said = f"{leak.row} is nearly {leak.held_out} (similarity {leak.similarity:.2f})"
        if leak.same:
            said = f"{leak.row} is {leak.held_out}"
        elif leak.similarity == 1:
            said = f"{leak.row} contains {leak.held_out}, or is part of it"
        if self.settings.leakage == "error":
            raise BadInput(f"data.leakage=error: {said}; take it out of one of the two, or set data.leakage=drop")
        if self.settings.leakage == "drop":
            tally.count(LEAK, row)
            return False
        tally.count(LEAK_KEPT, row)
        if not self.first_leak:  # print only the first; the report has the count
            self.first_leak = said
            self.say(said)
        return True

    def _unfit(self, row: Chat) -> str:
        words = len(row.content.split())
        if words < self.settings.min_words:
            return "shorter than data.min_words"
        if self.settings.max_words and words > self.settings.max_words:
            return "longer than data.max_words"
        if self.language and not self.language.is_of(row.content):
            return "in another language"
        if self.settings.quality == "gopher" and repetitive(row.content):
            return "repetitive"
        return ""


class Language:
    """Detect whether a text is in one language, by py3langid.

    Args:
        code: the language's ISO 639-1 code, e.g. ``"en"``.

    Raises:
        BadInput: if py3langid does not know the language.
    """

    def __init__(self, code: str):
        # It takes a while to import, and only a filter by language needs it.
        import py3langid.langid

        self.code = code
        self.identifier: Any = py3langid.langid.LanguageIdentifier.from_model_file(py3langid.langid.MODEL_FILE)
        if code not in self.identifier.labels:
            known = ", ".join(sorted(self.identifier.labels))
            raise BadInput(f"data.language={code}: cannot be told from others; there are {known}")

    def is_of(self, text: str) -> bool:
        return self.identifier.classify(text[:LOOKED_AT])[0] == self.code


LINES = (("line", r"\n+"), ("paragraph", r"\n{2,}"))
TOP = {2: 0.20, 3: 0.18, 4: 0.16}
"""The most that the commonest sequence of n words may take of a text's characters."""
AGAIN = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""The most that sequences of n words may take that occurred in the text before."""


def repetitive(text: str) -> str:
    """Return which of Gopher's rules of repetition a text breaks; empty if it breaks none.

    The rules are those of Rae et al. 2021, arXiv:2112.11446, appendix A.1.1, table A1; FineWeb takes them, too
    (arXiv:2406.17557, section 3.3). A sequence of words must occur twice to count, because in a text of ten words any
    two of them are a fifth.

    Examples:
        >>> repetitive("buy now " * 20)
        'the commonest 2 words are 0.88 of it'
        >>> repetitive("It rained in the morning, so we left for the harbour at noon.")
        ''
    """
    text = text.strip()
    for name, between in LINES:
        parts = re.split(between, text)
        repeated = _seen_before(parts)
        if len(repeated) > 0.30 * len(parts):
            return f"{len(repeated) / len(parts):.2f} of its {name}s are repeated"
        letters = sum(map(len, repeated)) / max(len(text), 1)
        if letters > 0.20:
            return f"repeated {name}s are {letters:.2f} of it"
    return _repeated_words(text)


def _seen_before(parts: Sequence[str]) -> list[str]:
    """Return the parts that are the same as an earlier one."""
    seen: set[str] = set()
    repeated = []
    for part in parts:
        if part in seen:
            repeated.append(part)
        seen.add(part)
    return repeated


def _repeated_words(text: str) -> str:
    """Return which rule on sequences of words a text breaks; empty if it breaks none."""
    found = words(text)
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    # until[i] is the number of letters in the first i words.
    until = np.concatenate([[0], np.cumsum(lengths)])
    for size, most in (TOP | AGAIN).items():
        if len(found) < size:
            break
        hashes = sequences(found, size)
        _, first, times = np.unique(hashes, return_index=True, return_counts=True)
        if size in TOP:
            letters = until[first + size] - until[first] + size - 1  # with the spaces between the words
            highest = int(times.max())
            share = highest * int(letters[times == highest].max()) / len(text)
            if highest > 1 and share > most:
                return f"the commonest {size} words are {share:.2f} of it"
            continue
        again = np.ones(len(hashes), bool)
        again[first] = False
        # A word counts once, in however many repeated sequences it is.
        inside = np.convolve(again, np.ones(size, np.int64)) > 0
        share = float(lengths[inside].sum()) / len(text)
        if share > most:
            return f"sequences of {size} words that occurred before are {share:.2f} of it"
    return ""


Copies = Callable[[Chat], Iterable[tuple[str, Chat]]]
"""A function that makes altered copies of a row, each with the name of its kind, a key of :data:`ADDED`."""


class Prepare:
    """Filter, deduplicate and augment training rows before they are tokenised, for lists and for streams.

    Args:
        recipe: its ``data`` fields are used.
        held_out: the evaluation rows.
        say: prints one sentence on the first row that leaks an evaluation row and is kept (``data.leakage=warn``).
        augment: makes altered copies of a row; needed if the recipe asks for copies.

    Raises:
        BadInput: for a language that cannot be detected, or a library that is not installed.
    """

    def __init__(
        self,
        recipe: Recipe,
        held_out: Sequence[Chat],
        say: Callable[[str], None] = lambda sentence: None,
        augment: Copies | None = None,
    ):
        refuse_missing_libraries(recipe.data)
        self.row_filter = RowFilter(recipe.data, held_out, say)
        self.augment = augment
        assert augment or not any(getattr(recipe.data, field) for field in ADDED), "nothing makes the copies"

    def __call__(
        self, rows: Iterable[Chat], tally: Tally, repeated: Callable[[Chat], str | None] | None = None
    ) -> Iterator[Chat]:
        """Yield the rows that are not left out, each followed by its altered copies.

        Copies pass the leakage check too, because a copy may be similar to an evaluation row.

        Args:
            rows: the rows as they were read.
            tally: counts what happens to each row; changed in place.
            repeated: returns why a row is a duplicate, or ``None``. It is asked only about rows that pass the filters,
                because a row that is left out must not make a later row a duplicate.
        """
        for row in rows:
            if not self.row_filter.keeps(row, tally):
                continue
            reason = repeated(row) if repeated else None
            if reason:
                tally.count(reason, row)
                continue
            tally.count(KEPT, row)
            yield row
            if not self.augment:
                continue
            for kind, copy in self.augment(row):
                if self.row_filter.may_be_trained(copy, tally):
                    tally.count(ADDED[kind], copy)
                    yield copy


def train_rows(
    recipe: Recipe,
    train: OpenedSource,
    held_out: DataSource,
    tokenizer: Any,
    say: Callable[[str], None],
    augment: Copies | None = None,
    collect: Callable[[Tokenized], TokenRows] = listed,
) -> TokenRows:
    """Prepare the training rows, tokenise and collect them.

    Args:
        recipe: the settings of the run.
        train: the training rows as they were read.
        held_out: the evaluation rows.
        tokenizer: the model's tokenizer.
        say: prints one sentence on how many rows were left out and added.
        augment: as for :class:`Prepare`.
        collect: where the rows go: a list, or a file (:func:`cria_tricks.data.table.mapped`).

    Raises:
        BadInput: if no row is left, or a row cannot be trained on.
    """
    data = recipe.data
    tally = Tally()
    # Prepare gets no say: the report warns of leaked rows that are kept, with their number (see counts.warnings).
    prepare = Prepare(recipe, held_out.rows, augment=augment)
    repeated = None
    if data.duplicates != "keep":
        repeated = Repeats(near=data.duplicates == "near").reason
    kept = prepare(train.rows, tally, repeated)
    made = Tokenized(kept, tokenizer, data.max_length, data.overflow, data.overlap, tally, bool(data.eos))
    rows = collect(made)
    if rows.tally.in_words():
        say(f"data.train: {rows.tally.in_words()}")
    return rows


def eval_rows(recipe: Recipe, held_out: DataSource, tokenizer: Any) -> TokenRows:
    """Tokenise the evaluation rows: all of them, without filters or augmentation.

    Raises:
        BadInput: if a row cannot be evaluated.
    """
    data = recipe.data
    return tokenize(
        held_out.rows,
        tokenizer,
        data.max_length,
        overflow=data.overflow,
        overlap=data.overlap,
        add_eos=bool(data.eos),
    )
