"""Find the name that a user means: letter case, spaces, ``-`` and ``_`` do not matter, and a wrong name gets a hint."""

import difflib
from collections.abc import Iterable


def plain(name: str) -> str:
    """Reduce a name to the form in which names are compared.

    Examples:
        >>> plain("Flash-Attention")
        'flash_attention'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def same(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that was meant.

    Args:
        name: as it was typed.
        known: the right names.

    Returns:
        The known name, or ``None`` when there is none, or when more than one could be meant.

    Examples:
        >>> same("SmolLM2", ["smollm2", "llama-3.2-1b"])
        'smollm2'
    """
    known = list(known)
    if name in known:
        return name
    found = [other for other in known if plain(other) == plain(name)]
    return found[0] if len(found) == 1 else None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that looks most like a wrong one.

    Args:
        name: as it was typed.
        known: the right names.
        cutoff: how alike two names must be, from 0 (any two) to 1 (equal), by ``difflib``.
    """
    by_plain = {plain(other): other for other in known}
    found = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=cutoff)
    return by_plain[found[0]] if found else None
