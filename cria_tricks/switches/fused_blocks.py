"""Switch fused blocks on, and bill it; ``techniques/fused_blocks.py`` has the card and the code."""

import functools
import os
from dataclasses import replace

from cria_tricks.bill import fused_operations
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Facts
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="fused_lora",
    switches=("fused_blocks=true", "fused_blocks=triton"),
    fields={"fused_blocks": Field("Speed", "Fused norms, activation and RoPE", search="free")},
    needs=dict.fromkeys(("fused_blocks=true", "fused_blocks=triton"), "peft=lora"),
)
FUSE = "load.fused.fuse_blocks"
BY_TRITON = "load.fused.fuse_blocks_by_triton"
"""The edits that fuse blocks, by plain PyTorch and by Triton."""
KINDS = ("granite", "llama", "mistral", "mixtral", "qwen2", "qwen3", "smollm3")
"""Kinds of model whose norms are those of Llama, and whose whole heads are rotated."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Have norms, MLPs and rotary positions run by the functions of ``techniques/``."""
    tricks = recipe.tricks
    if not tricks.fused_blocks:
        return plan
    if tricks.peft not in ("lora", "prompt_tuning"):
        return plan.warn(
            f"fused_blocks has no effect: it needs frozen norms (peft=lora or prompt_tuning), and peft is {tricks.peft}"
        )
    if tricks.compile:
        raise BadInput("tricks.fused_blocks=true: torch.compile fuses a block itself; set tricks.compile=false")
    if tricks.fused_blocks == "triton":
        refuse_without_triton(plan.device)
        return plan.then(BY_TRITON)
    return plan.then(FUSE)


def refuse_without_triton(device: Device) -> None:
    """Refuse a device on which Triton's kernels do not run.

    Raises:
        BadInput: if it is no CUDA card (unless TRITON_INTERPRET=1), or Triton does not support its capability.
    """
    why = ""
    if device.kind != "cuda":
        if os.environ.get("TRITON_INTERPRET") != "1":
            why = "they need a CUDA card (or, to be tested slowly, TRITON_INTERPRET=1 before Python starts)"
    elif device.capability < (7, 5):
        why = "they need compute capability 7.5, and it has {}.{}".format(*device.capability)
    if why:
        raise BadInput(f"Triton kernels on {device.name}: {why}; set tricks.fused_blocks=true for plain PyTorch")


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model whose norms or rotary positions have other formulas."""
    if not {FUSE, BY_TRITON} & {*plan.after_load} or facts.kind in KINDS:
        return
    raise BadInput(
        f"tricks.fused_blocks=true: the norms or rotary positions of {facts.name}, a model of kind {facts.kind}, have "
        f"another formula than those of {', '.join(KINDS)}; set tricks.fused_blocks=false"
    )


def fuses(recipe: Recipe) -> bool:
    """Tell whether a recipe's blocks are fused."""
    return bool(recipe.tricks.fused_blocks) and recipe.tricks.peft in ("lora", "prompt_tuning")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill a norm's input as it is, and no activated gate; less is moved between products, by fewer kernels."""
    if not fuses(recipe):
        return step
    rule = functools.partial(fused_operations.without_activated_gate, rule=step.learning_operations)
    return replace(step, learning_operations=rule, norm_bytes=fused_operations.norm_bytes, fused_blocks=True)
