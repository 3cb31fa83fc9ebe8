r"""NF4: frozen weights in four bits, with levels at the quantiles of a normal distribution.

Saves    frozen linear weights: 16 -> 4 + 32 / 64 = 4.5 bits an element, 4 + 8 / 64 + 32 / (64 x 256) = 4.127 with
         double quantization                                                         [bytes]
Costs    one layer at a time is unpacked to 16 bits for its product
Claim    approximate: each weight moves to the nearest of 16 levels of its block of 64
Needs    compute capability 6.0, or a CPU; something else to train (peft)
Breaks   training the quantised weights; merging an adapter into them rounds it
Sources  Dettmers et al. 2023, arXiv:2305.14314, sec. 3 (NormalFloat, double quantization) and app. E (the levels)
Ours     levels, blocks, packing and double quantization in plain torch, byte for byte bitsandbytes' but for a weight
         within 2e-7 of the middle between two levels. For many rows it unpacks a whole matrix, for few it does both in
         one kernel. fp4 (plain 4-bit floats) is the comparison

Shapes: weights (D_out, D_in), flattened to N elements in blocks of 64 with one absmax each; two codes a byte.
"""

from dataclasses import dataclass, replace

import torch

from cria_tricks.bill.constants import BLOCK
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.work import Work
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.adamw_8bit import dequantize_blocks, dynamic_levels, quantize_blocks

SWITCHES = ("quantization=nf4", "quantization=fp4", "double_quantization=true")
CLAIM = "approximate"
LESSON = "06_nf4"
REFERENCE = ("normal_levels", "quantize", "dequantize")
PLAIN = """
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
"""
SCALES = 256
"""Scales that share one of their own, after double quantization."""


def normal_levels() -> torch.Tensor:
    """Put the 16 levels where a normal distribution has equally many numbers between two of them.

    Seven negative ones, an exact zero, and eight positive ones, all divided by the largest. The outermost quantile
    leaves half a sixteenth above it (of eight levels) or half a fifteenth (of seven): the mean of the two is taken.

    Returns:
        Sorted levels from -1 to 1, shape (16,), fp32.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    quantiles = torch.cat(
        [
            1 - torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1],
            torch.tensor([0.5], dtype=torch.float64),
            torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:],
        ]
    )
    levels = torch.special.ndtri(quantiles)
    return (levels / levels.max()).float()


@dataclass
class Quantized:
    """A weight in four bits.

    Attributes:
        packed: two codes a byte, the first in the upper half, uint8 of shape (N / 2,).
        absmax: the blocks' scales, fp32 of shape (N / 64,), or their codes, uint8, after double quantization.
        mean: what double quantization subtracted from the scales; none without.
        absmax_of_absmax: the scales' own scales, fp32 of shape (N / 64 / 256,), after double quantization.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    mean: torch.Tensor | None = None
    absmax_of_absmax: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """What the weight takes now."""
        tensors = (self.packed, self.absmax, self.mean, self.absmax_of_absmax)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def quantize(weight: torch.Tensor, levels: torch.Tensor, double_quantization: bool = False) -> Quantized:
    """Pack a weight.

    Args:
        weight: any shape with an even number N of elements, any float dtype.
        levels: sorted, shape (16,), e.g. :func:`normal_levels`.
        double_quantization: whether the scales become bytes too. They are all positive, so their mean goes first; what
            is left is quantised like a moment of 8-bit AdamW, in blocks of 256.
    """
    codes_N, absmax = quantize_blocks(weight, levels, BLOCK)
    packed = codes_N[::2] << 4 | codes_N[1::2]
    if not double_quantization:
        return Quantized(packed, absmax)
    mean = absmax.mean()
    codes, absmax_of_absmax = quantize_blocks(absmax - mean, dynamic_levels(signed=True))
    return Quantized(packed, codes, mean, absmax_of_absmax)


def dequantize(quantized: Quantized, levels: torch.Tensor) -> torch.Tensor:
    """Look the weights up again, shape (N,), fp32."""
    absmax = quantized.absmax
    if quantized.mean is not None:
        assert quantized.absmax_of_absmax is not None
        absmax = dequantize_blocks(absmax, quantized.absmax_of_absmax, dynamic_levels(signed=True)) + quantized.mean
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
    """Quantised weights are codes: they have no gradient, so something else must train."""
    if recipe.tricks.peft == "none":
        kind = recipe.tricks.quantization
        raise BadInput(
            f"tricks.quantization={kind} with tricks.peft=none: quantised weights are frozen, so nothing "
            "would train; set tricks.peft=lora (or head)"
        )


def stored_bytes(elements: int, double_quantization: bool) -> int:
    """What a weight takes as bitsandbytes stores it, with the level tables that lie beside each."""
    blocks = -(-elements // BLOCK)
    scales = blocks + 4 * -(-blocks // SCALES) + 4 * 256 + 4 if double_quantization else 4 * blocks
    return (elements + 1) // 2 + scales + 4 * 16


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """Half a byte a weight and its scales; unpacked to be multiplied; the usual preparation raises all else to fp32."""
    tricks = recipe.tricks
    if tricks.quantization not in ("nf4", "fp4"):
        return memory
    a_block = sum(stored_bytes(d_in * d_out, tricks.double_quantization) for d_in, d_out in shape.packable.values())
    # bitsandbytes gives a product back in the dtype of its input.
    return replace(
        memory,
        block_weight_bytes=shape.layers * a_block,
        other_weight_itemsize=4,
        hidden_itemsize=4,
        product_itemsize=4,
        unpacks=True,
    )


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """A weight is read as half a byte and its share of a scale, and unpacked twice; all else is fp32."""
    tricks = recipe.tricks
    if tricks.quantization not in ("nf4", "fp4"):
        return work
    # Double quantisation keeps a scale in one byte, and an fp32 scale of 256 of these.
    scale = 1 + 4 / 256 if tricks.double_quantization else 4
    return replace(work, stored_itemsize=0.5 + scale / BLOCK, backward_unpacks=1, hidden_itemsize=4, head_itemsize=4)
