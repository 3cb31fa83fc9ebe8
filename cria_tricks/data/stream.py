"""Stream training rows: read them as they are needed, without an end, and continue a resumed run where it stopped.

The position is that of ``datasets.IterableDataset``, which is exact only without a shuffle buffer: with a buffer of
1,000 rows over eight shards, ``state_dict`` of datasets 5.2 loses 625 rows and gives 125 twice. So a stream keeps the
order of its source. A file or a hub data set that fits on the disk needs no stream (``table.py``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import Tally
from cria_tricks.data.prepare import Copies, Prepare
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource, OpenedSource
from cria_tricks.data.tokens import Tokenized, TokenRow, trained
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe


@dataclass
class Position:
    """Where one process is in the stream, and what it has read so far.

    Attributes:
        before: the position of the source before its current row; ``None`` at the beginning of a pass.
        passes: how many passes over all rows are completed.
        given: how many training rows of the current row were yielded; a text becomes several.
        in_pass: how many were yielded in this pass.
        rows: how many were yielded in all.
        tokens: the tokens of these rows.
        trained: the trained tokens of these rows.
        cut: how many rows lost their end.
        dropped: how many rows were too long and left out.
        tally: what happened to the rows that were read.
    """

    before: Any = None
    passes: int = 0
    given: int = 0
    in_pass: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    dropped: int = 0
    tally: Tally = field(default_factory=Tally)


class Stream(torch.utils.data.IterableDataset):
    """Yield the rows of this process without an end: of N data-parallel processes, each reads every N-th row.

    It has the attributes of ``TokenRows``, which the estimate and the report use. But ``longest`` and ``highest_id``
    are upper limits, because the rows are not read yet, and the counts are zero before :meth:`add_up`.

    Args:
        recipe: the settings of the run.
        source: where the rows come from.
        held_out: the evaluation rows.
        tokenizer: the model's tokenizer.
        world: the processes of the run.
        say: prints a sentence for the user.
        augment: as for :class:`cria_tricks.data.prepare.Prepare`.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: OpenedSource,
        held_out: DataSource,
        tokenizer: Any,
        world: World,
        say: Callable[[str], None],
        augment: Copies | None = None,
    ):
        self.recipe = recipe
        self.source = source
        self.tokenizer = tokenizer
        self.world = world
        self.prepare = Prepare(recipe, held_out.rows, lambda found: say(f"warning: data.leakage: {found}"), augment)
        self.position = Position()
        self.rows = self
        self.longest = recipe.data.max_length
        self.highest_id = len(tokenizer) - 1
        self.count = self.tokens = self.trained_tokens = self.cut = self.dropped = 0
        self.tally = Tally()

    def __iter__(self) -> Iterator[TokenRow]:
        items = _as_dataset(self.source.rows, self.world)
        at = self.position
        while True:
            items.load_state_dict(at.before)
            for item in items:
                rows = self._rows_of(item["row"])
                while at.given < len(rows):
                    at.given += 1
                    yield self._counted(rows[at.given - 1])
                at.given = 0
                at.before = items.state_dict()
            if not at.in_pass:  # the next pass would find none either
                raise BadInput(
                    f"data.train={self.recipe.data.train}: a pass of the stream has no row for process "
                    f"{self.world.data_rank} ({at.tally.in_words() or 'none was read'}); set data.stream=false"
                )
            at.passes += 1
            at.in_pass = 0
            at.before = None

    def _rows_of(self, chat: Chat) -> list[TokenRow]:
        """Prepare and tokenise one row of the source."""
        at = self.position
        data = self.recipe.data
        # A run that was stopped inside a row reads it again after a resume. It was counted the first time, so this time
        # it is counted in a tally that is thrown away.
        is_again = at.given > 0
        tally = Tally() if is_again else at.tally
        kept = self.prepare([chat], tally)
        made = Tokenized(kept, self.tokenizer, data.max_length, data.overflow, data.overlap, tally, bool(data.eos))
        rows = list(made)
        if not is_again:
            at.cut += made.cut
            at.dropped += made.dropped
        return rows

    def _counted(self, row: TokenRow) -> TokenRow:
        at = self.position
        at.in_pass += 1
        at.rows += 1
        at.tokens += len(row["input_ids"])
        at.trained += trained(row)
        return row

    def state(self) -> dict[str, Any]:
        """Return the position of this process as JSON data, by its rank. Call it between two steps."""
        at = self.position
        numbers = {name: value for name, value in vars(at).items() if name != "tally"}
        return {str(self.world.data_rank): numbers | {"steps": at.tally.to_dict(), "kinds": dict(at.tally.kinds)}}

    def go_on(self, states: Mapping[str, Any]) -> None:
        """Set the position of this process from the states of all.

        Raises:
            BadInput: if there were another number of processes, each of which had other rows.
        """
        if len(states) != self.world.data:
            raise BadInput(
                f"--resume: the stream was read by {len(states)} processes, and now there are {self.world.data}; start "
                "as many as before (data.stream=false goes on with any number)"
            )
        numbers = dict(states[str(self.world.data_rank)])
        tally = Tally(numbers.pop("steps"), numbers.pop("kinds"))
        self.position = Position(**numbers, tally=tally)

    @property
    def passes(self) -> int:
        """How many whole passes over its rows this process has completed."""
        return self.position.passes

    def add_up(self, world: World) -> None:
        """Add up the counts of all processes for the report, anew each time."""
        by_rank: dict[str, Any] = {}
        for states in world.gather(self.state()):
            by_rank |= states  # tensor-parallel ranks read the same rows, which must count once
        parts = by_rank.values()
        self.count = sum(part["rows"] for part in parts)
        self.tokens = sum(part["tokens"] for part in parts)
        self.trained_tokens = sum(part["trained"] for part in parts)
        self.cut = sum(part["cut"] for part in parts)
        self.dropped = sum(part["dropped"] for part in parts)
        self.tally = Tally()
        for part in parts:
            self.tally.add(part["steps"], part["kinds"])

    def most_trained(self, batch_size: int) -> int:
        """The upper limit of the trained tokens in a micro-batch: all tokens of full rows."""
        return batch_size * self.longest


def _as_dataset(rows: Iterable[Chat], world: World) -> Any:
    """Return the rows of this process as a ``datasets.IterableDataset``, which knows its position."""
    # It takes a second to import, and only a streamed run needs it.
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node

    def items(rows: Iterable[Chat]) -> Iterator[dict[str, Chat]]:
        for row in rows:
            yield {"row": row}

    whole = IterableDataset.from_generator(items, gen_kwargs={"rows": rows})
    return split_dataset_by_node(whole, world.data_rank, world.data)
