"""The few facts about a device that decide which toggles work on it, as plain data.

torch takes seconds to import. So only the functions that ask it import it: a card can be named without.
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
    """What a toggle must know about the machine.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
        name: the product's name.
        capability: CUDA compute capability, ``(0, 0)`` on a CPU.
        real_bf16: whether bf16 runs in hardware; a T4 only emulates it, and still says it is supported.
        memory_bytes: the card's memory, or the machine's.
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
        """Whether grouped heads must be repeated before attention.

        Torch's flash kernel takes grouped heads as they are. It runs from compute capability 8.0 on; older cards would
        fall back to the math kernel (see ``tricks/expand_kv.py``).
        """
        return self.kind == "cuda" and self.capability < (8, 0)

    @property
    def slow_fp16(self) -> bool:
        """Whether products are far slower in fp16 than in fp32: measured on a CPU, never so on a card."""
        return self.kind == "cpu" and _fp16_is_slow()


T4 = Device("cuda", "Tesla T4", (7, 5), real_bf16=False, memory_bytes=15_828_320_256)
"""The free Colab card, as ``torch.cuda.get_device_properties`` gives it: 14.74 GiB."""


_pretended: list[Device] = []


@contextlib.contextmanager
def pretend(device: Device) -> Iterator[None]:
    """Inside, :func:`this_device` gives this device, whatever the machine is."""
    _pretended.append(device)
    try:
        yield
    finally:
        _pretended.pop()


def this_device() -> Device:
    """Look at the machine this runs on: its first CUDA card, else its CPU."""
    if _pretended:
        return _pretended[-1]
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        # Not is_bf16_supported(): it says yes on a T4, which emulates it.
        return Device("cuda", properties.name, capability, capability >= (8, 0), properties.total_memory)
    return this_cpu()


def this_cpu() -> Device:
    """Describe the processor of this machine, whether or not there is a card beside it."""
    has = _cpu_capabilities()
    real_bf16 = any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))
    name = has.get("cpu_name") or platform.processor() or platform.machine()
    name = f"{name}, {os.cpu_count()} cores"
    return Device("cpu", name, (0, 0), real_bf16, psutil.virtual_memory().total)


@functools.cache
def _fp16_is_slow() -> bool:
    """Time the same product in fp16 and in fp32 on this processor, once per process [20 ms].

    A CPU that emulates fp16 takes about ten times as long, one that computes in it no longer: so the factor two tells
    them apart on a busy machine too. A flag of the processor would not say what this build of torch makes of it.
    """
    return _product_seconds("float16") > 2 * _product_seconds("float32")


def _product_seconds(dtype: str) -> float:
    """The fastest of several products of two small matrices [seconds]; the first ones find their kernels."""
    import torch

    matrix = torch.ones(128, 128, dtype=getattr(torch, dtype), device="cpu")
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _cpu_capabilities() -> Mapping[str, Any]:
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        return {}  # an older torch cannot tell; then nothing is assumed
    has = torch.cpu.get_capabilities()
    if os.environ.get("ONEDNN_MAX_CPU_ISA") in ("AVX2", "AVX512_CORE"):
        # oneDNN, which multiplies bf16 matrices, is held to an older processor; torch still names the real one.
        return {**has, "avx512_bf16": False, "amx_bf16": False}
    return has
