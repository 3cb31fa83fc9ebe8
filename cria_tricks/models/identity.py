"""Identify a base model by the hashes of its files: a run records them, and later commands compare them.

On another base an adapter computes something else, and nothing in the adapter's own files would show it. So a run
records the sha256 of the base's files, and every command that uses the adapter or resumes the run compares them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.models import Weights, weight_files


def of(weights: Weights) -> dict[str, Any]:
    """Identify a local model.

    Returns:
        ``name``, ``kind`` (``hub``, ``folder``, ``wheel`` or ``random``), for a hub model also ``revision`` (its
        commit), and ``weights``, ``config`` and ``tokenizer``: for each a dictionary, file name -> sha256.
    """
    about: dict[str, Any] = {"name": weights.name, "kind": weights.kind}
    if weights.kind == "hub":
        about["revision"] = weights.revision or None
    return about | weight_files.identity(Path(weights.path))


def other(recorded: Mapping[str, Any], now: Mapping[str, Any], part: str) -> str:
    """Describe the first difference between one part of a base and what was recorded.

    Args:
        recorded: what :func:`of` returned when the adapter was trained.
        now: what :func:`of` returns for the present base.
        part: ``weights``, ``config`` or ``tokenizer``.

    Returns:
        A sentence with both hashes of the first file that differs; empty if nothing differs, or one of the two has no
        hashes of this part.
    """
    then = recorded.get(part) or {}
    found = now.get(part) or {}
    if not then or not found or then == found:
        return ""
    name = next(name for name in sorted({*then, *found}) if then.get(name) != found.get(name))
    return f"{name} was {short(then.get(name))} and is {short(found.get(name))}"


def short(digest: str | None) -> str:
    """Shorten a sha256 to twelve digits, so that a reader can compare two; ``None`` means that there is no file."""
    return f"sha256 {digest[:12]}" if digest else "not there"


def compare(
    recorded: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
    *,
    allowed: bool,
    weights: Weights,
    moved: str = "--base",
) -> list[str]:
    """Compare a base with the one that an adapter was trained on.

    Args:
        recorded: what :func:`of` returned when the adapter was trained.
        now: what :func:`of` returns for the base that would be used.
        where: the adapter or run, as messages call it.
        allowed: whether the user allows another base; then a difference is only a warning.
        weights: the base that would be used. One that cannot be used at all is refused for that reason, so that nobody
            is told to allow it.
        moved: the command-line option with which the user names the folder of the base.

    Returns:
        Warnings. A different tokenizer is always only a warning.

    Raises:
        BadInput: if weights or config differ and ``allowed`` is false; it names both hashes.
    """
    warnings = []
    differ = other(recorded, now, "weights") or other(recorded, now, "config")
    if differ:
        said = f"{where}: the base {now['name']} is not the one that it was trained over: {differ}"
        if not allowed:
            from cria_tricks.models import pretrained  # slow to import, and rarely needed

            pretrained.refuse_misfit(Path(weights.path), weights.name)
            raise BadInput(f"{said}; name the folder of that base with {moved}, or use this one with --other-base")
        warnings.append(f"{said}; used because of --other-base")
    differ = other(recorded, now, "tokenizer")
    if differ:
        warnings.append(f"{where}: the base's tokenizer has changed since: {differ}")
    return warnings
