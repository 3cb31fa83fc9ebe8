"""Measure the peak memory of each phase of a run: by CUDA's allocator on a GPU, by counting live storages on a CPU."""

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

from cria_tricks.bill.operation import BLOCK


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensor storages that are alive. Use it as a context manager.

    While the context is active, the outputs of every operation are counted, once per storage, and subtracted when the
    storage is freed. Views share their storage and add nothing, and meta tensors take no memory. The bytes are exact,
    with two limits: the allocator's rounding is not included, and temporary memory inside an operation is included only
    for the operations in :data:`INSIDE`.

    Attributes:
        live: bytes that are alive now.
        peak: the largest ``live`` since ``peak`` was last set [bytes]; set it to ``live`` to begin a new measurement.
        active: whether the context is active.
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
        """Count a tensor that was made outside of the context; of a ``DTensor``, the shard of this process."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata  # the address of the C++ storage, which all views share; a fake tensor has no data_ptr
        if key in self._known or tensor.is_meta:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage), size
        self.live += size
        self.peak = max(self.peak, self.live)
        # Called when the last tensor that uses this storage is freed; atexit=False: not when Python ends.
        weakref.finalize(storage, self._free, key).atexit = False

    def track_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors, and the scales of those that bitsandbytes has quantised."""
        for tensor in tensors:
            self.track(tensor)
            for extra in quantization_tensors(tensor):
                self.track(extra)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]

    def remeasure(self) -> None:
        """Update the sizes of resized storages: FSDP frees the bytes of a gathered weight, but keeps its storage."""
        for key, (reference, size) in list(self._known.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._known[key] = reference, storage.nbytes()
                self.live += storage.nbytes() - size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fsdp":  # FSDP resizes storages without an operation that could be seen here
            self.remeasure()
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):  # nearly always; tree_iter would take longer than the counting
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
    """Return the bytes that bitsandbytes needs to multiply by a 4-bit weight [bytes].

    It dequantises the whole weight to the dtype of ``x`` (2 or 4 bytes each) and the scales to fp32 (4 bytes for each
    :data:`BLOCK` of weights). This is an upper bound: without double quantization the scales are fp32 already, and the
    CUDA kernels for a small ``x`` need neither.
    """
    return math.prod(shape) * x.itemsize + math.prod(shape) // BLOCK * 4


INSIDE: dict[str, Callable[..., int]] = {
    "aten::logsumexp": lambda x, *_: x.nbytes,  # exp(x - max), as large as x
    "aten::_safe_softmax": lambda x, *_: x.numel(),  # a mask of the places where x is -inf: one byte for each
    "bitsandbytes::gemm_4bit": _unpacked,
}
"""Operation -> the bytes that it needs besides its inputs and outputs while it computes, on any device.

Only operations that need much are listed. Each function takes the arguments of the operation.
"""


class Meter:
    """Measure the seconds of a run and the peak memory of each of its phases.

    CUDA's allocator counts by itself. On a CPU :class:`LiveBytes` must watch every operation, which makes a step slower
    by about a sixth. So there only those micro-batches are watched that can set a new peak, because no earlier one was
    as large. The operations inside compiled kernels cannot be watched, so for a compiled model on a CPU the resident
    memory of the process is reported instead.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        began: when this process began the run [seconds of ``time.perf_counter``]; ``None`` means now.
        before: what earlier processes had spent on the same run, as :meth:`spent` returned it.
        compiled: whether parts of the model are compiled.

    Attributes:
        counts: whether it watches operations: only on a CPU, and only if nothing is compiled.
        phases: for each phase ``allocated_bytes``, the peak of the tensors, and besides on CUDA ``reserved_bytes``, the
            peak of the allocator, or on a CPU ``process_bytes``, the most resident memory that the process has had
            until the end of the phase.
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
        """On a CPU, count tensors that were made outside of :meth:`watch`."""
        if self.counts:
            self._live.track_all(tensors)

    def watch(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that counts all new storages; it does nothing without ``counts`` or inside another one."""
        if self.counts and not self._live.active:
            return self._live
        return contextlib.nullcontext()

    def may_set_a_peak(self, kind: str, *size: int) -> bool:
        """Tell whether a batch may set a new peak, and remember its sizes.

        It may not if since :meth:`forget_sizes` a batch of the same kind was at least as large in every size.

        Args:
            kind: ``"train"`` or ``"evaluate"``; batches of different kinds are not compared.
            size: sizes on which the peak depends, for example padded tokens and trained tokens.
        """
        for other_kind, other in self._sizes:
            if other_kind == kind and all(its >= mine for its, mine in zip(other, size, strict=True)):
                return False
        self._sizes.append((kind, size))
        return True

    def forget_sizes(self) -> None:
        """Forget the sizes of earlier batches, because the same size now needs more: the optimizer states exist."""
        self._sizes.clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peaks of what runs inside under the phase ``name``; of nested phases only the inner one counts."""
        self.lap()
        self._phase.append(name)
        try:
            yield
        finally:
            self.lap()
            self._phase.pop()

    @property
    def elapsed(self) -> float:
        """The time since this process began the run [seconds]."""
        return time.perf_counter() - self.began

    def spent(self) -> dict[str, Any]:
        """Return the seconds and peaks of the run so far, with earlier processes, as JSON data for checkpoints."""
        return {"seconds": self._seconds_before + self.elapsed, "memory": self.phases}

    def lap(self) -> int:
        """Return the peak since the last lap [bytes], and record it under the current phase."""
        if self.cuda:
            peak = torch.cuda.max_memory_allocated()
            other = {"reserved_bytes": torch.cuda.max_memory_reserved()}
            torch.cuda.reset_peak_memory_stats()
        else:
            other = {"process_bytes": _peak_resident_bytes()}
            self._live.remeasure()
            peak = self._live.peak if self.counts else other["process_bytes"]
            self._live.peak = self._live.live  # the peak of the next lap is at least what is alive now
        if self._phase:
            booked = self.phases.setdefault(self._phase[-1], {})
            for key, value in {"allocated_bytes": peak, **other}.items():
                booked[key] = max(booked.get(key, 0), value)
        return peak


def every_tensor(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model."""
    yield from model.parameters()
    yield from model.buffers()


def quantization_tensors(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that belong to a bitsandbytes weight, such as its scales; they are not parameters."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:  # double quantization nests a second state
        yield from (t for t in (state.absmax, state.code, state.offset) if isinstance(t, torch.Tensor))
        state = state.state2
    for name in ("CB", "SCB"):  # bitsandbytes' names for an int8 weight and its scales
        extra = getattr(parameter, name, None)
        if isinstance(extra, torch.Tensor):
            yield extra


def _peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had since it started [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # macOS counts in bytes, Linux in KiB
    return peak * 1024
