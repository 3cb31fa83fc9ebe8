"""Count the collectives that a step really runs, as ``bill/calls.py`` describes them."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class CountCollectives(TorchDispatchMode):
    """Count the bytes of the collectives that this process takes part in, by kind.

    It sees the operators of torch's dispatcher that ``_KIND`` lists: those that DistributedDataParallel, FSDP2, DTensor
    and the functions of ``torch.distributed`` call here. Others, such as an all-to-all, are not counted. Python objects
    are pickled into tensors first, so they appear with the size of the pickle.

    Attributes:
        bytes: bytes of the whole tensors by kind; the same measure as ``Call.total``.
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
