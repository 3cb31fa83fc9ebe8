"""Look at the adapter that a run goes on from: is its folder whole, was it trained over this base, and what is it."""

from pathlib import Path
from typing import Any

from cria_tricks.adapter.folder import refuse_another, refuse_unsafe, trained_over
from cria_tricks.adapter.opening import quantization_of
from cria_tricks.models import Weights, identity, pretrained, weight_files
from cria_tricks.recipe import Recipe


def revision(recipe: Recipe) -> str:
    """Return the hub commit of the base that the adapter was trained over; empty if it is not known.

    Raises:
        BadInput: if the folder is gone, damaged or not safe to read.
    """
    folder = Path(recipe.lora.continue_from)
    refuse_another(folder)
    refuse_unsafe(folder)
    return trained_over(folder).get("revision") or ""


def doubts(recipe: Recipe, base: Weights, other_base: bool) -> list[str]:
    """Compare the base of a run with that of the adapter that it goes on from.

    Args:
        recipe: the recipe.
        base: the run's base.
        other_base: whether it may be another one than the adapter's.

    Returns:
        A warning for each difference.

    Raises:
        BadInput: if weights or config differ, and ``other_base`` is false.
    """
    folder = Path(recipe.lora.continue_from)
    found = identity.compare(
        trained_over(folder),
        identity.of(base),
        str(folder),
        allowed=other_base,
        moved="--set model=DIR",
        weights=base,
    )
    before, now = quantization_of(folder), recipe.tricks
    if (folder / "recipe.toml").is_file() and before.quantization != now.quantization:
        found.append(
            f"{folder}: was trained over a base in {before.quantization}, and this run's is in {now.quantization}, "
            f"whose rounding is another; tricks.quantization={before.quantization} goes on over the same numbers"
        )
    return found


def recorded(recipe: Recipe) -> dict[str, Any]:
    """Return the folder of the adapter that a run goes on from, and the hash of its numbers."""
    folder = Path(recipe.lora.continue_from)
    return {"folder": str(folder), "weights": {pretrained.ADAPTER: weight_files.sha256(folder / pretrained.ADAPTER)}}
