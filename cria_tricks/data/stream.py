"""Stream training rows: read them as they are needed, without an end, and continue a resumed run where it stopped.

A step takes k micro-batches, and the stream has k lanes: micro-batch i of every step comes from lane i, which has
shards of its own. With N data-parallel ranks, rank r reads the k / N lanes r, r + N, r + 2 N, ... So each rank reads
only its part of the data, a step has the same rows for any N, and a run can be resumed with another N. When a lane has
read all its shards, it begins again, with the shards in another order.

A hub data set differs: its shards are never shuffled, and if k lanes cannot divide them evenly, each lane reads all
rows and keeps every k-th.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from cria_tricks.common.errors import BadInput
from cria_tricks.common.progress_bars import counted
from cria_tricks.data import stream_duplicates
from cria_tricks.data.counts import CUT, DROPPED, Tally
from cria_tricks.data.prepare import Copies, Prepare
from cria_tricks.data.rows import Chat
from cria_tricks.data.shards import HubStream, Streamed
from cria_tricks.data.sources import DataSource
from cria_tricks.data.stream_lanes import Lane, datasets_of
from cria_tricks.data.tokens import TokenRow, chunks, document, token_row
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe


class Stream(torch.utils.data.IterableDataset):
    """Yield the rows of this process without an end: ``train.batch_size`` rows from each of its lanes in turn.

    It has the attributes of ``TokenRows``, which the estimate and the report use. But ``longest`` and ``highest_id``
    are upper limits, because the rows are not read yet, and the counts are known only after :meth:`add_up`.

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
        source: Streamed,
        held_out: DataSource,
        tokenizer: Any,
        world: World,
        say: Callable[[str], None],
        augment: Copies | None = None,
    ):
        self.recipe = recipe
        self.source = source
        self.tokenizer = tokenizer
        self.say = say
        self.held_out_sha256 = held_out.sha256
        self.prepare = Prepare(recipe, held_out.rows, lambda found: say(f"warning: data.leakage: {found}"), augment)
        mine = range(world.data_rank, source.lanes, world.data)
        found = datasets_of(source, recipe.train.seed, mine)
        self.lanes = {lane: Lane(dataset, self._read, source.lanes) for lane, dataset in zip(mine, found, strict=True)}
        self.duplicates: stream_duplicates.Duplicates | None = None
        self.longest = recipe.data.max_length
        self.highest_id = len(tokenizer) - 1
        # A lane that reads nothing: add_up puts the counts of all lanes into it.
        self.total = Lane(lambda epoch: (), self._read, source.lanes)

    def look_for_duplicates(self, folder: Path, world: World, console: Console) -> None:
        """Find duplicates by reading the whole source once, if the recipe asks for it.

        A resumed run takes the result from the run's folder instead.

        Args:
            folder: the run's folder, where the result is saved.
            world: the processes of the run. Rank 0 reads; the others wait, at most ``parallel.timeout`` seconds.
            console: where to show progress.
        """
        data = self.recipe.data
        if data.duplicates == "keep":
            return
        file = folder / stream_duplicates.FILE
        # A saved result is used only if none of these has changed. The number of lanes is one of them, because with
        # another number small text files are cut into other pieces.
        about = {
            "settings": data.model_dump(mode="json"),
            "lanes": self.source.lanes,
            "train": self.source.sha256,
            "eval": self.held_out_sha256,
        }

        def look() -> stream_duplicates.Duplicates:
            kept = stream_duplicates.read(file, about)
            if kept:
                return kept
            assert not isinstance(self.source, HubStream), "rules.refuse has refused it"
            rows = self.source.in_order(self.source.shards())  # type: ignore[arg-type]
            try:
                with counted(rows, "looking for duplicates", console) as read:
                    found = stream_duplicates.find_duplicates(read, self.prepare, data.duplicates == "near", folder)
            except BadInput as error:
                # A row is known by its first byte in the file; the user needs its line.
                raise BadInput(self.source.in_lines(str(error))) from None
            stream_duplicates.write(file, found, about)
            return found

        self.duplicates = world.on_rank_zero(look)

    def __iter__(self) -> Iterator[TokenRow]:
        lanes = [iter(lane) for lane in self.lanes.values()]
        while True:
            for lane in lanes:
                for _ in range(self.recipe.train.batch_size):
                    yield next(lane)

    def _read(self, item: Any, tally: Tally) -> list[TokenRow]:
        """Make the tokenised rows of an item, shuffled by the seed and the item's number.

        An item is what a lane iterates over (``shards.py``): the place of one row in a file, a list of pieces of texts,
        or one row of a hub data set. A list of pieces becomes many rows, which would otherwise come in the order of the
        text. The items of a hub data set have no number, so their rows are not shuffled.
        """
        repeated = self.duplicates.reason if self.duplicates else None
        rows: list[TokenRow] = []
        try:
            for chat in self.prepare(self.source.chats(item), tally, repeated):
                rows += self._tokens(chat, tally)
        except BadInput as error:
            # As above: name the line instead of the byte.
            raise BadInput(self.source.in_lines(str(error))) from None
        if len(rows) > 1 and not isinstance(self.source, HubStream):
            order = np.random.default_rng([self.recipe.train.seed, item["number"]]).permutation(len(rows))
            rows = [rows[index] for index in order]
        return rows

    def _tokens(self, chat: Chat, tally: Tally) -> list[TokenRow]:
        data = self.recipe.data
        if chat.text:
            tally.kinds[chat.kind] += 1
            return list(chunks(document(chat, self.tokenizer), data.max_length, data.overlap))
        row, longer = token_row(chat, self.tokenizer, data.max_length, data.overflow, bool(data.eos))
        if longer:
            tally.count(CUT if row else DROPPED, chat)
        if row is None:
            return []
        tally.kinds[chat.kind] += 1
        return [row]

    def state(self) -> dict[str, Any]:
        """Return the position and the counts of each lane of this process, by its number. Call it between two steps."""
        return {str(number): lane.state() for number, lane in self.lanes.items()}

    def go_on(self, states: Mapping[str, Any]) -> None:
        """Set position and counts of this process's lanes from the states of all lanes, whoever saved them."""
        for number, lane in self.lanes.items():
            lane.go_on(states[str(number)])

    @property
    def passes(self) -> int:
        """How many whole passes over its rows every lane of this process has completed."""
        return min(lane.epoch for lane in self.lanes.values())

    def add_up(self, world: World) -> None:
        """Add up the counts of all lanes of all processes, on rank 0, for the report."""
        # Counted anew, because train.keep_best asks during the run, too.
        self.total = Lane(lambda epoch: (), self._read, self.source.lanes)
        by_lane: dict[str, Any] = {}
        for states in world.gather(self.state()):
            by_lane |= states  # tensor-parallel ranks read the same lanes, and each lane must count once
        for state in by_lane.values():
            self.total.rows += state["rows"]
            self.total.tokens += state["tokens"]
            self.total.trained += state["trained"]
            self.total.tally.add(state["tally"], state["kinds"])

    @property
    def rows(self) -> "Stream":
        return self

    @property
    def count(self) -> int:
        """Rows that were yielded."""
        return self.total.rows

    @property
    def tokens(self) -> int:
        return self.total.tokens

    @property
    def trained_tokens(self) -> int:
        return self.total.trained

    @property
    def tally(self) -> Tally:
        return self.total.tally

    @property
    def cut(self) -> int:
        return self.tally.rows[CUT]

    @property
    def dropped(self) -> int:
        return self.tally.rows[DROPPED]

    def most_trained(self, batch_size: int) -> int:
        """The upper limit of the trained tokens in a micro-batch: all tokens of full rows."""
        return batch_size * self.longest
