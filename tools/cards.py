"""A card as a list: what griffe, which reads docstrings for the reference, would take for a paragraph."""

import re
from typing import Any

import griffe

from cria_tricks.tricks import CARD


class Cards(griffe.Extension):
    """Begins a list's item where a line of the card begins."""

    def on_module(self, *, mod: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Change the docstring of one module, once it is read."""
        if mod.canonical_path.startswith("cria_tricks.tricks.") and mod.docstring:
            mod.docstring.value = re.sub(rf"^({'|'.join(CARD[:-1])}) +", r"- **\1** ", mod.docstring.value, flags=re.M)
