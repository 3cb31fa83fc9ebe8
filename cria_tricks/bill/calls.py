r"""What processes send each other: the formula's side, and a count of what really went out.

A collective is counted by the bytes of the whole tensor that it makes or consumes: what goes into an all-reduce or a
reduce-scatter, what comes out of an all-gather, what is sent from one process to another. How much of it a process
sends follows from the ring: N processes cut the tensor into N pieces, and a piece travels N - 1 hops to be added up
and N - 1 more to be known to all (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", sec. 3).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


@dataclass(frozen=True)
class Call:
    """One collective of a step, or several alike.

    Attributes:
        kind: of :data:`KINDS`.
        bytes: of the whole tensor, each time.
        times: how often in one optimizer step.
        processes: that take part.
        why: what is in it, in words.
    """

    kind: str
    bytes: int
    times: int
    processes: int
    why: str

    @property
    def total(self) -> int:
        """Bytes of all times, as :class:`CountCollectives` counts them."""
        return self.bytes * self.times

    @property
    def sent(self) -> float:
        """Bytes that each process sends in one step, over a ring."""
        return self.total * ring_share(self.kind, self.processes)


def ring_share(kind: str, processes: int) -> float:
    """The part of a tensor that each process sends.

    Examples:
        >>> ring_share("all_reduce", 2), ring_share("all_gather", 4)
        (1.0, 0.75)
    """
    hops = (processes - 1) / processes
    return {"all_reduce": 2 * hops, "all_gather": hops, "reduce_scatter": hops, "broadcast": hops, "send": 1.0}[kind]


def totals(calls: Iterable[Call]) -> dict[str, int]:
    """Bytes of a step by kind of collective."""
    found: Counter[str] = Counter()
    for call in calls:
        found[call.kind] += call.total
    return {kind: found[kind] for kind in KINDS if found[kind]}


class CountCollectives(TorchDispatchMode):
    """Count the bytes of the collectives that this process takes part in, by kind.

    It sees what goes through torch's dispatcher: DistributedDataParallel's, FSDP2's and DTensor's collectives, those
    of ``torch.distributed``'s functions, and sends; not objects, which are pickled into such calls of their own size.

    Attributes:
        bytes: by kind, of the whole tensors; the same measure as :attr:`Call.total`.
        calls: how many, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if kind := _KIND.get(func.name()):
            # An all-gather's result is the whole, of all others it is what they are given.
            given = _tensors(out if func.name().startswith("_c10d_functional::all_gather") else args[_whole(func)])
            self.calls[kind] += 1
            self.bytes[kind] += sum(tensor.nbytes for tensor in given)
        return out


_KIND = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::broadcast": "broadcast",
}
"""Operators of torch's dispatcher that move bytes between processes."""


def _whole(func: Any) -> int:
    """Which argument is the whole tensor: (output, input, ...) for a base reduce-scatter, else the first."""
    return 1 if func.name() in ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_") else 0


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor)]
