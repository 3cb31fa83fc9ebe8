"""Name the folder for what is made or downloaded once and used by later commands."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return this folder: ``$CRIA_CACHE``, else ``~/.cache/cria_tricks``."""
    return Path(os.environ.get("CRIA_CACHE") or Path.home() / ".cache" / "cria_tricks")
