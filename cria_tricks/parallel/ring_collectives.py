"""Collectives from scratch: an all-reduce as a ring of N processes, in two halves."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Add a tensor up over all processes, in place, with nothing but sends and receives.

    Every process sends 2 (N - 1) / N of the tensor, contiguous, of any shape, the same everywhere.
    """
    pieces = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    ring_reduce_scatter(pieces)
    ring_all_gather(pieces)


def ring_reduce_scatter(pieces: Sequence[torch.Tensor]) -> None:
    """N - 1 times: send a piece to the right, and add what comes from the left to one's own.

    The sum of a piece goes round and grows. At the end piece r + 1 of process r is complete, of N, in place.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    for step in range(size - 1):
        mine = pieces[(rank - step) % size]
        growing = pieces[(rank - step - 1) % size]
        received = torch.empty_like(growing)
        _exchange(mine, received)
        growing += received


def ring_all_gather(pieces: Sequence[torch.Tensor]) -> None:
    """N - 1 times: send on the complete piece that came last; the first is one's own, r + 1."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    for step in range(size - 1):
        _exchange(pieces[(rank + 1 - step) % size], pieces[(rank - step) % size])


def _exchange(to_the_right: torch.Tensor, from_the_left: torch.Tensor) -> None:
    rank = dist.get_rank()
    size = dist.get_world_size()
    # Both at once: if all processes first sent and then received, none would ever receive.
    send = dist.P2POp(dist.isend, to_the_right, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, from_the_left, (rank - 1) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
