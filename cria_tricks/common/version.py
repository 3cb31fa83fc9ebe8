"""Look up the versions of this package and of its libraries."""

import importlib.metadata
import platform
from collections.abc import Iterable

try:
    __version__ = importlib.metadata.version("cria_tricks")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+unknown"  # the files were copied, not installed, so nothing says which version they are


ARITHMETIC = ("torch", "transformers", "peft", "bitsandbytes")
"""Libraries that compute a step: another version may change the last bits of a run."""
PACKAGES = (*ARITHMETIC, "accelerate")
"""Libraries whose versions stand in every report."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Look up the versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in names}


def versions() -> dict[str, str]:
    """Look up the versions of Python, of this package, and of the libraries that decide the numbers."""
    return {"python": platform.python_version(), "cria_tricks": __version__, **installed(PACKAGES)}
