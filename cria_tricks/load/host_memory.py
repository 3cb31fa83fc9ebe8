"""The host's memory: refuse a model that is larger; and buffers for weights that are streamed to a card.

The buffers are in pinned memory, or in a memory-mapped file.
"""

import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import psutil
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.models import weight_files

CONTAINER = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may take [bytes] (cgroup v2)."""


def refuse_too_large(folder: Path, bytes_per_weight: int, task: str) -> None:
    """Refuse to load a model for which this machine has too little memory; the system would kill the process.

    Only headers of files are read. Swap counts as memory, because the system uses it before it kills anything.

    Args:
        folder: the model's folder.
        bytes_per_weight: how many bytes are needed for each of its weights.
        task: what needs them, for the error.

    Raises:
        BadInput: if the memory that is free is not enough.
    """
    weights = 0
    for tensor in weight_files.tensors(folder, str(folder)).values():
        packed = 2 if tensor.dtype == "U8" else 1  # two codes of 4 bits are stored in a byte
        weights += packed * math.prod(tensor.shape)
    needed = weights * bytes_per_weight
    free = free_memory()
    if needed > free:
        raise BadInput(
            f"{task}: {folder} has {weights / 1e9:.2f} billion weights, which take {human(needed)} of memory, and "
            f"{human(free)} are free; close other programs, or do it on a machine with more memory"
        )


def free_memory() -> int:
    """Return the memory that this process may still take [bytes]: the machine's with its swap, or its container's."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    try:
        limit = int(CONTAINER.read_text())
    except (OSError, ValueError):  # no container of Linux, or one without a limit, which says "max"
        return free
    return min(free, limit - psutil.Process().memory_info().rss)


class Pinned:
    """Buffers in memory. For a card they are pinned: it reads them by itself, while the processor goes on.

    torch's ``pin_memory`` would round each buffer up to a power of two. So plain memory is registered with CUDA, as
    torch's own checkpoints do it.
    """

    def __init__(self, *, for_a_card: bool):
        self.for_a_card = for_a_card

    def buffer(self, size: int) -> torch.Tensor:
        """Return a buffer of so many bytes.

        Raises:
            RuntimeError: if CUDA cannot pin it.
        """
        made = torch.empty(size, dtype=torch.uint8)
        if self.for_a_card:
            cuda = torch.cuda.cudart()
            torch.cuda.check_error(cuda.cudaHostRegister(made.data_ptr(), size, 0))
            weakref.finalize(made.untyped_storage(), cuda.cudaHostUnregister, made.data_ptr()).atexit = False
        return made

    def done_with(self, buffer: torch.Tensor) -> None:
        """Do nothing: a buffer in memory stays there."""


class MappedFile:
    """Buffers in a file without a name, which the system deletes when the process ends, however it ends.

    It lies in the folder for temporary files, which the environment variable TMPDIR names. A buffer that was read is
    dropped from the process' memory; the system may keep it cached as long as it has room.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the buffers)
        self.maps: dict[int, mmap.mmap] = {}

    def buffer(self, size: int) -> torch.Tensor:
        """Return a buffer of so many bytes.

        Raises:
            BadInput: if the disk has no room.
        """
        begin = self.file.seek(0, os.SEEK_END)
        end = begin + -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            # Not truncate(), which makes a file of holes: writing into a full disk would then kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), begin, end - begin)
            else:  # macOS
                self.file.write(bytes(end - begin))
                self.file.flush()
        except OSError as error:
            raise BadInput(
                f"tricks.stream_layers=file: {tempfile.gettempdir()} has no room for {human(end)} ({error.strerror}); "
                "set TMPDIR to a folder on a larger disk"
            ) from None
        mapped = mmap.mmap(self.file.fileno(), end - begin, offset=begin)
        made = torch.frombuffer(mapped, dtype=torch.uint8, count=size)
        self.maps[made.data_ptr()] = mapped
        return made

    def done_with(self, buffer: torch.Tensor) -> None:
        """Drop a buffer's pages from the process; they come back from the file when they are read again."""
        self.maps[buffer.data_ptr()].madvise(mmap.MADV_DONTNEED)
