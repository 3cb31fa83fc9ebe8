"""Switch int8 weights on, and bill it; ``techniques/int8.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.operation import Product, ProductBytes, stored_as_multiplied
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches.nf4 import USUAL_CASTS, refuse_without_adapter
from cria_tricks.technique import Technique

TECHNIQUE = Technique(
    claim="approximate", lesson="int8", switches=("quantization=int8",), needs={"quantization=int8": "peft=lora"}
)


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
    return plan.with_("quantization", load_in_8bit=True).then(USUAL_CASTS)


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
