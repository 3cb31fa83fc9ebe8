"""Read one lane of a stream, and keep its position, so that a run can be resumed.

A lane supplies one of the micro-batches of every optimizer step (``stream.py``). It iterates over items
(``shards.py``): an item is one row of a file or one shard of texts, and may become several training rows. So the
position of a lane has two parts: the state of its ``datasets`` object, and how many rows of the current item were
yielded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import Tally
from cria_tricks.data.shards import HubStream, Streamed
from cria_tricks.data.tokens import TokenRow, trained


class Lane:
    """Yield the rows of one lane without an end.

    Args:
        dataset: a ``datasets.IterableDataset`` of items.
        read: makes the rows of an item, and counts the rows that it leaves out.
        shuffles: whether the shards get another order with each pass.
        lanes: the number of lanes, for an error message.

    Attributes:
        before: the state of ``dataset`` before the current item; ``None`` at the beginning of a pass.
        epoch: how many passes are completed.
        given: how many rows of the current item were yielded.
        in_epoch: how many rows were yielded in this pass.
        rows: how many rows were yielded in all.
        tokens: the tokens of these rows.
        trained: the trained tokens of these rows.
        tally: what happened to the rows that were read.
    """

    def __init__(self, dataset: Any, read: Callable[[Any, Tally], list[TokenRow]], shuffles: bool, lanes: int):
        self.dataset = dataset
        self.read = read
        self.shuffles = shuffles
        self.lanes = lanes
        self.before: Any = None
        self.epoch = self.given = self.in_epoch = self.rows = self.tokens = self.trained = 0
        self.tally = Tally()

    def __iter__(self) -> Iterator[TokenRow]:
        while True:
            if self.shuffles:
                self.dataset.set_epoch(self.epoch)
            self.dataset.load_state_dict(self.before)
            for item in self.dataset:
                # A run that was stopped inside an item reads it again after a resume. Its rows were counted the first
                # time, so this time they go into a tally that is thrown away.
                tally = Tally() if self.given else self.tally
                rows = self.read(item, tally)
                while self.given < len(rows):
                    self.given += 1
                    yield self._counted(rows[self.given - 1])
                self.before = self.dataset.state_dict()
                self.given = 0
            if not self.in_epoch:  # a pass without a row; the next one would find none either
                raise too_few(self.lanes)
            self.epoch += 1
            self.before = None
            self.in_epoch = 0

    def _counted(self, row: TokenRow) -> TokenRow:
        self.in_epoch += 1
        self.rows += 1
        self.tokens += len(row["input_ids"])
        self.trained += trained(row)
        return row

    NUMBERS = ("before", "epoch", "given", "in_epoch", "rows", "tokens", "trained")
    """The attributes that :meth:`state` saves as they are: the dataset's state, and numbers."""

    def state(self) -> dict[str, Any]:
        """Return the position and the counts as JSON data."""
        return {name: getattr(self, name) for name in self.NUMBERS} | {
            "tally": self.tally.to_dict(),
            "kinds": dict(self.tally.kinds),
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Set the position and the counts from a state."""
        for name in self.NUMBERS:
            setattr(self, name, state[name])
        self.tally = Tally(state["tally"], state.get("kinds"))  # checkpoints of earlier versions have no kinds


def datasets_of(source: Streamed, seed: int, mine: Sequence[int]) -> list[Any]:
    """Make a ``datasets.IterableDataset`` for each lane, so that no two lanes read the same row.

    Each lane gets shards of its own. But if n lanes cannot divide the shards of a hub data set evenly, each lane reads
    all of the data set and keeps only every n-th row.

    Args:
        source: where the rows come from.
        seed: decides the order of the shards.
        mine: the numbers of the lanes to return.

    Raises:
        BadInput: if files have fewer shards than there are lanes.
    """
    # It takes a second to import, and only a streamed run needs it.
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node

    if isinstance(source, HubStream):
        return [split_dataset_by_node(source.rows, lane, source.lanes) for lane in mine]
    shards: list[Any] = source.shards()
    if len(shards) < source.lanes:
        raise too_few(source.lanes)
    # datasets shuffles the shards only from the second pass on, so they are shuffled here for the first.
    order = np.random.default_rng(seed).permutation(len(shards))
    # datasets takes the only list among these arguments for the shards, and divides it among the lanes.
    kwargs = {"shards": [shards[index] for index in order], "seed": seed}
    whole = IterableDataset.from_generator(source.items, gen_kwargs=kwargs)
    return [whole.shard(source.lanes, lane, contiguous=False) for lane in mine]


def too_few(lanes: int) -> BadInput:
    """Return the error for a lane that has no rows."""
    return BadInput(
        f"data.stream=true: there are not enough rows for each of the {lanes} micro-batches of a step to have its own, "
        "or those of one were all left out; set data.stream=false, or a smaller tricks.gradient_accumulation"
    )
