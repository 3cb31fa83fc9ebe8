"""Deal out micro-batches to the data-parallel ranks, in the order in which one process would read them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from cria_tricks.data.tokens import IGNORED


class Share(BatchSampler):
    """Micro-batches number r, r + N, r + 2 N, ... of those that one process would read.

    So of each window of k micro-batches every share gets k / N, and the windows hold the same rows for any N. Shares
    must be equally long, as processes wait for each other: where the micro-batches end unevenly, a share ends with a
    micro-batch of one row in which nothing is trained. (accelerate's ``even_batches`` takes rows of the beginning
    again: the 107 Kwanzaa rows would become 108.)

    Args:
        sampler: the order of the rows.
        batch_size: rows of a micro-batch.
        share: r.
        shares: N.
        filler: the index of the row in which nothing is trained.
        at_once: micro-batches that are given together; a pipeline takes all of a step.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        batch_size: int,
        share: int = 0,
        shares: int = 1,
        filler: int = -1,
        at_once: int = 1,
    ):
        super().__init__(sampler, batch_size, drop_last=False)
        self.share = share
        self.shares = shares
        self.filler = filler
        self.at_once = at_once

    def __iter__(self) -> Iterator[list[int]]:
        mine = self._micro_batches()
        while rows := list(itertools.chain.from_iterable(itertools.islice(mine, self.at_once))):
            # Beside real rows the filler is not needed: nobody waits for a micro-batch of its own.
            yield [row for row in rows if row != self.filler] or rows

    def _micro_batches(self) -> Iterator[list[int]]:
        number = -1
        for number, batch in enumerate(super().__iter__()):
            if number % self.shares == self.share:
                yield batch
        if number % self.shares < self.share and number >= 0:
            yield [self.filler]

    def __len__(self) -> int:
        return math.ceil(super().__len__() / (self.shares * self.at_once))


def with_filler(rows: Sequence[dict[str, list[int]]], pad_id: int) -> list[dict[str, Any]]:
    """Rows, and behind them one in which nothing is trained; it has two tokens, as a loss needs a predecessor."""
    filler = {"input_ids": [pad_id, pad_id], "labels": [IGNORED, IGNORED]}
    if rows and "position_ids" in rows[0]:
        filler["position_ids"] = [0, 1]
    return [*rows, filler]
