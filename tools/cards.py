"""What the reference shows of docstrings: a card as a list with plain labels, and no marks of Sphinx.

griffe, which reads docstrings for the reference, would take a card for one paragraph, and prints ``:func:`` as it is.
"""

import re
from typing import Any

import griffe

from cria_tricks.techniques import CARD

LABELS = {"Claim": "Changes results?", "Breaks": "Fails when, or not with", "Ours": "Our code"}
"""What the reference calls a line of a card, where the card's own word says too little without its context."""
FOLDERS = ("cria_tricks.techniques.", "cria_tricks.parallel.")


def as_list(docstring: str) -> str:
    """Begin a list's item where a line of the card begins.

    Examples:
        >>> as_list("Claim    exact")
        '- **Changes results?** exact'
    """
    lines = rf"^({'|'.join(CARD[:-1])}) {{2,}}"
    return re.sub(lines, lambda found: f"- **{LABELS.get(found[1], found[1])}** ", docstring, flags=re.M)


def without_marks(docstring: str) -> str:
    """Leave out what only Sphinx reads: roles, and the two colons before code.

    Examples:
        >>> without_marks("What :func:`~spread` returned::")
        'What `spread` returned:'
    """
    docstring = re.sub(r":(?:func|class|data|mod|meth|attr|exc):`~?([^`]+)`", r"`\1`", docstring)
    docstring = re.sub(r"^::$", "", docstring, flags=re.M)
    return re.sub(r"(?<=[^:\n])::$", ":", docstring, flags=re.M)


class Cards(griffe.Extension):
    """Changes docstrings before mkdocstrings renders them."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Change the docstring of one module, class, function or attribute, once it is read."""
        if not obj.docstring:
            return
        obj.docstring.value = without_marks(obj.docstring.value)
        if obj.is_module and obj.canonical_path.startswith(FOLDERS):
            obj.docstring.value = as_list(obj.docstring.value)
