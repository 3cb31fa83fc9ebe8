"""The processes of one run: how they join, what they must agree on, and how they end together.

A launcher (``torchrun``, ``accelerate launch``) starts N copies of one command and numbers them in the environment.
They join here, and the numbers are taken out of the environment: from then on every library takes its process for one
that is alone on one card. The strategies of this package are all that ties them together, so whatever holds for a run
of one process (the losses, the order of the rows, the checkpoints) is decided in one place for any number.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from cria_tricks.common.errors import Lost
from cria_tricks.processes import watchdog
from cria_tricks.processes.numbers import LOST, NUMBERS, have_joined, keep, processes, rank, see_one_card
from cria_tricks.processes.rendezvous import agree

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Who this process is in a run, and what it shares with the others; alone, everything here does nothing.

    Attributes:
        rank: its number.
        size: how many there are.
        data: how many shares the rows are divided into.
        mesh: the processes as a grid: ``data`` first, then ``tensor`` or ``stage``; ``None`` for a single one.
    """

    rank: int = 0
    size: int = 1
    data: int = 1
    mesh: "DeviceMesh | None" = None

    @classmethod
    def of(cls, data: int, device: str, axis: str = "tensor") -> "World":
        """The processes that have joined, as a grid.

        Args:
            data: shares of the rows.
            device: ``"cpu"`` or ``"cuda"``, where tensors are.
            axis: what the processes with the same rows divide: ``"tensor"`` for a block's matrices, ``"stage"`` for
                the blocks.
        """
        if processes() == 1:
            return cls()
        return cls(rank(), processes(), data, grid(device, data=data, **{axis: processes() // data}))

    @property
    def tensor(self) -> int:
        """How many processes share the matrices of a block."""
        return self._along("tensor")

    @property
    def stages(self) -> int:
        """How many processes have blocks of their own, one stage of a pipeline each."""
        return self._along("stage")

    @property
    def stage(self) -> int:
        """Which stage of its pipeline is this process's."""
        return 0 if self.mesh is None or self.stages == 1 else self.mesh.get_local_rank("stage")

    @property
    def stage_group(self) -> "ProcessGroup | None":
        """The processes of this pipeline; none without stages."""
        return None if self.mesh is None or self.stages == 1 else self.mesh.get_group("stage")

    @property
    def data_rank(self) -> int:
        """Which share of the rows is this process's."""
        return self.rank // (self.size // self.data)

    @property
    def draw(self) -> int:
        """Which random numbers this process draws: those that share a block's matrices must draw the same."""
        return self.rank // self.tensor

    def _along(self, axis: str) -> int:
        names = self.mesh.mesh_dim_names if self.mesh is not None else None
        return self.mesh[axis].size() if self.mesh is not None and axis in (names or ()) else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def sum(self, value: "torch.Tensor") -> "torch.Tensor":
        """Add a tensor up over the shares of the rows, in place."""
        if self.data > 1:
            import torch.distributed as dist

            assert self.mesh is not None
            dist.all_reduce(value, group=self.mesh["data"].get_group())
        return value

    def highest(self, *values: float) -> list[float]:
        """The largest of each value over all processes: a flag that one has raised is raised for all."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process; all get what it returns, or raise what it raises."""
        if self.size == 1:
            return function()
        import torch.distributed as dist

        done: list[Any] = [None, None]
        if self.is_first:
            try:
                done[0] = function()
            except Exception as error:
                done[1] = error
        dist.broadcast_object_list(done)
        if done[1] is not None:
            raise done[1]
        return done[0]

    @contextlib.contextmanager
    def within(self, context: "contextlib.AbstractContextManager[Any]") -> Iterator[None]:
        """Be inside a context of the first process; it alone enters it, and what that raises all raise."""
        with contextlib.ExitStack() as stack:
            self.first(lambda: stack.enter_context(context) and None)
            yield

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, in the first one; an empty list in the others."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(value, found if self.is_first else None)
        return found


@functools.cache
def grid(device: str, **sizes: int) -> "DeviceMesh":
    """The processes that have joined, as a grid with these axes; the same one when it is asked for again.

    Every grid has groups of its own along each axis, and with gloo every group has threads, which stay.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def joined(timeout: float, advice: str = "nothing was saved") -> Iterator[None]:
    """Join the processes that a launcher has started; with a single one, or when they have joined, nothing happens.

    Args:
        timeout: seconds after which a process that waits for another gives up.
        advice: what a process says of the loss of another one if it is stuck and cannot raise.

    Raises:
        Lost: inside, if another process has died or does not answer.
    """
    if processes() == 1 or have_joined():
        yield
        return
    import torch
    import torch.distributed as dist

    see_one_card()
    patience = timedelta(seconds=timeout)
    with in_one_line():
        store, number, size = next(iter(dist.rendezvous("env://", timeout=patience)))
        store = dist.PrefixStore(f"cria_tricks/{agree(store, number, size, timeout)}", store)
        keep(store)
        # Both: what processes agree on lies in the machine's memory, what they compute on their cards.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=patience)
    others = watchdog.find(store, number, size)
    hidden = {name: os.environ.pop(name) for name in NUMBERS if name in os.environ}
    try:
        with in_one_line(), watchdog.watched(others, advice):
            yield
    except BaseException:
        os.environ |= hidden  # no farewell: the others may be gone, and it would wait for them
        raise
    grid.cache_clear()
    dist.destroy_process_group()
    os.environ |= hidden


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn what libraries raise when another process is gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        raise Lost(LOST) from None


def _is_loss(error: RuntimeError) -> bool:
    import torch.distributed as dist

    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timed out", "gloo")
    known = getattr(dist, "DistError", ())
    return isinstance(error, known) or any(word in str(error) for word in words)
