"""Count what real steps do: saved activations, live bytes, operations, memory traffic, collectives, kernels."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from cria_tricks.hardware.attention_kernels import KERNELS
from cria_tricks.measure.memory import LiveBytes


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes of the tensors that autograd saves for the backward pass. Use it as a context manager.

    Several saved tensors can be views of one storage. Its bytes are counted once, until the last of them is freed.

    Args:
        besides: tensors that stay in memory anyway, such as weights. Their storages are not counted.

    Attributes:
        now: bytes that are saved now.
        peak: the largest value of ``now`` so far [bytes].
        history: ``now`` after each change, in order [bytes].
    """

    def __init__(self, besides: Iterable[torch.Tensor] = ()):
        # Autograd calls the first function on each tensor that it saves, and the second when it needs the tensor.
        super().__init__(self._keep, lambda kept: kept.tensor)
        self.besides = {tensor.untyped_storage().data_ptr() for tensor in besides}
        self.now = self.peak = 0
        self.history: list[int] = []
        self._kept: Counter[int] = Counter()

    def __enter__(self) -> "SavedBytes":  # type: ignore[override]
        super().__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> "_Kept":
        # detach: an output refers to the operation that saves it; keeping it as it is would be a cycle, never freed.
        kept = _Kept(tensor.detach())
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.besides:
            self._count(key, storage.nbytes(), 1)
            # Autograd frees the object when it no longer needs the tensor. Then this call subtracts its bytes.
            # atexit=False: objects that live until Python ends need no call.
            weakref.finalize(kept, self._count, key, storage.nbytes(), -1).atexit = False
        return kept

    def _count(self, key: int, size: int, change: int) -> None:
        """Note that one more (``change`` = 1) or one fewer (-1) saved tensor uses a storage of ``size`` bytes."""
        before = self._kept[key]
        self._kept[key] += change
        if 0 in (before, self._kept[key]):  # the first saved tensor of this storage came, or the last one went
            self.now += size * change
            self.peak = max(self.peak, self.now)
            self.history.append(self.now)


class _Kept:
    """Hold one saved tensor. Autograd frees this object when it no longer needs the tensor, and a finalizer sees it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def flops(run: Callable[[], Any]) -> int:
    """Return the floating-point operations of ``run()``; a multiplication with its addition counts as two.

    Counted are matrix products, convolutions and attention kernels. ``FlopCounterMode`` ignores elementwise operations.
    So batched outer products are left out, too: they add nothing. transformers 5.16 computes the rotary angles by one,
    newer versions elementwise, and both get the same number here.
    """
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: _batched_flops}) as counter:
        run()
    return counter.get_total_flops()


def _batched_flops(a_shape: torch.Size, b_shape: torch.Size, **_: Any) -> int:
    """Count the operations of a batched product (b, m, k) (b, k, n); 0 if k = 1."""
    b, m, k = a_shape
    return 0 if k == 1 else 2 * b * m * k * b_shape[-1]


def peak_bytes(run: Callable[[], Any], alive: Iterable[torch.Tensor] = ()) -> int:
    """Return the peak memory that ``run()`` needs for its new tensors [bytes].

    Args:
        run: the function to measure.
        alive: tensors that exist before, such as weights and inputs. They are not part of the result.
    """
    counter = LiveBytes()
    for tensor in alive:
        counter.track(tensor)
    before = counter.live
    with counter:
        run()
    return counter.peak - before


class Traffic(TorchDispatchMode):
    """Estimate the memory traffic of operations: each reads all its inputs once and writes all its outputs once.

    Views move no data, so they are not counted. Attention kernels are not counted either: a fused kernel reads its
    inputs several times, so this rule does not hold for them.

    Attributes:
        products: bytes that matrix products read and write.
        others: bytes that all other counted operations read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        moved = sum(x.nbytes for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor))
        # empty only allocates; detach and _unsafe_view return views, although torch does not declare them as such.
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            self.products += moved
        elif not func.is_view and "attention" not in name and not name.startswith(("empty", "detach", "_unsafe_view")):
            self.others += moved
        return out


_COMPOSITE = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
"""Operations that consist of others; which kernel runs is visible only inside them."""


class WatchAttention(TorchDispatchMode):
    """Record which attention kernel runs inside this context, in a single operation or in a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    @property
    def kernel(self) -> str:
        """The kernel that ran: ``"flash"``, ``"memory-efficient"``, ``"cudnn"``, ``"vendor"`` or ``"math"``.

        If several kernels ran, their names are joined by ``+``. It is ``"none"`` if no such kernel ran, as in the
        attention that transformers calls eager.
        """
        return "+".join(sorted(self._seen)) or "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for every operation inside the context.
        name = func.overloadpacket.__name__
        if name in _COMPOSITE:  # in inference mode these arrive in one piece, and the kernel is inside
            with self:  # torch switches the mode off while this method runs, so switch it on for the pieces
                return func.decompose(*args, **(kwargs or {}))
        if name in KERNELS:
            self._seen.add(KERNELS[name])
        elif func.namespace.startswith("flash_attn"):  # the package's own operations
            self._seen.add("flash")
        return func(*args, **(kwargs or {}))


def attention_kernel(call: Callable[[], Any]) -> str:
    """Run a call, and return the name of its attention kernel; see :attr:`WatchAttention.kernel`."""
    with WatchAttention() as watch:
        call()
    return watch.kernel


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
