r"""Train the head only: everything below it is a fixed feature extractor.

Saves    gradients and optimizer states of all but V x D weights, and every block's activations  [bytes]
Costs    one fp32 copy of the head, untied from the embedding: 4 V D bytes
Claim    reparametrised: identical to the base at step 0; only the last matrix moves
Needs    nothing
Breaks   tasks that need new features: only a linear layer on the old ones is learnt
Sources  Yosinski et al. 2014, arXiv:1411.1792, sec. 2 (frozen features, a new last layer)
Ours     a fixed model below, a trained matrix above; peft keeps the copy and saves it like an adapter

Shapes: features (B, T, D), head (V, D).
"""

import torch
import torch.nn.functional as F
from torch import nn

REFERENCE = ("HeadOnly.forward",)
PLAIN = """
from torch import nn
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32").requires_grad_(
    False
)
model.lm_head.weight = nn.Parameter(
    model.lm_head.weight.detach().clone()
)  # untied, and trained
"""


class HeadOnly(nn.Module):
    """A trained copy of the head over frozen features.

    Args:
        features: the model below the head; it is frozen here.
        head_VD: the head's matrix, shape (V, D). It is copied, because the embedding may be the same matrix: training
            the head must not change the features.
    """

    def __init__(self, features: nn.Module, head_VD: torch.Tensor):
        super().__init__()
        self.features = features.requires_grad_(False)
        self.head_VD = nn.Parameter(head_VD.detach().clone().float())

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        """Compute logits, shape (B, T, V). Blocks save no activations, because no gradient goes below the head."""
        return F.linear(self.features(*arguments).float(), self.head_VD)
