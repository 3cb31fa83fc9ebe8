"""Identify a base model by the hashes of its files: a run records them, and later steps compare.

An adapter over another base computes something else, and nothing in its own files would show it. So a run records the
sha256 of the base's files, and whatever uses the adapter or goes on with the run compares.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.models import Weights, weight_files


def of(weights: Weights) -> dict[str, Any]:
    """Identify a model that lies here.

    Returns:
        ``name``, ``kind`` (``hub``, ``folder``, ``wheel`` or ``random``), ``revision`` (the hub's commit), and
        ``weights``, ``config`` and ``tokenizer``: the sha256 of their files by name.
    """
    about: dict[str, Any] = {"name": weights.name, "kind": weights.kind}
    if weights.kind == "hub":
        about["revision"] = weights.revision or None
    return about | weight_files.identity(Path(weights.path))


def other(recorded: Mapping[str, Any], now: Mapping[str, Any], part: str) -> str:
    """Say how one part of a base differs from what was recorded; empty if it does not, or was not recorded.

    Args:
        recorded: from :func:`of`, then.
        now: from :func:`of`.
        part: ``weights``, ``config`` or ``tokenizer``.
    """
    then = recorded.get(part) or {}
    found = now.get(part) or {}
    if not then or not found or then == found:
        return ""
    name = next(name for name in sorted({*then, *found}) if then.get(name) != found.get(name))
    return f"{name} was {short(then.get(name))} and is {short(found.get(name))}"


def short(digest: str | None) -> str:
    """Shorten a sha256 to twelve digits, which a reader can compare."""
    return f"sha256 {digest[:12]}" if digest else "not there"


def compare(
    recorded: Mapping[str, Any], now: Mapping[str, Any], where: str, *, allowed: bool, moved: str = "--base"
) -> list[str]:
    """Compare a base with the recorded one.

    Args:
        recorded: from :func:`of`, when it was trained over.
        now: from :func:`of`, of the base that would be used.
        where: what was trained over it, for the error.
        allowed: whether another base is wanted; then the difference is a warning.
        moved: the option that names the base's folder.

    Returns:
        Warnings.

    Raises:
        BadInput: if weights or config differ, with both identities.
    """
    warnings = []
    differ = other(recorded, now, "weights") or other(recorded, now, "config")
    if differ:
        said = f"{where}: the base {now['name']} is not the one that it was trained over: {differ}"
        if not allowed:
            raise BadInput(f"{said}; name the folder of that base with {moved}, or use this one with --other-base")
        warnings.append(f"{said}; used because of --other-base")
    differ = other(recorded, now, "tokenizer")
    if differ:
        warnings.append(f"{where}: the base's tokenizer has changed since: {differ}")
    return warnings
