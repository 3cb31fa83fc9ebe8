r"""Describe the collectives of a step for the estimate, and count those that a real step runs.

The size of a collective is that of the whole tensor that it makes or consumes: the input of an all-reduce or a
reduce-scatter, the output of an all-gather, the tensor that is broadcast or sent. How many of these bytes each
process sends follows from the ring algorithm. N processes cut the tensor into N pieces. Each piece travels N - 1 hops
until it is summed over all processes, and N - 1 more until all have the sum (Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms", sec. 3).
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
    """A collective of a step, or several of the same kind and size.

    Attributes:
        kind: one of :data:`KINDS`.
        bytes: bytes of the whole tensor, for each time.
        times: how often it runs in one optimizer step.
        processes: how many processes take part.
        why: what the tensor holds, in words.
    """

    kind: str
    bytes: int
    times: int
    processes: int
    why: str

    @property
    def total(self) -> int:
        """Bytes of all times together, as :class:`CountCollectives` counts them."""
        return self.bytes * self.times

    @property
    def sent(self) -> float:
        """Bytes that each process sends in one step with the ring algorithm; see :func:`ring_share`."""
        return self.total * ring_share(self.kind, self.processes)


def ring_share(kind: str, processes: int) -> float:
    """Return how much each process sends with the ring algorithm, as a multiple of the whole tensor.

    An all-reduce is a reduce-scatter and an all-gather, so it sends twice as much as either. For a broadcast it is the
    mean over all processes, and for a send what the sender sends.

    Examples:
        >>> ring_share("all_reduce", 2), ring_share("all_gather", 4)
        (1.0, 0.75)
    """
    # Each of the N pieces, 1 / N of the tensor, is sent N - 1 times: over all processes together N - 1 tensors, so each
    # process sends (N - 1) / N of one. In a broadcast all processes but the last pass on the tensor: N - 1, too.
    once = (processes - 1) / processes
    return {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once, "broadcast": once, "send": 1.0}[kind]


def totals(calls: Iterable[Call]) -> dict[str, int]:
    """Return the bytes of a step for each kind of collective."""
    found: Counter[str] = Counter()
    for call in calls:
        found[call.kind] += call.total
    return {kind: found[kind] for kind in KINDS if found[kind]}


class CountCollectives(TorchDispatchMode):
    """Count the bytes of the collectives that this process takes part in, by kind.

    It sees the operators of torch's dispatcher that ``_KIND`` lists: those that DistributedDataParallel, FSDP2, DTensor
    and the functions of ``torch.distributed`` call here. Others, such as an all-to-all, are not counted. Python objects
    are pickled into tensors first, so they appear with the size of the pickle.

    Attributes:
        bytes: bytes of the whole tensors by kind; the same measure as :attr:`Call.total`.
        calls: number of calls by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if kind := _KIND.get(func.name()):
            # The whole tensor is the result of a functional all-gather; for all other operators it is an argument.
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
"""Operator of torch's dispatcher -> the kind of collective that it runs."""


def _whole(func: Any) -> int:
    """Return which argument is the whole tensor: of c10d's reduce-scatters the second, the input; else the first."""
    return 1 if func.name() in ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_") else 0


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor)]
