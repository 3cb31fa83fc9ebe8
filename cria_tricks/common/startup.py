"""Skip Python's garbage collection where it only costs time: while the libraries are imported, and at the end."""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

from cria_tricks.common import waiting


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while importing, so that importing takes a fifth less time.

    The libraries make a million objects, and all of them stay. So each collection would search them and free nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with waiting.doing("importing the libraries"):
            yield
    finally:
        if enabled:
            gc.enable()


def end_at_once() -> None:
    """Skip the last garbage collection of this process [1 s]: the system takes back all of its memory anyway."""
    atexit.register(freeze)


def freeze() -> None:
    """Leave all objects out of later collections, unless triton 3.9 is loaded, which reports what is never freed."""
    binding = sys.modules.get("triton._C.libtriton.ir")
    if type(getattr(binding, "attribute", None)).__module__ != "nanobind":
        gc.freeze()
