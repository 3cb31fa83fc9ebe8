"""Turn rows as they were read into rows to train on: filter, deduplicate, augment, tokenise; for lists and streams."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import ADDED, KEPT, Tally
from cria_tricks.data.duplicates import Repeats
from cria_tricks.data.filters import RowFilter
from cria_tricks.data.rows import Chat
from cria_tricks.data.rules import refuse_missing_libraries
from cria_tricks.data.sources import DataSource
from cria_tricks.data.tokens import TokenRows, tokenize
from cria_tricks.recipe import Recipe

Copies = Callable[[Chat], Iterable[tuple[str, Chat]]]


class Prepare:
    """Filter, deduplicate and augment training rows before they are tokenised.

    Args:
        recipe: its ``data`` fields, and ``train.seed``.
        held_out: the evaluation's rows.
        say: takes a sentence when the first training row is found that is one of them, and is kept.
        augment: makes altered copies of a row, each with the name of its kind; needed if the recipe asks for copies.

    Raises:
        BadInput: for a language that cannot be told, or a library that is not installed.
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
        """Leave rows out, and add copies; copies that are like evaluation rows are left out too.

        Args:
            rows: as they were read.
            tally: counts them.
            repeated: says why a row came before, or ``None``; asked of rows that nothing else speaks against.
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
    train: DataSource,
    held_out: DataSource,
    tokenizer: Any,
    say: Callable[[str], None],
    augment: Copies | None = None,
) -> TokenRows:
    """Prepare the training rows and tokenise them.

    Args:
        recipe: what is to be trained.
        train: the rows as they were read.
        held_out: the evaluation's.
        tokenizer: the model's.
        say: takes a sentence on what was left out and added.
        augment: as for :class:`Prepare`.

    Raises:
        BadInput: if no row is left, or one cannot be trained on.
    """
    data = recipe.data
    tally = Tally()
    prepare = Prepare(recipe, held_out.rows, augment=augment)
    repeated = None
    if data.duplicates != "keep":
        repeated = Repeats(near=data.duplicates == "near").reason
    rows = list(prepare(train.rows, tally, repeated))
    if tally.in_words():
        say(f"data.train: {tally.in_words()}")
    if not rows:
        raise BadInput(f"data.train={data.train}: {tally.in_words()}, so there is nothing to train on")
    return tokenize(rows, tokenizer, data.max_length, data.overflow, data.overlap, tally)


def eval_rows(recipe: Recipe, held_out: DataSource, tokenizer: Any) -> TokenRows:
    """Tokenise the evaluation's rows, all of them as they are.

    Raises:
        BadInput: if one cannot be evaluated.
    """
    data = recipe.data
    return tokenize(held_out.rows, tokenizer, data.max_length, data.overflow, data.overlap)
