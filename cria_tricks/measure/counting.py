"""Count what a technique saves: saved activations, live bytes, floating-point operations, and memory traffic."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

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
