r"""Side network: a trained copy beside each of the last blocks, joined through a matrix of zeros.

Saves    gradients and optimizer states of all other blocks                          [bytes]
Costs    the copied blocks once more: their weights in fp32, their products and their activations
Claim    reparametrised: identical to the base at step 0, bit for bit; the frozen blocks stay what they are
Needs    nothing; copies of quantised blocks are unpacked to fp32, since codes cannot be trained
Breaks   small cards: one copied block of Llama-3.2-1B, with its joining matrix, trains 65 million weights, about six
         times as many as LoRA of rank 16 on all matrices of all blocks
Sources  Zhang et al. 2023, arXiv:2302.05543, sec. 3.1, eq. 2 (ControlNet). A language model has no second input, so of
         ControlNet's two zero layers only the one behind the copy is left
Ours     all of it; no library has it for language models

Shapes: a block from (B, T, D) to (B, T, D), its copy the same, and a joining matrix (D, D).
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.fused_operations import tiled
from cria_tricks.bill.operation import JOINED, Operation, stored_as_multiplied
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Side
from cria_tricks.step_plan import Plan

SWITCHES = ("peft=side_network",)
CLAIM = "reparametrised"
LESSON = "lora"
REFERENCE = ("SideBlock.forward",)
PLAIN = """
import copy
from torch import nn
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32").requires_grad_(
    False
)


def put_beside(block):
    beside = copy.deepcopy(block).requires_grad_(True)
    join = nn.Linear(model.config.hidden_size, model.config.hidden_size, bias=False)
    nn.init.zeros_(join.weight)
    block.beside, block.join = beside, join
    block.register_forward_hook(
        lambda _, x, named, y: y + join(beside(*x, **named)), with_kwargs=True
    )


for block in model.model.layers[-2:]:
    put_beside(block)
"""


class SideBlock(nn.Module):
    """A frozen block, and beside it a copy that learns: ``block(x) + join(copy(x))``.

    The join begins as zeros, so nothing is added at first, and no noise reaches the frozen blocks behind it. The join
    has a gradient from the first step on. The copy's gradient goes back through the join, so it is zero until an
    optimizer step has changed the join.

    Args:
        block: from (B, T, D) to (B, T, D); it is frozen here.
        beside: what learns; a deep copy of the block when left out.
        width: D.
    """

    def __init__(self, block: nn.Module, width: int, beside: nn.Module | None = None):
        super().__init__()
        self.block = block.requires_grad_(False)
        self.copy = (beside or copy.deepcopy(block)).requires_grad_(True)
        self.join = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.join.weight)

    def forward(self, x_BTD: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """Run both on the same input; further arguments (mask, positions) go to both."""
        y_BTD = self.block(x_BTD, *arguments, **named)
        return y_BTD + self.join(self.copy(x_BTD, *arguments, **named)).to(y_BTD.dtype)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Have the last blocks copied; ``load/model.py`` knows where a model keeps them."""
    if recipe.tricks.peft != "side_network":
        if recipe.side != Side():
            plan = plan.warn(f"the side.* settings have no effect: tricks.peft is {recipe.tricks.peft}")
        return plan
    return plan.with_("peft", kind="side_network", blocks=recipe.side.blocks).then("add_adapter")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill an fp32 copy and a joining matrix for each of the last blocks.

    Without gradient checkpointing the gradient stops at the first copy.
    """
    if recipe.tricks.peft != "side_network":
        return step
    shape = step.shape
    blocks = recipe.side.blocks
    if blocks > shape.layers:
        raise BadInput(
            f"side.blocks={blocks}: {shape.name} has {shape.layers} blocks; set side.blocks={shape.layers} or less"
        )
    a_block = [(blocks * shape.copies(name), d_in * d_out) for name, (d_in, d_out) in shape.linears.items()]
    added = (*a_block, (blocks, shape.block_other_weights), (blocks, shape.width**2))
    # bill/moments.py needs ``learns_beside``: it adds points of the step at which a frozen block runs backward beside
    # its copy, and it knows that the gradient stops at the first copy.
    return replace(
        step,
        trains_all=False,
        trains_head=False,
        reaches_embedding=False,
        added=added,
        learning_blocks=blocks,
        learns_beside=True,
        learning_operations=copy_and_join,
    )


def copy_and_join(step: Step) -> list[Operation]:
    """List the operations of the trained copy beside a frozen block, and of the matrix that joins the two."""
    width = step.shape.width
    a = step.compute_itemsize
    # The copy's weights are fp32. So the results of its norms are fp32, too, because a norm multiplies by its weight.
    beside = replace(
        step,
        trains_all=True,
        other_weight_itemsize=FP32,
        hidden_itemsize=FP32,
        product_itemsize=a,
        quantised=False,
        product_bytes=stored_as_multiplied,
    )
    # The backward pass of the copy runs before that of the frozen block, so the gradient of their sum waits meanwhile.
    waits = step.all_tokens * width * step.hidden_itemsize
    copied = []
    for operation in tiled(beside):
        keeps = dict(operation.keeps)
        for name in keeps:
            if name.endswith("normalised"):  # a norm normalises in the dtype of its input
                keeps[name] = keeps[name] * step.hidden_itemsize // FP32
        copied.append(replace(operation, keeps=keeps, backward=operation.backward + waits))
    joined = step.all_tokens * width * a
    # Autocast's copy of the joining matrix, if products compute in 16 bits.
    in_16_bits = width * width * a * (a < FP32)
    join = dict(zip(JOINED, (joined, in_16_bits), strict=True))
    # Backward, at most three tensors of this size: the sum's gradient, its cast to the compute dtype, and the gradient
    # of the join's input.
    return [*copied, Operation("join", join, forward=joined, backward=3 * joined, learns=width * width * FP32)]
