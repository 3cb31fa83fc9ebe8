"""The values that each toggle is tried with, and all sets of them."""

import itertools
from collections.abc import Iterator
from typing import Any

from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe


def choices(recipe: Recipe, device: Device) -> dict[str, tuple[Any, ...]]:
    """List the values to try, for each field that changes no more than how a step is computed."""
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
    """Combine the choices of all fields, without the sets in which a toggle would have no effect."""
    fields = choices(recipe, device)
    for values in itertools.product(*fields.values()):
        tricks = dict(zip(fields, values, strict=True))
        if tricks["expand_kv"] and tricks["attention"] != "sdpa":
            continue  # it repeats keys and values for torch's attention only
        if tricks["double_quantization"] and tricks["quantization"] != "nf4":
            continue  # only NF4 has scales that are quantised again
        if tricks["lean_preparation"] and tricks["precision"] == "fp32":
            continue  # without 16-bit arithmetic it has nothing to save
        yield tricks
