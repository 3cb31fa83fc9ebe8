"""Find the name that a user means: letter case, spaces, ``-`` and ``_`` do not matter, and a wrong name gets a hint."""

import difflib
from collections.abc import Iterable, Sequence


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
        The known name, or ``None`` if none fits or several do.

    Examples:
        >>> same("SmolLM2", ["smollm2", "llama-3.2-1b"])
        'smollm2'
    """
    found = [other for other in known if plain(other) == plain(name)]
    return found[0] if len(found) == 1 else None  # a choice among several would be a guess


def repeated(names: Sequence[str]) -> str | None:
    """Find the first name that occurs more than once; ``None`` if there is none."""
    return next((name for name in names if names.count(name) > 1), None)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that looks most like a wrong one.

    Args:
        name: as it was typed.
        known: the right names.
        cutoff: the least similarity by ``difflib``, from 0 (any two names) to 1 (equal names).

    Returns:
        The known name, or ``None`` if none is similar enough.
    """
    by_plain = {plain(other): other for other in known}
    found = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=cutoff)
    if not found:
        return None
    return by_plain[found[0]]


def hint(near: str | None, otherwise: str) -> str:
    """Return the end of an error message: the question whether the nearest name was meant, or another hint.

    Args:
        near: the known name that looks most like the wrong one, if there is one.
        otherwise: the hint if no known name is similar.

    Examples:
        >>> hint("smoke", "there are smoke, kwanzaa")
        'did you mean smoke?'
        >>> hint(None, "there are smoke, kwanzaa")
        'there are smoke, kwanzaa'
    """
    return f"did you mean {near}?" if near else otherwise
