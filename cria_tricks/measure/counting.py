"""Count what a technique claims to save: bytes that autograd keeps, live bytes, floating-point operations."""

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
    """Count the bytes that autograd keeps for the backward pass, once per storage.

    Args:
        besides: tensors that live anyway and are not counted: weights.

    Attributes:
        now: bytes kept now.
        peak: the most that were kept.
        history: bytes kept after every change, from the first on.
    """

    def __init__(self, besides: Iterable[torch.Tensor] = ()):
        super().__init__(self._keep, lambda kept: kept.tensor)
        self.besides = {tensor.untyped_storage().data_ptr() for tensor in besides}
        self.now = self.peak = 0
        self.history: list[int] = []
        self._kept: Counter[int] = Counter()

    def __enter__(self) -> "SavedBytes":  # type: ignore[override]
        super().__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> "_Kept":
        kept = _Kept(tensor.detach())
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.besides:
            self._count(key, storage.nbytes(), 1)
            # Autograd drops the object when it no longer needs the tensor; then its bytes are taken off.
            weakref.finalize(kept, self._count, key, storage.nbytes(), -1).atexit = False
        return kept

    def _count(self, key: int, size: int, change: int) -> None:
        before = self._kept[key]
        self._kept[key] += change
        if 0 in (before, self._kept[key]):  # the first one of this storage, or the last
            self.now += size * change
            self.peak = max(self.peak, self.now)
            self.history.append(self.now)


class _Kept:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def flops(run: Callable[[], Any]) -> int:
    """Count the floating-point operations of all products in ``run()``; a multiplication and an addition are two."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def peak_bytes(run: Callable[[], Any], alive: Iterable[torch.Tensor] = ()) -> int:
    """Measure the peak of live bytes in ``run()``, beyond those of ``alive``."""
    count = LiveBytes()
    for tensor in alive:
        count.track(tensor)
    before = count.live
    with count:
        run()
    return count.peak - before


class Traffic(TorchDispatchMode):
    """Count the bytes that operations read and write: every input and every output once.

    Attributes:
        products: of matrix products.
        others: of everything else that is no view, attention's kernels apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        moved = sum(x.nbytes for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor))
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.products += moved
        elif not func.is_view and "attention" not in name and not name.startswith(("empty", "detach", "_unsafe_view")):
            self.others += moved
        return out
