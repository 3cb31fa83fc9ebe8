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

from dataclasses import replace

import torch

from cria_tricks.bill.operation import Product, ProductBytes, stored_as_multiplied
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.nf4 import refuse_without_adapter

SWITCHES = ("quantization=int8",)
CLAIM = "approximate"
LESSON = "int8"
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


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask bitsandbytes for 8-bit linears; the embedding and the head stay as they are."""
    if recipe.tricks.quantization != "int8":
        return plan
    refuse_without_adapter(recipe)
    if plan.device.kind == "cuda" and plan.device.capability < (7, 5):
        major, minor = plan.device.capability
        raise BadInput(
            f"tricks.quantization=int8: bitsandbytes needs compute capability 7.5 for it, and {plan.device.name} has "
            f"{major}.{minor}; set tricks.quantization=nf4"
        )
    if recipe.tricks.peft == "lora" and recipe.lora.dora and plan.device.kind == "cpu":
        # DoRA unpacks the matrices in every step. On a CPU peft 0.21 then moves them, and the scales are gone.
        raise BadInput(
            "lora.dora=true with tricks.quantization=int8: peft loses the matrices' scales on a CPU; set "
            "tricks.quantization=nf4 or lora.dora=false"
        )
    if recipe.tricks.precision == "bf16" and plan.device.kind == "cuda":
        plan = plan.warn("quantization=int8 computes its outlier columns in fp16, also with precision=bf16")
    return plan.with_("quantization", load_in_8bit=True).then("prepare_for_kbit_training")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill a byte a weight, and a scale an output feature; the usual preparation casts all else to fp32.

    Weights are unpacked for their product, and again in the backward pass.
    """
    if recipe.tricks.quantization != "int8":
        return step
    shape = step.shape
    a_block = sum((d_in + 4) * d_out for d_in, d_out in shape.packable.values())
    # On CUDA a product comes back in the dtype of its input, here fp32; on a CPU in the dtype of autocast.
    result_itemsize = step.product_itemsize
    rule = cpu_product_bytes
    if step.device.kind == "cuda":
        result_itemsize = 4
        rule = cuda_product_bytes
    return replace(
        step,
        block_weight_bytes=shape.layers * a_block,
        stored_itemsize=1,
        other_weight_itemsize=4,
        hidden_itemsize=4,
        product_itemsize=result_itemsize,
        quantised=True,
        product_bytes=rule,
    )


def cuda_product_bytes(product: Product) -> ProductBytes:
    """On CUDA the input is quantised in fp16, and the sums are int32; only the backward pass unpacks the weight."""
    given = product.given
    cast = product.input_itemsize != 2 or product.bf16  # not fp16 yet
    # First the input in fp16 (2 bytes, if it is a cast), its absolute values (2), and a mask of the large ones (1).
    quantising = given * (2 * cast + 2 + 1)
    # Then the input's codes (1), the sums in int32 (4), these in fp16 (2), and in the result's dtype, if it is a cast.
    multiplying = given + product.made * (4 + 2 + product.made_itemsize * cast)
    return ProductBytes(max(quantising, multiplying), _in_input_dtype(product), _pinned(product))


def cpu_product_bytes(product: Product) -> ProductBytes:
    """A CPU unpacks the weight in the input's dtype, forward and backward; autocast makes a copy for the product."""
    forward = stored_as_multiplied(product).forward + _in_input_dtype(product)
    if product.input_itemsize != product.compute_itemsize:
        forward += product.weight * product.compute_itemsize
    return ProductBytes(forward, _in_input_dtype(product), _pinned(product))


def in_eval_mode(step: Step) -> Step:
    """Return a pass in eval mode, in which a CPU multiplies int8 codes as a GPU does."""
    if step.product_bytes is not cpu_product_bytes:
        return step
    return replace(step, product_bytes=cuda_product_bytes, product_itemsize=step.hidden_itemsize)


def _in_input_dtype(product: Product) -> int:
    """Bytes of the whole weight, unpacked in the dtype of the input."""
    return product.weight * product.input_itemsize


def _pinned(product: Product) -> int:
    """Bytes of the input, which bitsandbytes keeps where autograd's hooks cannot reach it."""
    return product.given * product.input_itemsize
