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

from cria_tricks.errors import BadInput, Lost
from cria_tricks.parallel import neighbours
from cria_tricks.parallel.rounds import agree

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_SPEAKER = "cria_tricks/speaker"
LOST = "another process of this run died or stopped answering"
_store: Any = None


@dataclass(frozen=True)
class World:
    """Who this process is in a run, and what it shares with the others; alone, everything here does nothing.

    Attributes:
        rank: its number.
        size: how many there are.
        data: how many shares the rows are divided into.
        mesh: the processes as a grid of (data, tensor); ``None`` for a single one.
    """

    rank: int = 0
    size: int = 1
    data: int = 1
    mesh: "DeviceMesh | None" = None

    @classmethod
    def of(cls, data: int, device: str) -> "World":
        """The processes that have joined, as a grid.

        Args:
            data: shares of the rows.
            device: ``"cpu"`` or ``"cuda"``, where tensors are.
        """
        if processes() == 1:
            return cls()
        return cls(rank(), processes(), data, grid(device, data=data, tensor=processes() // data))

    @property
    def tensor(self) -> int:
        """How many processes share the matrices of a block."""
        return self.size // self.data

    @property
    def data_rank(self) -> int:
        """Which share of the rows is this process's."""
        return self.rank // self.tensor

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


def processes() -> int:
    """How many processes there are: those that joined, or that a launcher says it has started."""
    if _joined():
        import torch.distributed as dist

        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """This process's number."""
    if _joined():
        import torch.distributed as dist

        return dist.get_rank()
    return _number("RANK", 0)


def _number(name: str, alone: int) -> int:
    """A number that a launcher sets in the environment; also the words of an error ask for it."""
    said = os.environ.get(name, "")
    return int(said) if said.isdecimal() else alone


def refuse_odd_numbers() -> None:
    """Refuse an environment in which a launcher's number is none.

    Raises:
        BadInput: naming the variable.
    """
    for name in _NUMBERS:
        if (said := os.environ.get(name, "")) and not said.isdecimal():
            raise BadInput(f"{name}={said}: must be a whole number, as a launcher such as torchrun sets it; unset it")


def see_one_card() -> None:
    """Let a process that a launcher has started see the one card that is its own. Before CUDA is first asked."""
    if "LOCAL_RANK" not in os.environ:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else []
    here = _number("LOCAL_RANK", 0)
    if visible != "" and not (cards and here >= len(cards)):
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[here] if cards else str(here)


@contextlib.contextmanager
def joined(timeout: float, advice: str = "nothing was saved") -> Iterator[None]:
    """Join the processes that a launcher has started; with a single one, or when they have joined, nothing happens.

    Args:
        timeout: seconds after which a process that waits for another gives up.
        advice: what a process says of the loss of another one if it is stuck and cannot raise.

    Raises:
        Lost: inside, if another process has died or does not answer.
    """
    if processes() == 1 or _joined():
        yield
        return
    import torch
    import torch.distributed as dist

    global _store
    see_one_card()
    patience = timedelta(seconds=timeout)
    with in_one_line():
        store, number, size = next(iter(dist.rendezvous("env://", timeout=patience)))
        _store = dist.PrefixStore(f"cria_tricks/{agree(store, number, size, timeout)}", store)
        # Both: what processes agree on lies in the machine's memory, what they compute on their cards.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=_store, rank=number, world_size=size, timeout=patience)
    others = neighbours.find(_store, number, size)
    hidden = {name: os.environ.pop(name) for name in _NUMBERS if name in os.environ}
    try:
        with in_one_line(), neighbours.watched(others, advice):
            yield
    except BaseException:
        os.environ |= hidden  # no farewell: the others may be gone, and it would wait for them
        raise
    grid.cache_clear()
    dist.destroy_process_group()
    os.environ |= hidden


def may_speak() -> bool:
    """Whether this process is the first to ask: of processes that end together, that one says why."""
    if _store is None and processes() == 1:
        return True
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return (_store or _launchers_store()).add(f"{_SPEAKER}/{start}", 1) == 1
    except (RuntimeError, KeyError):  # the process that kept the store is gone, or there is none yet
        return rank() == 0


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def starts_again() -> bool:
    """Whether torchrun starts these processes anew when one of them has failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def go_on() -> str:
    """What becomes of a run with checkpoints that has lost a process."""
    on = "all are started again and go on from there" if starts_again() else "go on with --resume"
    return f"what was saved is whole: {on}"


def _launchers_store() -> Any:
    """The store that torchrun keeps for its processes, also before they have joined."""
    import torch.distributed as dist

    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=5))


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


def _joined() -> bool:
    import sys

    if "torch" not in sys.modules:  # nobody can have joined, and the question should not cost its import
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
