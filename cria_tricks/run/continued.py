"""Look at the adapter from which a run continues: whether its folder is whole, and over which base it was trained."""

from pathlib import Path
from typing import Any

from cria_tricks.adapter.folder import RECIPE, refuse_another, refuse_damaged, trained_over
from cria_tricks.adapter.opening import quantization_of
from cria_tricks.models import Weights, adapter_config, identity, pretrained, weight_files
from cria_tricks.models.catalogue import ALIASES, short_name
from cria_tricks.recipe import Recipe
from cria_tricks.trainer.what_ran import quantized

PLAIN = "16 or 32 bits"
"""How a base is named that is not quantised."""


def revision(recipe: Recipe) -> str:
    """Return the hub commit of the base that the adapter was trained over; empty if it is another base, or unknown.

    Raises:
        BadInput: if the folder is gone, damaged.
    """
    folder = Path(recipe.lora.continue_from)
    refuse_another(folder)
    refuse_damaged(folder)
    base = short_name(adapter_config.read(folder)["base_model_name_or_path"])
    if ALIASES.get(base, base) != ALIASES.get(recipe.model, recipe.model):
        return ""
    return trained_over(folder).get("revision") or ""


def doubts(recipe: Recipe, base: Weights, other_base: bool) -> list[str]:
    """Compare the base of a run with that of the adapter from which it continues.

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
    before, now = trained_over(folder), identity.of(base)
    found = identity.compare(before, now, str(folder), allowed=other_base, moved="--set model=DIR", weights=base)
    if (folder / RECIPE).is_file():
        then = quantization_of(folder)
        was, wanted = quantized(Recipe(tricks=then)), quantized(recipe)
        if was != wanted:
            found.append(
                f"{folder}: was trained over a base in {was or PLAIN}, and this run's is in {wanted or PLAIN}: other "
                f"weights; set tricks.quantization={then.quantization} and tricks.double_quantization="
                f"{str(then.double_quantization).lower()} for those of before"
            )
    return found


def recorded(recipe: Recipe) -> dict[str, Any]:
    """Return the folder of the adapter from which a run continues, and the hash of its numbers."""
    folder = Path(recipe.lora.continue_from)
    return {"folder": str(folder), "weights": {pretrained.ADAPTER: weight_files.sha256(folder / pretrained.ADAPTER)}}
