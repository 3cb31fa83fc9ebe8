"""The few facts about a device that decide which switches work on it, as plain data.

torch takes seconds to import, so only the functions that need it import it. A GPU can be described without torch.
"""

import contextlib
import functools
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Device:
    """The facts about a GPU or a CPU that switches and estimates need.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
        name: the product's name.
        capability: CUDA compute capability, ``(0, 0)`` on a CPU.
        real_bf16: whether bf16 runs in hardware. A T4 only emulates it, but torch reports it as supported there.
        memory_bytes: memory of the GPU; for a CPU, memory of the machine.
    """

    kind: str
    name: str
    capability: tuple[int, int]
    real_bf16: bool
    memory_bytes: int

    @property
    def half_precision(self) -> str:
        """The 16-bit format to compute in: ``bf16`` where the hardware really has it, else ``fp16``."""
        return "bf16" if self.real_bf16 else "fp16"

    @property
    def best_precision(self) -> str:
        """:attr:`half_precision`, but ``fp32`` on a CPU without bf16, because most CPUs only emulate fp16."""
        if self.kind == "cpu" and not self.real_bf16:
            return "fp32"
        return self.half_precision

    @property
    def needs_expand_kv(self) -> bool:
        """Whether shared key and value heads must be repeated before attention, so that a fast kernel takes them.

        torch's flash kernel takes shared (grouped) heads as they are, but needs compute capability 8.0. On an older GPU
        torch would fall back to the slow math kernel (see ``techniques/expand_kv.py``).
        """
        return self.kind == "cuda" and self.capability < (8, 0)

    @property
    def slow_fp16(self) -> bool:
        """Whether matrix products are far slower in fp16 than in fp32: measured on a CPU, always false on a GPU."""
        return self.kind == "cpu" and _fp16_is_slow()


T4 = Device("cuda", "Tesla T4", (7, 5), real_bf16=False, memory_bytes=15_828_320_256)
"""The free Colab GPU, with the memory that ``torch.cuda.get_device_properties`` reports: 14.74 GiB."""


_pretended: list[Device] = []
"""The devices of all :func:`pretend` contexts that are open; the last one counts."""


@contextlib.contextmanager
def pretend(device: Device) -> Iterator[None]:
    """Make :func:`this_device` return this device inside the context, whatever the machine is."""
    _pretended.append(device)
    try:
        yield
    finally:
        _pretended.pop()


def this_device() -> Device:
    """Describe the machine this runs on: its first CUDA GPU, else its CPU; or the device of :func:`pretend`."""
    if _pretended:
        return _pretended[-1]
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        # Not is_bf16_supported(): it is true on a T4, which only emulates bf16. GPUs from 8.0 on compute in bf16.
        return Device("cuda", properties.name, capability, capability >= (8, 0), properties.total_memory)
    return this_cpu()


def this_cpu() -> Device:
    """Describe the CPU of this machine, whether or not there is a GPU, too."""
    has = _cpu_capabilities()
    real_bf16 = any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))
    name = has.get("cpu_name") or platform.processor() or platform.machine()
    name = f"{name}, {os.cpu_count()} cores"
    return Device("cpu", name, (0, 0), real_bf16, psutil.virtual_memory().total)


@functools.cache
def _fp16_is_slow() -> bool:
    """Time the same product in fp16 and in fp32 on this CPU, once per process (20 ms), and compare the two times.

    A CPU that emulates fp16 takes about ten times as long as in fp32, and one that computes in fp16 takes no longer. So
    a factor of two tells them apart, on a busy machine, too. The feature flags of the CPU would not tell whether this
    build of torch uses them.
    """
    return _product_seconds("float16") > 2 * _product_seconds("float32")


def _product_seconds(dtype: str) -> float:
    """Time eight products of two small matrices, and return the fastest time [s]; the first ones select a kernel."""
    import torch

    matrix = torch.ones(128, 128, dtype=getattr(torch, dtype), device="cpu")
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _cpu_capabilities() -> Mapping[str, Any]:
    """Ask torch for the name and the features of this CPU; an older torch cannot tell, and the result is empty."""
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        return {}
    has = torch.cpu.get_capabilities()
    if os.environ.get("ONEDNN_MAX_CPU_ISA") in ("AVX2", "AVX512_CORE"):
        # This variable limits oneDNN, which multiplies bf16 matrices, to the instructions of an older CPU. torch still
        # reports the features of the real one.
        return {**has, "avx512_bf16": False, "amx_bf16": False}
    return has
