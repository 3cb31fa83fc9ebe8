"""The techniques, one per file: a card of eight lines, the from-scratch code, and the same in plain library code.

``REFERENCE`` names the parts of the code that matter, and ``PLAIN`` is what a reader writes with the libraries.
``switches/`` has a module of the same name for each technique that a setting switches on. Techniques in
:data:`INFERENCE` have no switch: a command always uses them.
"""

import importlib
import re
from types import ModuleType

from cria_tricks.switches import TECHNIQUES, technique_name
from cria_tricks.techniques import flash_decoding, kv_cache

INFERENCE: tuple[ModuleType, ...] = (flash_decoding, kv_cache)
"""Techniques for answering, not for training: no switch, because answers always use them (``Technique.command``)."""

CARD = ("Saves", "Costs", "Claim", "Needs", "Breaks", "Sources", "Ours", "Shapes")
"""The lines of a card, in their order."""


def code_of(technique: ModuleType) -> ModuleType:
    """Return the module with a technique's card and code; the module itself if it has both, as a strategy's has."""
    if technique not in TECHNIQUES:
        return technique
    return importlib.import_module(f"{__name__}.{technique_name(technique)}")


def card(technique: ModuleType) -> dict[str, str]:
    """Read the card of a technique.

    Args:
        technique: the module of its switch, or the one with the card.

    Returns:
        ``title`` and the eight lines of :data:`CARD`, continuation lines joined.
    """
    text = code_of(technique).__doc__ or ""
    found = {"title": text.strip().splitlines()[0]}
    lines, _, shapes = text.partition("\nShapes: ")  # a paragraph of its own, the last
    pattern = rf"^({'|'.join(CARD)}) +(.*(?:\n[ ]{{4,}}\S.*)*)"
    for line in re.finditer(pattern, lines, flags=re.MULTILINE):
        found[line[1]] = " ".join(line[2].split())
    found["Shapes"] = " ".join(shapes.split())
    missing = [line for line in CARD if not found.get(line)]
    assert not missing, f"the card of {technique_name(technique)} has no line {', '.join(missing)}"
    return found
