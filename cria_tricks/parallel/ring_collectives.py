"""Show an all-reduce from scratch: N processes form a ring, and run a reduce-scatter and then an all-gather."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum a tensor over all processes, in place, with nothing but sends and receives.

    The tensor is contiguous, of the same shape in all processes. Each process sends 2 (N - 1) / N of its bytes.
    """
    pieces = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    ring_reduce_scatter(pieces)
    ring_all_gather(pieces)


def ring_reduce_scatter(pieces: Sequence[torch.Tensor]) -> None:
    """Sum each piece over all processes, so that process r ends up with the sum of piece r + 1 (mod N), in place.

    This takes N - 1 steps. In each one, process r sends one piece to process r + 1 and adds the piece that it receives
    from process r - 1 to its own. So the partial sum of a piece travels around the ring and grows.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    for step in range(size - 1):
        mine = pieces[(rank - step) % size]
        growing = pieces[(rank - step - 1) % size]
        received = torch.empty_like(growing)
        wait(exchange(mine, received))
        growing += received


def ring_all_gather(pieces: Sequence[torch.Tensor]) -> None:
    """Copy the sums of all pieces to all processes, in place, after :func:`ring_reduce_scatter`.

    In each of N - 1 steps, a process sends on the sum that it received last; in the first step, that of piece r + 1.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    for step in range(size - 1):
        wait(exchange(pieces[(rank + 1 - step) % size], pieces[(rank - step) % size]))


def exchange(to_the_right: torch.Tensor, from_the_left: torch.Tensor) -> list[dist.Work]:
    """Begin to send one tensor to process r + 1 and to receive another from process r - 1; wait for what it returns."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    # Both at once: if all processes sent first, each would wait forever for the next one to receive.
    send = dist.P2POp(dist.isend, to_the_right, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, from_the_left, (rank - 1) % size)
    return dist.batch_isend_irecv([send, receive])


def wait(under_way: Sequence[dist.Work]) -> None:
    """Wait until a tensor has been sent and another received."""
    for work in under_way:
        work.wait()
