"""Set up the allocators of GPU and host memory before a run takes its first memory."""

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator

from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables that torch reads when CUDA starts: since torch 2.9, and before."""
OPTION = "expandable_segments"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Parameters of glibc's ``mallopt``, from its ``malloc.h``."""
LARGEST_KEPT = 2**25
"""The largest block that glibc's own adaptation takes from the heap (``DEFAULT_MMAP_THRESHOLD_MAX``) [bytes]."""
OF_GLIBC = ("MALLOC_", "GLIBC_TUNABLES")
"""How the environment variables begin with which a user sets glibc's allocator."""


def ask_for_expandable_segments(recipe: Recipe) -> None:
    """Switch expandable segments on if the recipe wants them (``train.expandable_segments``).

    What the user has set in the environment stays as it is. Call it before CUDA is initialized; without a GPU it has
    no effect. torch has expandable segments on Linux only.
    """
    if not recipe.train.expandable_segments or sys.platform != "linux" or OPTION in _options():
        return
    name = next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[1])
    others = os.environ.get(name, "")
    os.environ[name] = f"{others},{OPTION}:True" if others else f"{OPTION}:True"


@contextlib.contextmanager
def keep_freed_memory(device: Device) -> Iterator[bool]:
    """Let the process keep the host memory that it frees, as long as a model trains on a CPU.

    By default glibc, the C library of most Linux systems, takes each tensor above some size from the operating system
    and gives it back when it is freed. The system then fills every page with zeros again at its first use in the next
    step. On two EPYC cores this took 11 to 20 % of a training step of SmolLM2 (docs/benchmarks.md). What the user has
    set in the environment stays as it is. Other C libraries stay as they are, too.

    At the end the kept memory goes back to the system, and glibc to the values that its own adaptation ends at.

    Yields:
        Whether it was done.

    Source: ``man mallopt`` of glibc: no ``mmap`` for large blocks, and the heap is never trimmed.
    """
    users = any(name.startswith(OF_GLIBC) for name in os.environ)
    if device.kind != "cpu" or users or platform.libc_ver()[0] != "glibc":
        yield False
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
    try:
        yield True
    finally:
        library.mallopt(M_MMAP_MAX, 65536)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_KEPT)
        library.malloc_trim(0)


def expandable_segments(device: Device) -> bool:
    """Whether torch's allocator has expandable segments on this device."""
    asked = _options().get(OPTION, "").strip().lower() == "true"
    return asked and device.kind == "cuda" and sys.platform == "linux"


def in_force(recipe: Recipe, device: Device) -> Recipe:
    """Return the recipe with what is in force: the environment may say otherwise, and not every system can do it."""
    train = recipe.train.model_copy(update={OPTION: expandable_segments(device)})
    return recipe.model_copy(update={"train": train})


def _options() -> dict[str, str]:
    """Return what the environment asks of the allocator; the newer variable wins."""
    found: dict[str, str] = {}
    for name in reversed(VARIABLES):
        for option in os.environ.get(name, "").split(","):
            key, colon, value = option.partition(":")
            if colon:
                found[key.strip()] = value
    return found
