"""List the switches in their order, the values to try for each, and all sets of switches with these values."""

import itertools
from collections.abc import Iterator
from typing import Any

from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe

LADDER = (
    "peft",
    "attention",
    "expand_kv",
    "gradient_checkpointing",
    "keep_attention",
    "chunked_loss",
    "precision",
    "lean_preparation",
    "quantization",
    "double_quantization",
    "optimizer",
    "paged_optimizer",
    "gradient_accumulation",
    "packing",
    "fused_lora",
    "fused_blocks",
    "compile",
    "tiled_mlp",
    "activation_offload",
    "stream_layers",
    "layer_by_layer",
    "optimizer_in_backward",
)
"""The fields of ``recipe.tricks`` in the order of the lessons; each field comes after those that it needs."""

NEEDS = {
    "expand_kv": ("attention",),
    "keep_attention": ("gradient_checkpointing", "attention", "expand_kv"),
    "quantization": ("peft",),
    "stream_layers": ("peft", "gradient_checkpointing"),
    "layer_by_layer": ("peft", "gradient_checkpointing", "stream_layers"),
    "double_quantization": ("peft", "quantization"),
    "lean_preparation": ("peft", "precision"),
    **dict.fromkeys(("chunked_loss", "fused_lora", "fused_blocks"), ("peft",)),
}
"""Switch -> those without which it has nothing to act on, or is refused."""


def choices(recipe: Recipe, device: Device, width: int) -> dict[str, tuple[Any, ...]]:
    """List the values to try for switches that change how a step is computed.

    ``peft`` is left out, because it changes which weights train; ``packing`` and ``gradient_accumulation`` are, because
    they change how many tokens a step learns from. ``compile`` is left out, because the estimate knows its faster
    steps, but neither the time to compile nor the bytes that it saves. The values ``fp4``, whose estimate equals that
    of ``nf4``, and ``flash_attention_2``, which needs another package and a newer GPU, are left out, too, as is
    ``stream_layers``, which an H200 has run on small blocks only.

    Args:
        recipe: what would be trained.
        device: the machine.
        width: D, the width of the model. A micro-batch of no more tokens is no longer than one tile of its MLP.
    """
    # If all weights train, none can be quantised, and their gradients are large.
    quantizations: tuple[str, ...] = ("none",)
    in_backward: tuple[bool | str, ...] = (False, "clip" if recipe.train.max_grad_norm else True)
    if recipe.tricks.peft != "none":
        quantizations = ("none", "int8", "nf4")
        in_backward = (False,)
    longer = recipe.train.batch_size * recipe.data.max_length > width
    return {
        "precision": ("fp32", device.half_precision),
        "attention": ("eager", "sdpa"),
        "expand_kv": (False, True),
        "quantization": quantizations,
        "double_quantization": (False, True),
        "lean_preparation": (False, True),
        "gradient_checkpointing": (False, True),
        "tiled_mlp": (False, True) if longer else (False,),
        "activation_offload": (False, True),
        "chunked_loss": (False, True),
        "optimizer": ("adamw", "adamw_8bit"),
        "paged_optimizer": (False, True),
        "optimizer_in_backward": in_backward,
    }


def all_sets(recipe: Recipe, device: Device, width: int) -> Iterator[dict[str, Any]]:
    """Yield all combinations of these values, but three kinds in which a switch has no effect on any device.

    Some of the others have no effect on this device, or are refused; the caller checks that.
    """
    fields = choices(recipe, device, width)
    for values in itertools.product(*fields.values()):
        tricks = dict(zip(fields, values, strict=True))
        if tricks["expand_kv"] and tricks["attention"] != "sdpa":
            continue  # expand_kv repeats keys and values for torch's attention only
        if tricks["double_quantization"] and tricks["quantization"] != "nf4":
            continue  # of these values only nf4 has scales that can be quantised, too
        if tricks["lean_preparation"] and tricks["precision"] == "fp32":
            continue  # lean_preparation avoids fp32 copies of 16-bit tensors; in fp32 there are none
        yield tricks
