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
from typing import Any

import torch
from torch import nn

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
