"""Switch kept attention on, and bill it; ``techniques/keep_attention.py`` has the card and the code."""

import functools
from collections.abc import Callable
from dataclasses import replace

from cria_tricks.bill.operation import BlockTensors, WaitingBytes
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.models.shape import Facts
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact",
    lesson="gradient_checkpointing",
    switches=("keep_attention=true",),
    fields={
        "keep_attention": Field(
            "Memory",
            "Selective checkpointing: keep attention's output",
            search="exact",
            helps=lambda recipe: False,  # it buys time with memory
        )
    },
    needs={"keep_attention=true": "attention=sdpa expand_kv=true gradient_checkpointing=true"},
)
KEEP = "techniques.keep_attention.contexts"
"""What makes the two contexts of a checkpointed block."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for torch's selective contexts.

    Raises:
        BadInput: if no block is checkpointed, or attention is not one operation of torch.
    """
    tricks = recipe.tricks
    if not tricks.keep_attention or tricks.peft == "head":  # then checkpointing has no effect, and has said so
        return plan
    if not tricks.gradient_checkpointing:
        raise _refused("blocks keep everything without checkpointing; set tricks.gradient_checkpointing=true")
    if tricks.attention == "eager":
        raise _refused("eager attention is many operations, not one that can be kept; set tricks.attention=sdpa")
    if tricks.attention == "flash_attention_2":
        raise _refused("it keeps what torch's own kernels return; set tricks.attention=sdpa, the same algorithm")
    if tricks.compile:
        raise _refused("a compiled block chooses itself what it keeps; set tricks.compile=false")
    if recipe.parallel.strategy in ("tensor", "ddp_tensor"):
        raise _refused("the heads of a block are shared among processes; use parallel.strategy=ddp or fsdp")
    return plan.with_("checkpointing", keep_attention=KEEP, masked=recipe.train.batch_size > 1)


def _refused(why: str) -> BadInput:
    return BadInput(f"tricks.keep_attention=true: {why}")


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse to keep attention's output on a card whose attention is no single kernel for this model."""
    if not plan.checkpointing.get("keep_attention") or plan.device.kind != "cuda":
        return  # a CPU's flash kernel takes everything
    dtype = next((DTYPE[name] for name in ("fp16", "bf16") if plan.training.get(name)), "float32")
    masked = plan.checkpointing["masked"]
    # Our own attention functions repeat shared key heads, and transformers does so for rows with a mask.
    grouped = plan.model["attn_implementation"] == "sdpa" and facts.heads != facts.kv_heads and not masked
    if kernel_for(plan.device, dtype, masked=masked, grouped=grouped) != "math":
        return
    instead = "set tricks.expand_kv=true" if grouped and dtype != "bfloat16" else "set tricks.precision=fp16"
    raise BadInput(
        f"tricks.keep_attention=true: {plan.device.name} has no fused attention kernel for {facts.name} with these "
        f"settings; {instead}, or tricks.keep_attention=false"
    )


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill attention's output and its log-sum-exp in each checkpointed block, on the card also with offload.

    Attention is left out of what checkpointing repeats.
    """
    if not recipe.tricks.keep_attention or not step.checkpointed:
        return step
    # bill/block.py needs the flag, because while a block is recomputed, attention's output is there from the beginning.
    rule = functools.partial(attention_waits, step.block_waits)
    return replace(step, keeps_attention=True, block_waits=rule)


def attention_waits(waits: Callable[[BlockTensors], WaitingBytes], block: BlockTensors) -> WaitingBytes:
    """Count what waits in each block: what waits without this switch, and what attention's kernel returned.

    Args:
        waits: the rule without this switch.
        block: what one block leaves for its backward pass.
    """
    found = waits(block)
    if not block.recomputed:
        return found
    return replace(found, each=found.each + block.attended, why=f"{found.why} and its attention")
