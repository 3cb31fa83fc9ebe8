"""Read one lane of a stream, and keep its position, so that a run can be resumed.

A lane supplies one of the micro-batches of every optimizer step (``stream.py``). It iterates over items
(``shards.py``): an item is one row of a file or one shard of texts, and may become several training rows. So the
position of a lane has two parts: the state of its ``datasets`` object, and how many rows of the current item were
yielded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import Tally
from cria_tricks.data.shards import HubStream, Streamed
from cria_tricks.data.tokens import TokenRow, trained


class Lane:
    """Yield the rows of one lane without an end.

    Args:
        dataset: returns the ``datasets.IterableDataset`` of items for a pass, by the number of the pass.
        read: makes the rows of an item, and counts the rows that it leaves out.
        lanes: the number of lanes, for an error message.

    Attributes:
        before: the state of the pass's data set before the current item; ``None`` at the beginning of a pass.
        epoch: how many passes are completed.
        given: how many rows of the current item were yielded.
        in_epoch: how many rows were yielded in this pass.
        rows: how many rows were yielded in all.
        tokens: the tokens of these rows.
        trained: the trained tokens of these rows.
        tally: what happened to the rows that were read.
    """

    def __init__(self, dataset: Callable[[int], Any], read: Callable[[Any, Tally], list[TokenRow]], lanes: int):
        self.dataset = dataset
        self.read = read
        self.lanes = lanes
        self.before: Any = None
        self.epoch = self.given = self.in_epoch = self.rows = self.tokens = self.trained = 0
        self.tally = Tally()

    def __iter__(self) -> Iterator[TokenRow]:
        while True:
            dataset = self.dataset(self.epoch)
            dataset.load_state_dict(self.before)
            for item in dataset:
                # A run that was stopped inside an item reads it again after a resume. Its rows were counted the first
                # time, so this time they go into a tally that is thrown away.
                tally = Tally() if self.given else self.tally
                rows = self.read(item, tally)
                while self.given < len(rows):
                    self.given += 1
                    yield self._counted(rows[self.given - 1])
                self.before = dataset.state_dict()
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
        if self.before:  # in checkpoints of earlier versions datasets knew the number of the pass
            self.before = {**self.before, "epoch": 0}
        self.tally = Tally(state["tally"], state.get("kinds"))  # checkpoints of earlier versions have no kinds


def datasets_of(source: Streamed, seed: int, mine: Sequence[int]) -> list[Callable[[int], Any]]:
    """Make a ``datasets.IterableDataset`` for each pass of each lane, so that no two lanes read the same row.

    Each lane gets shards of its own, in another order in each pass. But if n lanes cannot divide the shards of a hub
    data set evenly, each lane reads all of the data set and keeps only every n-th row.

    Args:
        source: where the rows come from.
        seed: decides the order of the shards.
        mine: the numbers of the lanes to return.

    Returns:
        For each lane a function that makes its data set, by the number of the pass.

    Raises:
        BadInput: if files have fewer shards than there are lanes.
    """
    # It takes a second to import, and only a streamed run needs it.
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node

    if isinstance(source, HubStream):
        # Not shuffled: datasets shuffles the shards of such a set before it divides them among lanes. So with each pass
        # a lane would get other shards, and two lanes in different passes could read the same one.
        found = [split_dataset_by_node(source.rows, lane, source.lanes) for lane in mine]
        return [partial(_in_any_pass, dataset) for dataset in found]
    shards: list[Any] = source.shards()
    if len(shards) < source.lanes:
        raise too_few(source.lanes)
    mixed = _in_order(shards, np.random.default_rng(seed).permutation(len(shards)))

    def in_pass(lane: int, epoch: int) -> Any:
        of_lane = mixed[lane :: source.lanes]
        # Older versions of datasets leave the shards in their order. Newer ones shuffle them as this line does.
        order = np.random.default_rng(epoch).permutation(len(of_lane)) if epoch else range(len(of_lane))
        kwargs = {"shards": _in_order(of_lane, order), "seed": seed}
        return IterableDataset.from_generator(source.items, gen_kwargs=kwargs)

    return [partial(in_pass, lane) for lane in mine]


def _in_any_pass(dataset: Any, epoch: int) -> Any:
    return dataset


def _in_order(shards: Sequence[Any], order: Iterable[int]) -> list[Any]:
    return [shards[index] for index in order]


def too_few(lanes: int) -> BadInput:
    """Return the error for a lane that has no rows."""
    return BadInput(
        f"data.stream=true: there are not enough rows for each of the {lanes} micro-batches of a step to have its own, "
        "or those of one were all left out; set data.stream=false, or a smaller tricks.gradient_accumulation"
    )
