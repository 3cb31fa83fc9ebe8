"""Switch NF4 and FP4 weights on, and bill it; ``techniques/nf4.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.operation import BLOCK, FP32, Product, ProductBytes, stored_as_multiplied
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import ON_OFF, Field, Technique


def _values(recipe: Recipe, device: Device, width: int) -> tuple[str, ...]:
    """Return what a plan tries: if all weights train, none can be quantised. fp4 has the estimate of nf4."""
    if recipe.tricks.peft == "none":
        return ("none",)
    return ("none", "int8", "nf4")


TECHNIQUE = Technique(
    claim="approximate",
    lesson="nf4",
    switches=("quantization=nf4", "quantization=fp4", "double_quantization=true"),
    fields={
        "quantization": Field(
            "Your run", "Quantization of frozen weights (QLoRA: nf4)", values=_values, search="may change"
        ),
        "double_quantization": Field("LoRA", "Double quantization", values=ON_OFF, search="may change"),
    },
    needs={
        "quantization=nf4": "peft=lora",
        "quantization=fp4": "peft=lora",
        "double_quantization=true": "peft=lora quantization=nf4",
    },
)
USUAL_CASTS = "load.adapters.prepare_for_kbit_training"
"""The edit that prepares a quantised model for training; ``lean_preparation`` leaves it out."""
SCALES = 256
"""With double quantization, this many scales form a block of their own, with one fp32 scale."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask bitsandbytes for 4-bit linears that compute in the recipe's precision."""
    tricks = recipe.tricks
    if tricks.quantization not in ("nf4", "fp4"):
        if tricks.double_quantization:
            plan = plan.warn(
                "double_quantization has no effect: it packs the scales of 4-bit weights, and "
                f"quantization is {tricks.quantization}"
            )
        return plan
    refuse_without_adapter(recipe)
    return plan.with_(
        "quantization",
        load_in_4bit=True,
        bnb_4bit_quant_type=tricks.quantization,
        bnb_4bit_use_double_quant=tricks.double_quantization,
        bnb_4bit_compute_dtype=DTYPE[tricks.precision],
    ).then(USUAL_CASTS)


def refuse_without_adapter(recipe: Recipe) -> None:
    """Refuse a recipe in which nothing would train: quantised weights are codes, which have no gradient."""
    if recipe.tricks.peft == "none":
        kind = recipe.tricks.quantization
        raise BadInput(
            f"tricks.quantization={kind} with tricks.peft=none: quantised weights are frozen, so nothing "
            "would train; set tricks.peft=lora (or head)"
        )


def stored_bytes(elements: int, double_quantization: bool) -> int:
    """Count the bytes of one weight as bitsandbytes stores it: codes, scales, and tables of levels for each weight."""
    codes = (elements + 1) // 2
    table = 16 * FP32
    blocks = -(-elements // BLOCK)  # rounded up
    scales = blocks * FP32
    if double_quantization:
        scales_of_scales = -(-blocks // SCALES) * FP32
        table_for_scales = 256 * FP32
        mean = FP32
        scales = blocks + scales_of_scales + table_for_scales + mean
    return codes + scales + table


def bill(step: Step, recipe: Recipe) -> Step:
    """Store half a byte for each weight, and scales; all other weights are fp32 after the usual preparation.

    Weights are unpacked for their product, and again in the backward pass.
    """
    tricks = recipe.tricks
    if tricks.quantization not in ("nf4", "fp4"):
        return step
    shape = step.shape
    a_block = sum(stored_bytes(d_in * d_out, tricks.double_quantization) for d_in, d_out in shape.packable.values())
    scale_bytes: float = FP32
    if tricks.double_quantization:  # one byte for each scale, and one fp32 scale for each 256 of them
        scale_bytes = 1 + FP32 / SCALES
    # bitsandbytes returns a product in the dtype of its input, here fp32.
    return replace(
        step,
        block_weight_bytes=shape.layers * a_block,
        stored_itemsize=0.5 + scale_bytes / BLOCK,
        other_weight_itemsize=4,
        hidden_itemsize=4,
        product_itemsize=4,
        quantised=True,
        elements_per_byte=2,
        product_bytes=product_bytes,
    )


def product_bytes(product: Product) -> ProductBytes:
    """Unpack the weight to be multiplied, with its scales in fp32, and once more in the backward pass."""
    unpacked = product.weight * product.compute_itemsize
    scales = product.weight // BLOCK * FP32
    return ProductBytes(stored_as_multiplied(product).forward + unpacked + scales, unpacked=unpacked)
