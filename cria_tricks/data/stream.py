"""Training rows that are read as they are needed: a stream that never ends, and goes on where it was stopped.

A step takes k micro-batches, and the stream has k lanes: micro-batch i of every step comes from lane i, which has
shards of its own. N processes take k / N lanes each, number r, r + N, r + 2 N, ... So each process reads its part only,
a step has the same rows for any N, and a run may go on with another N. A lane that comes to its end begins again, with
its shards in another order.
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
from cria_tricks.data.shards import Hub, Streamed
from cria_tricks.data.sources import Source
from cria_tricks.data.stream_lanes import Lane, Row, datasets_of
from cria_tricks.data.tokens import chunks, document, token_row
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe


class Stream(torch.utils.data.IterableDataset):
    """The rows of a process, for ever: ``train.batch_size`` from each of its lanes in turn.

    Like ``TokenRows`` it says what the estimate and the report ask of the training rows, as far as it can be known.

    Args:
        recipe: what is to be trained.
        source: what is read.
        held_out: the evaluation's.
        tokenizer: the model's.
        world: the processes of the run.
        say: takes a sentence for the user.
        augment: as for :class:`cria_tricks.data.prepare.Prepare`.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Streamed,
        held_out: Source,
        tokenizer: Any,
        world: World,
        say: Callable[[str], None],
        augment: Copies | None = None,
    ):
        self.recipe, self.source, self.tokenizer, self.say = recipe, source, tokenizer, say
        self.held_out = held_out.sha256
        self.prepare = Prepare(recipe, held_out.rows, lambda found: say(f"warning: data.leakage: {found}"), augment)
        mine = range(world.data_rank, source.lanes, world.data)
        found = datasets_of(source, recipe.train.seed, mine)
        self.lanes = {
            lane: Lane(dataset, self._read, source.shuffles, source.lanes)
            for lane, dataset in zip(mine, found, strict=True)
        }
        self.survey: stream_duplicates.Survey | None = None
        self.longest, self.highest_id = recipe.data.max_length, len(tokenizer) - 1
        self.total = Lane(None, self._read, False, source.lanes)

    def look_for_duplicates(self, folder: Path, world: World, console: Console) -> None:
        """Read everything once, if duplicates are to be left out and an earlier part of the run has not done so.

        Args:
            folder: the run's, where the result is kept.
            world: the first of the processes reads, the others wait for ``parallel.timeout`` at most.
            console: where progress is shown.
        """
        data, file = self.recipe.data, folder / stream_duplicates.FILE
        if data.duplicates == "keep":
            return
        about = {"settings": data.model_dump(mode="json"), "lanes": self.source.lanes}
        about |= {"train": self.source.sha256, "eval": self.held_out}

        def look() -> stream_duplicates.Survey:
            if kept := stream_duplicates.read(file, about):
                return kept
            try:
                with counted(self.source.whole(), "looking for duplicates", console) as rows:
                    found = stream_duplicates.survey(rows, self.prepare, near=data.duplicates == "near")
            except BadInput as error:
                raise BadInput(self.source.in_lines(str(error))) from None
            stream_duplicates.write(file, found, about)
            return found

        self.survey = world.first(look)

    def __iter__(self) -> Iterator[Row]:
        lanes = [iter(lane) for lane in self.lanes.values()]
        while True:
            for lane in lanes:
                for _ in range(self.recipe.train.batch_size):
                    yield next(lane)

    def _read(self, item: Any, tally: Tally) -> list[Row]:
        """The token rows of an item; those of texts in an order drawn from seed and item."""
        repeated = self.survey.reason if self.survey else None
        rows: list[Row] = []
        try:
            for chat in self.prepare(self.source.chats(item), tally, repeated):
                rows += self._tokens(chat, tally)
        except BadInput as error:
            raise BadInput(self.source.in_lines(str(error))) from None
        if len(rows) > 1 and not isinstance(self.source, Hub):
            order = np.random.default_rng([self.recipe.train.seed, item["number"]]).permutation(len(rows))
            rows = [rows[index] for index in order]
        return rows

    def _tokens(self, chat: Chat, tally: Tally) -> list[Row]:
        data = self.recipe.data
        if chat.text:
            tally.kinds[chat.kind] += 1
            return list(chunks(document(chat, self.tokenizer), data.max_length, data.overlap))
        row, longer = token_row(chat, self.tokenizer, data.max_length, data.overflow)
        if longer:
            tally.count(CUT if row else DROPPED, chat)
        if row is None:
            return []
        tally.kinds[chat.kind] += 1
        return [row]

    def state(self) -> dict[str, Any]:
        """Where each lane of this process is; after a step, in which all had their turn."""
        return {str(number): lane.state() for number, lane in self.lanes.items()}

    def go_on(self, states: Mapping[str, Any]) -> None:
        """Go on where the lanes were, whichever processes had them."""
        for number, lane in self.lanes.items():
            lane.go_on(states[str(number)])

    @property
    def passes(self) -> int:
        """How often every row of this process was given."""
        return min(lane.epoch for lane in self.lanes.values())

    def add_up(self, world: World) -> None:
        """Put the counts of all lanes together, in the first process; they are what the report asks for."""
        for state in {key: value for states in world.gather(self.state()) for key, value in states.items()}.values():
            for name in ("rows", "tokens", "trained"):
                setattr(self.total, name, getattr(self.total, name) + state[name])
            self.total.tally.add(state["tally"], state["kinds"])

    @property
    def rows(self) -> "Stream":
        return self

    @property
    def count(self) -> int:
        """Rows given."""
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
        """Tokens with a label in the fullest micro-batch that may come."""
        return batch_size * self.longest
