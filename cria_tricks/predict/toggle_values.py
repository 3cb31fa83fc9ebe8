"""List the values to try for each toggle, and all sets of toggles with these values."""

import itertools
from collections.abc import Iterator
from typing import Any

from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe


def choices(recipe: Recipe, device: Device) -> dict[str, tuple[Any, ...]]:
    """List the values to try, for toggles that change how a step is computed, but not what it learns from.

    So ``peft``, ``packing`` and ``gradient_accumulation`` are not among them. Neither is ``compile``.
    """
    quantizations: tuple[str, ...] = ("none",)
    if recipe.tricks.peft != "none":  # only frozen weights can be quantised
        quantizations = ("none", "int8", "nf4")
    return {
        "precision": ("fp32", device.half_precision),
        "attention": ("eager", "sdpa"),
        "expand_kv": (False, True),
        "quantization": quantizations,
        "double_quantization": (False, True),
        "lean_preparation": (False, True),
        "gradient_checkpointing": (False, True),
        "activation_offload": (False, True),
        "chunked_loss": (False, True),
        "optimizer": ("adamw", "adamw_8bit"),
        "paged_optimizer": (False, True),
    }


def all_sets(recipe: Recipe, device: Device) -> Iterator[dict[str, Any]]:
    """Yield all combinations of these values, without those in which a toggle would have no effect."""
    fields = choices(recipe, device)
    for values in itertools.product(*fields.values()):
        tricks = dict(zip(fields, values, strict=True))
        if tricks["expand_kv"] and tricks["attention"] != "sdpa":
            continue  # expand_kv repeats keys and values for torch's attention only
        if tricks["double_quantization"] and tricks["quantization"] != "nf4":
            continue  # of these values only nf4 has scales that can be quantised, too
        if tricks["lean_preparation"] and tricks["precision"] == "fp32":
            continue  # lean_preparation avoids fp32 copies of 16-bit tensors; in fp32 there are none
        yield tricks
