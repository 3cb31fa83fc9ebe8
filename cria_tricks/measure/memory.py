"""Measure peak bytes by phase: from CUDA's allocator on a GPU, from a count of live storages on a CPU."""

import contextlib
import math
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cria_tricks.bill.constants import BLOCK


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensor storages that are alive.

    Inside the context every operation's outputs are counted once per storage, and taken off when the storage
    is freed. Views share their storage and add nothing, and meta tensors take no memory. Bytes are exact; the
    allocator's rounding is not seen, and of what an operation needs while it computes that in :data:`INSIDE`.

    Attributes:
        live: bytes alive now.
        peak: the most that were alive since it was last set.
        active: whether it counts now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.active = False
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __enter__(self) -> "LiveBytes":
        self.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.active = False
        super().__exit__(*error)

    def track(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside of the context; of one in pieces, this process's own."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata  # the address of the C++ object: views have one storage, and so one key
        if key in self._known or tensor.is_meta:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage), size
        self.live += size
        self.peak = max(self.peak, self.live)
        # Called when the last tensor over this storage is gone, and not when Python ends.
        weakref.finalize(storage, self._free, key).atexit = False

    def track_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors, and the scales of those that are quantised."""
        for tensor in tensors:
            self.track(tensor)
            for extra in _quantization_tensors(tensor):
                self.track(extra)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]

    def remeasure(self) -> None:
        """See which storages have another size now: FSDP gives a gathered weight's bytes back, and keeps the rest."""
        for key, (reference, size) in list(self._known.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._known[key] = reference, storage.nbytes()
                self.live += storage.nbytes() - size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fsdp":
            self.remeasure()
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):  # nearly always; walking a tree costs more than the count
            self.track(out)
        else:
            for leaf in tree_iter(out):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf)
        inside = INSIDE.get(func.name())
        if inside:
            self.peak = max(self.peak, self.live + inside(*args))
        return out


def _unpacked(x: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], *scales: Any) -> int:
    """Bytes of a whole 4-bit layer in 16 bits, or 32, and of its scales in fp32: bitsandbytes makes them for a product.

    For a few rows its kernel on CUDA does without.
    """
    return math.prod(shape) * x.itemsize + math.prod(shape) // BLOCK * 4


INSIDE: dict[str, Callable[..., int]] = {
    "aten::logsumexp": lambda x, *_: x.nbytes,  # exp(x - max)
    "aten::_safe_softmax": lambda x, *_: x.numel(),  # where it is -inf, in bytes
    "bitsandbytes::gemm_4bit": _unpacked,
}
"""Bytes that operations hold beside inputs and outputs while they compute, for those that hold much, on any device."""


class Meter:
    """Measure the seconds of a run, and the peak bytes of each of its phases.

    CUDA's allocator counts by itself. On a CPU every operation has to be watched, which makes a step slower by about
    a sixth. So only batches that can set a new peak are watched: larger ones than any before. Compiled kernels cannot
    be watched, so with them the process's resident memory on a CPU stands in.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        began: when this process began with the run, in ``time.perf_counter``'s seconds; now when left out.
        before: what an earlier process had spent on the same run: its :meth:`spent`.
        compiled: whether parts of the model are compiled.

    Attributes:
        counts: whether it watches operations.
        phases: for each phase ``allocated_bytes`` (a peak), and on CUDA ``reserved_bytes`` (a peak too), on a CPU
            ``process_bytes`` (the most resident memory the process had until the phase's end).
    """

    def __init__(
        self,
        device: str,
        began: float | None = None,
        before: Mapping[str, Any] | None = None,
        *,
        compiled: bool = False,
    ):
        self.cuda = device == "cuda"
        self.counts = not self.cuda and not compiled
        self.began = time.perf_counter() if began is None else began
        self._seconds_before = 0.0
        self.phases: dict[str, dict[str, int]] = {}
        if before:
            self._seconds_before = before["seconds"]
            self.phases = {name: dict(peaks) for name, peaks in before["memory"].items()}
        self._live = LiveBytes()
        self._sizes: list[tuple[str, tuple[int, ...]]] = []
        self._phase: list[str] = []
        self.lap()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """On a CPU, count tensors that came to life while nobody watched."""
        if self.counts:
            self._live.track_all(tensors)

    def watch(self) -> contextlib.AbstractContextManager[Any]:
        """On a CPU, count all storages that come to life inside."""
        if self.counts and not self._live.active:
            return self._live
        return contextlib.nullcontext()

    def may_set_a_peak(self, kind: str, *size: int) -> bool:
        """Whether no batch of this kind since :meth:`forget_sizes` was at least as large in everything."""
        for other_kind, other in self._sizes:
            if other_kind == kind and all(its >= mine for its, mine in zip(other, size, strict=True)):
                return False
        self._sizes.append((kind, size))
        return True

    def forget_sizes(self) -> None:
        """Begin again, because something lives now that did not before: the optimizer's states."""
        self._sizes.clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book what happens inside under ``name``; phases may nest, and the inner one has it."""
        self.lap()
        self._phase.append(name)
        try:
            yield
        finally:
            self.lap()
            self._phase.pop()

    @property
    def elapsed(self) -> float:
        """Seconds since this process began with the run."""
        return time.perf_counter() - self.began

    def spent(self) -> dict[str, Any]:
        """Return what the whole run took so far, earlier processes included, as JSON data for checkpoints."""
        return {"seconds": self._seconds_before + self.elapsed, "memory": self.phases}

    def lap(self) -> int:
        """Return the peak bytes since the last lap, and book them to the current phase."""
        if self.cuda:
            peak = torch.cuda.max_memory_allocated()
            other = {"reserved_bytes": torch.cuda.max_memory_reserved()}
            torch.cuda.reset_peak_memory_stats()
        else:
            other = {"process_bytes": _peak_resident_bytes()}
            self._live.remeasure()
            peak = self._live.peak if self.counts else other["process_bytes"]
            self._live.peak = self._live.live  # the next lap begins with what lives now
        if self._phase:
            booked = self.phases.setdefault(self._phase[-1], {})
            for key, value in {"allocated_bytes": peak, **other}.items():
                booked[key] = max(booked.get(key, 0), value)
        return peak


def every_tensor(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model."""
    yield from model.parameters()
    yield from model.buffers()


def _quantization_tensors(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The scales beside a bitsandbytes weight, which are no parameters of their own."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:  # double quantization nests a second state
        yield from (t for t in (state.absmax, state.code, state.offset) if isinstance(t, torch.Tensor))
        state = state.state2
    for name in ("CB", "SCB"):  # bitsandbytes' names of an int8 weight and of its scales
        extra = getattr(parameter, name, None)
        if isinstance(extra, torch.Tensor):
            yield extra


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # macOS counts in bytes, Linux in KiB
    return peak * 1024
