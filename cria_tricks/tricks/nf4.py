r"""NF4: frozen weights in four bits, with levels at the quantiles of a normal distribution.

Saves    frozen linear weights: 16 -> 4 + 32 / 64 = 4.5 bits an element: a code, and an fp32 scale for 64 of them. With
         double quantization 4 + 8 / 64 + 32 / (64 x 256) = 4.127: 8-bit scales, and an fp32 scale for 256 of those
                                                                                     [bytes]
Costs    one layer at a time is unpacked to 16 bits for its product
Claim    approximate: each weight moves to the nearest of 16 levels of its block of 64
Needs    compute capability 6.0, or a CPU; something else to train (peft)
Breaks   training the quantised weights: codes have no gradient; merging an adapter into them rounds the sum to levels
Sources  Dettmers et al. 2023, arXiv:2305.14314, sec. 3 (NormalFloat, double quantization) and app. E (the levels)
Ours     levels, blocks, packing and double quantization in plain torch, with the bytes of bitsandbytes, except for a
         weight within 2e-7 of the middle between two levels. For many tokens bitsandbytes unpacks a whole matrix and
         then multiplies, for few tokens one kernel does both. fp4 (plain 4-bit floats) is the comparison

Shapes: weights (D_out, D_in), flattened to N elements in blocks of 64. Each block has one scale, its absmax (the
largest absolute value); a code is the index of a level, and two codes share a byte.
"""

from dataclasses import dataclass, replace

import torch

from cria_tricks.bill.constants import BLOCK, FP32
from cria_tricks.bill.operation import Product, ProductBytes, stored_as_multiplied
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.adamw_8bit import dequantize_blocks, dynamic_levels, quantize_blocks

SWITCHES = ("quantization=nf4", "quantization=fp4", "double_quantization=true")
CLAIM = "approximate"
LESSON = "nf4"
REFERENCE = ("normal_levels", "quantize", "dequantize")
PLAIN = """
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype="float16",  # a T4 has no bf16 units
)
model = AutoModelForCausalLM.from_pretrained(
    base, quantization_config=config, dtype="float16"  # of all other weights
)
"""
SCALES = 256
"""With double quantization, this many scales form a block of their own, with one fp32 scale."""


def normal_levels() -> torch.Tensor:
    """Compute the 16 NF4 levels: quantiles of a normal distribution, so that all are used about equally often.

    Seven levels are negative, one is exactly zero, and eight are positive. In each half the probabilities are equally
    spaced. All levels are divided by the largest.

    Returns:
        Sorted levels from -1 to 1, shape (16,), fp32.
    """
    # The quantile of probability 1 is infinite, so the outermost level is below it: by half of 1/16, as eight positive
    # levels suggest, or half of 1/15, as seven negative ones do. bitsandbytes takes the mean of the two.
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    quantiles = torch.cat(
        [
            1 - torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1],
            torch.tensor([0.5], dtype=torch.float64),
            torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:],
        ]
    )
    levels = torch.special.ndtri(quantiles)  # the inverse of the normal distribution function
    return (levels / levels.max()).float()


@dataclass
class Quantized:
    """Hold a weight in four bits.

    Attributes:
        packed: two codes in each byte, the first in the upper half, uint8 of shape (N / 2,).
        absmax: the scales of the blocks, shape (N / 64,): fp32, or uint8 codes after double quantization.
        mean: the mean of the scales, which double quantization subtracts first, fp32; ``None`` without it.
        absmax_of_absmax: one scale for each 256 scales, fp32 of shape (N / 64 / 256,); ``None`` without it.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    mean: torch.Tensor | None = None
    absmax_of_absmax: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Size of the quantised weight [bytes]."""
        tensors = (self.packed, self.absmax, self.mean, self.absmax_of_absmax)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def quantize(weight: torch.Tensor, levels: torch.Tensor, double_quantization: bool = False) -> Quantized:
    """Replace each element of a weight by the 4-bit code of the nearest level of its block.

    Args:
        weight: any shape with an even number N of elements, any float dtype.
        levels: sorted, shape (16,), e.g. :func:`normal_levels`.
        double_quantization: whether to store each scale in one byte. All scales are positive, so their mean is
            subtracted first, to use levels of both signs. The differences are quantised in blocks of 256, with the
            levels that 8-bit AdamW uses for its first moment.
    """
    codes_N, absmax = quantize_blocks(weight, levels, BLOCK)
    packed = codes_N[::2] << 4 | codes_N[1::2]  # codes 0 and 1 in the first byte, and so on
    if not double_quantization:
        return Quantized(packed, absmax)
    mean = absmax.mean()
    codes, absmax_of_absmax = quantize_blocks(absmax - mean, dynamic_levels(signed=True), SCALES)
    return Quantized(packed, codes, mean, absmax_of_absmax)


def dequantize(quantized: Quantized, levels: torch.Tensor) -> torch.Tensor:
    """Restore the approximate weights: the level of each code times the scale of its block.

    Args:
        quantized: from :func:`quantize`.
        levels: the same as there.

    Returns:
        Shape (N,), fp32.
    """
    absmax = quantized.absmax
    if quantized.mean is not None:
        assert quantized.absmax_of_absmax is not None
        signed = dynamic_levels(signed=True)
        absmax = dequantize_blocks(absmax, quantized.absmax_of_absmax, signed, SCALES) + quantized.mean
    codes_N = torch.stack([quantized.packed >> 4, quantized.packed & 15], dim=1).flatten()
    return dequantize_blocks(codes_N, absmax, levels, BLOCK)


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
    ).then("prepare_for_kbit_training")


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
