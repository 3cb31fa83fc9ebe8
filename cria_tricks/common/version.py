"""Look up the versions of this package and of its libraries."""

import importlib.metadata
import platform
from collections.abc import Iterable

from cria_tricks.common.errors import BadInput

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


def repository() -> str:
    """Return the public URL of the package's source code, which pyproject.toml names.

    Raises:
        BadInput: if nothing names the URL, because the package was copied and not installed or has no such entry.
    """
    try:
        named = importlib.metadata.metadata("cria_tricks").get_all("Project-URL") or []
        return dict(line.split(", ", 1) for line in named)["Repository"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        raise BadInput(
            "a job installs cria_tricks from the repository that the installed package names, and no installed package "
            "names one here: pip install -e . in your copy of it"
        ) from None
