"""Say which version of the package this is."""

import importlib.metadata
import platform

try:
    __version__ = importlib.metadata.version("cria_tricks")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+unknown"  # the files were copied, not installed, so nothing says which version they are


PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the numbers."""
    return {
        "python": platform.python_version(),
        "cria_tricks": __version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }
