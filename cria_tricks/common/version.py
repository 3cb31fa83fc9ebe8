"""Look up the versions of this package and of its libraries."""

import importlib.metadata
import platform
from collections.abc import Iterable

try:
    __version__ = importlib.metadata.version("cria_tricks")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+unknown"  # the files were copied, not installed, so nothing says which version they are


ARITHMETIC = ("torch", "transformers", "peft", "bitsandbytes")
"""Libraries that compute a step: with another version the results of a run may differ in their last bits."""
PACKAGES = (*ARITHMETIC, "accelerate")
"""Libraries whose versions are in every report."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Look up the versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in names}


def versions() -> dict[str, str]:
    """Look up the versions of Python, of this package, and of the libraries in :data:`PACKAGES`."""
    return {"python": platform.python_version(), "cria_tricks": __version__, **installed(PACKAGES)}
