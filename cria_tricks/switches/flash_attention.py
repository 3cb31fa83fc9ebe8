"""Switch fused attention on, and bill it; ``techniques/flash_attention.py`` has the card and the code."""

import importlib.util
from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware import this_device
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.models.shape import Facts
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="flash_attention",
    switches=("attention=sdpa", "attention=flash_attention_2"),
    # flash_attention_2 is left out, because it needs another package and a newer GPU.
    fields={"attention": Field("Speed", "Attention (SDPA, FlashAttention)", values=("eager", "sdpa"))},
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Name the attention implementation for ``from_pretrained``."""
    attention = recipe.tricks.attention
    if attention == "flash_attention_2":
        _refuse_flash_attention_2(plan, recipe)
    return plan.with_("model", attn_implementation=attention)


def _refuse_flash_attention_2(plan: Plan, recipe: Recipe) -> None:
    device = plan.device
    instead = "use tricks.attention=sdpa"
    if device.kind != "cuda":
        raise BadInput(f"tricks.attention=flash_attention_2: it runs on CUDA cards only; {instead}")
    if device.capability < (8, 0):
        major, minor = device.capability
        raise BadInput(
            "tricks.attention=flash_attention_2: it needs compute capability 8.0, and "
            f"{device.name} has {major}.{minor}; {instead}"
        )
    if recipe.tricks.precision == "fp32":
        raise BadInput(
            "tricks.attention=flash_attention_2: it computes in 16 bits only; set tricks.precision=bf16 or fp16, "
            f"or {instead}"
        )
    if device == this_device() and importlib.util.find_spec("flash_attn") is None:  # a plan for another card is free
        raise BadInput(
            "tricks.attention=flash_attention_2: the package flash-attn is missing; pip install "
            f"'cria_tricks[flash]', or {instead}"
        )


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model whose own attention computes something else."""
    # Not ==: our own attention functions, "sdpa_expanded" and "sdpa_by_document", call torch's sdpa, too.
    if "sdpa" in plan.model.get("attn_implementation", "") and not facts.made_for_sdpa:
        raise BadInput(f"tricks.attention=sdpa: {facts.name} is not made for it; set tricks.attention=eager")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill what the attention's kernel saves and moves; the card decides which kernel runs.

    A fused one keeps scores on the chip, and skips hidden keys if there is no mask.
    """
    attention = recipe.tricks.attention
    if attention == "eager":
        return step
    if attention == "flash_attention_2":
        return replace(step, kernel="flash", repeats_keys=False, maskless=True)
    # Several rows have a mask, because their lengths differ, and so has a window not longer than a row. With a mask
    # transformers repeats keys and values; without, it leaves that to torch.
    shape = step.shape
    masked = step.batch > 1 or 0 < shape.window < step.tokens + 1
    return with_kernel(step, masked=masked, repeats=masked or shape.heads == shape.kv_heads)


def with_kernel(step: Step, *, masked: bool, repeats: bool) -> Step:
    """Set the kernel that torch's attention runs in on this device; for emulated bf16 there is no fused one.

    Args:
        step: the step.
        masked: whether attention gets a mask.
        repeats: whether the kernel is given as many key heads as query heads.
    """
    kernel = "flash"  # on a CPU it takes everything
    if step.device.kind == "cuda":
        kernel = kernel_for(step.device, DTYPE[step.precision], masked=masked, grouped=not repeats)
    return replace(step, kernel=kernel, repeats_keys=repeats, maskless=not masked)
