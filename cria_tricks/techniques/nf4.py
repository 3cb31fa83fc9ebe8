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

from dataclasses import dataclass

import torch

from cria_tricks.bill.operation import BLOCK
from cria_tricks.switches.nf4 import SCALES
from cria_tricks.techniques.adamw_8bit import dequantize_blocks, dynamic_levels, quantize_blocks

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
