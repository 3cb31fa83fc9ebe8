"""Deal out micro-batches to the data-parallel ranks, in the order in which one process would read them."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, ConcatDataset, Dataset

from cria_tricks.data.tokens import IGNORED


class Share(BatchSampler):
    """Yield the micro-batches of rank r of N: numbers r, r + N, r + 2 N, ... of those that one process would read.

    So each rank gets k / N of the k micro-batches of a window (an optimizer step), and a window holds the same rows for
    any N. All ranks must get equally many micro-batches, because they wait for each other. If the micro-batches do not
    divide evenly, the share of a rank ends with a filler: a micro-batch of one row in which nothing is trained.
    (accelerate's ``even_batches`` takes rows of the beginning again: the 107 Kwanzaa rows would become 108.)

    Args:
        sampler: the order of the rows.
        batch_size: rows of a micro-batch.
        share: r, the data-parallel rank.
        shares: N, the number of data-parallel ranks.
        filler: the index of the row in which nothing is trained.
        at_once: micro-batches that are yielded as one batch; a pipeline takes all of a step.
        skip: batches at the beginning that are left out, because a run is resumed after them.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        batch_size: int,
        share: int = 0,
        shares: int = 1,
        filler: int = -1,
        at_once: int = 1,
        skip: int = 0,
    ):
        super().__init__(sampler, batch_size, drop_last=False)
        self.share = share
        self.shares = shares
        self.filler = filler
        self.at_once = at_once
        self.skip = skip

    def __iter__(self) -> Iterator[list[int]]:
        mine = itertools.islice(self._micro_batches(), self.skip * self.at_once, None)
        while rows := list(itertools.chain.from_iterable(itertools.islice(mine, self.at_once))):
            # A filler only keeps a batch from being empty, so it is dropped beside real rows.
            yield [row for row in rows if row != self.filler] or rows

    def _micro_batches(self) -> Iterator[list[int]]:
        number = -1
        for number, batch in enumerate(super().__iter__()):
            if number % self.shares == self.share:
                yield batch
        if number % self.shares < self.share and number >= 0:  # the last round ended before it came to this rank
            yield [self.filler]

    def __len__(self) -> int:
        return math.ceil(super().__len__() / (self.shares * self.at_once))


def with_filler(rows: Sequence[dict[str, list[int]]], pad_id: int) -> Dataset[dict[str, Any]]:
    """Append a filler row, in which nothing is trained.

    It has two tokens, because only a token with another one before it can have a loss. The rows are not copied into a
    list, because those of a mapped file are read one by one.
    """
    filler = {"input_ids": [pad_id, pad_id], "labels": [IGNORED, IGNORED]}
    if rows and "position_ids" in rows[0]:
        filler["position_ids"] = [0, 1]
    return ConcatDataset([rows, [filler]])  # type: ignore[list-item]
