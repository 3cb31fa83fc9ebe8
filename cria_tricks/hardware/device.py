"""The few facts about a device that decide which switches work on it, as plain data; and any GPU as a T4.

torch takes seconds to import, so only the functions that need it import it. A GPU can be described without torch.
"""

import contextlib
import functools
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil

from cria_tricks.common.errors import BadInput


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


@contextlib.contextmanager
def profile(name: str) -> Iterator[Device]:
    """Make the first CUDA GPU of this machine behave like a T4 inside the context::

        with hardware.profile("t4"):
            cria_tricks.train(recipe)

    - attention: torch uses neither its flash kernel nor cuDNN's, so grouped heads without a mask run in the math
      kernel;
    - bf16: switches refuse it, and recipes that choose the precision for the machine choose fp16, because
      :func:`this_device` describes a T4;
    - memory: torch's allocator gets 14.74 GiB and not a byte more. (On a real T4 it gets less, because the CUDA context
      takes its share of them.)

    It does not make the GPU as slow as a T4, and does not make it round as the tensor cores of a T4 do. torch's own
    functions, such as ``torch.cuda.get_device_capability``, still describe the real GPU, because otherwise kernels
    would be compiled for the wrong one. The rules hold for the whole process, because torch's switches do. After the
    context all switches are as they were before.

    Args:
        name: ``"t4"``.

    Yields:
        The device that :func:`this_device` returns inside the context.

    Raises:
        BadInput: for another name, or without a CUDA GPU.
    """
    if name.strip().lower() != "t4":
        raise BadInput(f"hardware profile {name}: there is t4, and no other")
    import torch  # not at the top: recipes import this package, and a wrong recipe is refused without waiting for torch

    if not torch.cuda.is_available():
        raise BadInput(
            "hardware profile t4: there is no CUDA card here that could act like one; to reckon with a T4 without a "
            "card, hand hardware.T4 to whatever takes a device"
        )
    card = torch.cuda.get_device_properties(0)
    # A GPU that is older than a T4, or has less memory, keeps its own values.
    memory = min(T4.memory_bytes, card.total_memory)
    capability = min(T4.capability, (card.major, card.minor))
    before = torch.cuda.get_per_process_memory_fraction(0)
    with contextlib.ExitStack() as undo:
        for enabled, enable in (
            (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.enable_flash_sdp),
            (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.enable_cudnn_sdp),
        ):
            undo.callback(enable, enabled)
            enable(False)
        undo.callback(torch.cuda.set_per_process_memory_fraction, before, 0)
        torch.cuda.set_per_process_memory_fraction(memory / card.total_memory, 0)
        like_t4 = replace(T4, name=f"{card.name} as T4", capability=capability, memory_bytes=memory)
        undo.enter_context(pretend(like_t4))
        yield like_t4
