r"""LLM.int8(): frozen weights in one byte, columns with outliers computed in 16 bits.

Saves    frozen linear weights: 4 or 2 bytes -> 1 byte an element                    [bytes]
Costs    time: every product quantises its input. And bitsandbytes keeps that input alive, also in a checkpointed block
         (transformers frees it there with use_reentrant=True)
Claim    approximate: outside the outlier columns a number moves by at most half of absmax / 127, with the absmax of its
         token (inputs) or of its output feature (weights)
Needs    CUDA of compute capability 7.5 (a T4 has it), or a CPU; something else to train (peft)
Breaks   training the quantised weights themselves: they have no gradient
Sources  Dettmers et al. 2022, arXiv:2208.07339, sec. 3.1 (vector-wise quantisation), sec. 3.2 (outliers, threshold 6.0)
Ours     both in plain torch, with the same integers as bitsandbytes, whose products run on the GPU's integer units

Shapes: inputs (T, D_in) with one scale per token; weights (D_out, D_in) with one per output feature. A scale is the
absmax (largest absolute value) of its numbers. A column is an input feature, for all tokens.
"""

import torch

REFERENCE = ("quantize_rows", "linear_8bit")
PLAIN = """
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

config = BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained(
    base,
    quantization_config=config,
    dtype="float16",  # of all other weights; a T4 has no bf16 units
)
"""
THRESHOLD = 6.0
"""A column of the input in which any number is as large as this is an outlier column, multiplied in 16 bits."""


def quantize_rows(x_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of a matrix to integers from -127 to 127, with a scale of its own.

    Args:
        x_RD: shape (R, D), 16-bit or fp32.

    Returns:
        Integers, int8 of shape (R, D), and the rows' absolute maxima, fp32 of shape (R,).
    """
    absmax_R = x_RD.abs().amax(dim=1).float()
    steps_R = 127 / absmax_R.clamp(min=1e-30)  # so that a row of zeros does not divide by 0
    return torch.round(x_RD * steps_R[:, None]).to(torch.int8), absmax_R


def linear_8bit(
    x_TD: torch.Tensor, codes_OD: torch.Tensor, absmax_O: torch.Tensor, threshold: float = THRESHOLD
) -> torch.Tensor:
    """Multiply inputs by a quantised weight: as integers, except for the outlier columns.

    Args:
        x_TD: inputs, shape (T, D_in), 16-bit or fp32.
        codes_OD: the weight's integers, int8 of shape (D_out, D_in).
        absmax_O: its scales, fp32 of shape (D_out,).
        threshold: the absolute value from which on an input is an outlier; 0 for no outliers.

    Returns:
        Shape (T, D_out), the inputs' dtype.
    """
    outlier_D = (x_TD.abs() >= threshold).any(dim=0) if threshold else torch.zeros(x_TD.shape[1], dtype=torch.bool)
    # An outlier must not set the scale of its row: the other numbers would get only a few integers near zero.
    inside_TD = x_TD.masked_fill(x_TD.abs() >= threshold, 0) if threshold else x_TD
    codes_TD, absmax_T = quantize_rows(inside_TD)
    codes_TD[:, outlier_D] = 0
    products_TO = codes_TD.int() @ codes_OD.int().t()  # exact in int32: a sum is at most 127 x 127 x D_in
    # Each of the two factors was multiplied by 127 / absmax.
    y_TO = products_TO * (absmax_T[:, None] * absmax_O / 127**2)
    # The outlier columns, K of them, with the weight dequantised.
    weight_OK = codes_OD[:, outlier_D] * (absmax_O / 127)[:, None]
    return (y_TO + x_TD[:, outlier_D].float() @ weight_OK.t()).to(x_TD.dtype)
