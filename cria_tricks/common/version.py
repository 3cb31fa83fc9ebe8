"""Say which version of the package this is."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("cria_tricks")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+unknown"  # the files were copied, not installed, so nothing says which version they are
