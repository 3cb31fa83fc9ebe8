"""Join the processes of one run, and let them agree, do some things once for all of them, and end together.

A launcher (``torchrun``, ``accelerate launch``) starts N copies of one command and writes their ranks into environment
variables. The processes join here, and the variables are removed. From then on every other library finds one process
with one card; only this package's strategies connect the processes. Therefore losses, the order of the rows and
checkpoints are decided in one place, for any number of processes.

torch is imported by the functions that need it, because the light checks before a run should not wait for it.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from cria_tricks.common.errors import Lost
from cria_tricks.processes.numbers import LOST, NUMBERS, have_joined, keep, processes, rank, see_one_card

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The rank of this process, the world size, and collectives, which do nothing in a single process.

    Attributes:
        rank: the rank of this process.
        size: the world size, the number of processes.
        data: the number of data-parallel shares into which the rows are divided.
        mesh: the processes as a grid with the axis ``data`` and then ``tensor``, ``stage`` or ``context``; ``None`` for
            a single process.
    """

    rank: int = 0
    size: int = 1
    data: int = 1
    mesh: "DeviceMesh | None" = None

    @classmethod
    def of(cls, data: int, device: str, axis: str = "tensor") -> "World":
        """Arrange the joined processes as a grid.

        Args:
            data: the number of data-parallel shares of the rows.
            device: ``"cpu"`` or ``"cuda"``, where the tensors are.
            axis: what the processes with the same rows divide among them: ``"tensor"`` for the matrices of each block,
                ``"stage"`` for the blocks, ``"context"`` for the tokens of each row.
        """
        if processes() == 1:
            return cls()
        return cls(rank(), processes(), data, grid(device, data=data, **{axis: processes() // data}))

    @property
    def tensor(self) -> int:
        """The tensor-parallel size: how many processes share the matrices of a block."""
        return self._along("tensor")

    @property
    def stages(self) -> int:
        """The pipeline-parallel size: how many stages a pipeline has; each stage is one process."""
        return self._along("stage")

    @property
    def stage(self) -> int:
        """The pipeline-parallel rank: which stage of its pipeline this process has."""
        if self.mesh is None or self.stages == 1:
            return 0
        return self.mesh.get_local_rank("stage")

    @property
    def stage_group(self) -> "ProcessGroup | None":
        """The process group of this process's pipeline; ``None`` without a pipeline."""
        if self.mesh is None or self.stages == 1:
            return None
        return self.mesh.get_group("stage")

    @property
    def data_rank(self) -> int:
        """The data-parallel rank: which share of the rows this process trains on."""
        return self.rank // (self.size // self.data)

    @property
    def draw(self) -> int:
        """The number that this process adds to the seed, for dropout.

        Processes that share a block's matrices have the same number, because they must draw the same random numbers.
        """
        return self.rank // self.tensor

    def _along(self, axis: str) -> int:
        """Return the size of an axis of the grid; 1 if the grid has no such axis."""
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return 1
        return self.mesh[axis].size()

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, the only one that writes results and prints progress."""
        return self.rank == 0

    def sum(self, value: "torch.Tensor") -> "torch.Tensor":
        """All-reduce a tensor to its sum over the data-parallel ranks, in place."""
        if self.data > 1:
            import torch.distributed as dist

            assert self.mesh is not None
            dist.all_reduce(value, group=self.mesh["data"].get_group())
        return value

    def max_over_ranks(self, *values: float) -> list[float]:
        """All-reduce each value to its maximum over all ranks; a flag that is set in one process is then set in all."""
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and broadcast what it returns, or what it raises, to all ranks."""
        if self.size == 1:
            return function()
        import torch.distributed as dist

        done: list[Any] = [None, None]
        if self.is_main:
            try:
                done[0] = function()
            except Exception as error:
                done[1] = error
        dist.broadcast_object_list(done)
        if done[1] is not None:
            raise done[1]
        return done[0]

    @contextlib.contextmanager
    def entered_on_rank_zero(self, context: "contextlib.AbstractContextManager[Any]") -> Iterator[None]:
        """Enter a context on rank 0 only; if that raises, all ranks raise the same."""
        with contextlib.ExitStack() as stack:

            def enter() -> None:  # it returns nothing, because on_rank_zero would have to pickle the context's value
                stack.enter_context(context)

            self.on_rank_zero(enter)
            yield

    def gather(self, value: T) -> list[T]:
        """Gather the values of all ranks, in order, on rank 0; the other ranks get an empty list."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        if not self.is_main:
            dist.gather_object(value)
            return []
        found: list[Any] = [None] * self.size
        dist.gather_object(value, found)
        return found


@functools.cache
def grid(device: str, **sizes: int) -> "DeviceMesh":
    """Make a device mesh of the joined processes, with these axes and their sizes.

    It is cached, because every new mesh makes process groups along each axis, and gloo starts threads for every group,
    which do not end.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[None]:
    """Join the processes that a launcher has started, and leave them at the end of the block.

    With a single process, or if the processes have joined already, nothing happens.

    Args:
        timeout: how long a process waits for another before it gives up [s].

    Raises:
        Lost: while the processes join or inside the block, if another process has died or does not answer.
    """
    if processes() == 1 or have_joined():
        yield
        return
    import torch
    import torch.distributed as dist

    see_one_card()
    patience = timedelta(seconds=timeout)
    with in_one_line():
        launchers_store, own_rank, size = next(iter(dist.rendezvous("env://", timeout=patience)))
        store = dist.PrefixStore(f"cria_tricks/{_start()}", launchers_store)
        keep(store)
        # gloo for tensors in the machine's memory, such as flags and pickled objects; nccl for those on the cards.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=own_rank, world_size=size, timeout=patience)
    hidden = {name: os.environ.pop(name) for name in NUMBERS if name in os.environ}
    try:
        with in_one_line():
            yield
    except BaseException:
        os.environ |= hidden  # destroy_process_group is not called: it would wait for processes that may be gone
        raise
    grid.cache_clear()
    dist.destroy_process_group()
    os.environ |= hidden


def _start() -> str:
    """Return the number of this start of the processes, the prefix of all that they write into the launcher's store.

    torchrun's agent outlives its processes and keeps one store for all of their starts. What dead processes wrote is
    still there, for example their addresses, and a new process could read such an address (pytorch issue 135712).
    Several agents count their restarts separately, so their processes would take different numbers. There
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` gives each start a store of its own (``launch/torchrun.py``).
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # one agent
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "0"


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn the errors that libraries raise when another process is gone into ``Lost``, with one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        raise Lost(LOST) from None


def _is_loss(error: RuntimeError) -> bool:
    """Whether an error means that another process is gone or does not answer."""
    import torch.distributed as dist

    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    # gloo raises a plain RuntimeError, so only the words of its message can tell.
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timed out", "gloo")
    return any(word in str(error) for word in words)
