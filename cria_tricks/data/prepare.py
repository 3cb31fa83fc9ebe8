"""Turn the rows of a file into training rows: filter, deduplicate, augment and tokenise them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cria_tricks.data.counts import ADDED, KEPT, Tally
from cria_tricks.data.duplicates import Repeats
from cria_tricks.data.filters import RowFilter
from cria_tricks.data.rows import Chat
from cria_tricks.data.rules import refuse_missing_libraries
from cria_tricks.data.sources import DataSource, OpenedSource
from cria_tricks.data.tokens import Tokenized, TokenRows, listed, tokenize
from cria_tricks.recipe import Recipe

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
