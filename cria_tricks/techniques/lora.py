r"""LoRA: freeze W, learn a product of two thin matrices beside it.

Saves    gradients and optimizer states of all but r (D_in + D_out) weights a matrix [bytes]
Costs    two more thin products for every adapted matrix, but one wide product less, because a frozen W needs no
         gradient. DoRA also computes B A itself and the norms of W + B A, every time. LoftQ: before the first step,
         for one matrix after the other, its rounding error in fp32 and an eigendecomposition of its shorter side
Claim    reparametrised: identical to the base at step 0 (DoRA: but for a rounding; LoftQ: nearer to the base before it
         was quantised); afterwards W + s B A, s = alpha / r (rsLoRA: alpha / sqrt(r))
Needs    tricks.peft, so head, prompt_tuning and side_network are excluded; composes with every other technique
Breaks   a learning rate meant for full fine-tuning (use about ten times it)
Sources  Hu et al. 2021, arXiv:2106.09685, sec. 4.1 (B = 0 at the start, scaling alpha / r); Kalajdzievski 2023,
         arXiv:2312.03732, sec. 3 (rsLoRA); Liu et al. 2024, arXiv:2402.09353, sec. 4.1 and 4.3 (DoRA); Li et al. 2023,
         arXiv:2310.08659, sec. 3 (LoftQ)
Ours     one adapted linear layer, with DoRA, the merge, and LoftQ's start. peft wraps all those of a model, also 4-bit
         ones, and saves the adapters

Shapes: A (r, D_in), B (D_out, r), both fp32, also over a 4-bit W (D_out, D_in); DoRA's magnitudes (D_out,).
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

REFERENCE = ("LoraLinear.forward", "LoraLinear.merged", "start_of")
PLAIN = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
# base: a hub id, such as "unsloth/Llama-3.2-1B-Instruct", or a folder
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
config = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets)
model = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base, dtype="float32"), config
)
"""


class LoraLinear(nn.Module):
    """A frozen linear layer with the product B A of two trained, thin matrices beside it.

    Args:
        base: the linear layer; it is frozen here.
        r: the rank of the product.
        alpha: the product's scale is alpha / r.
        rslora: whether the scale is alpha / sqrt(r) instead, so that large ranks learn as fast as small ones.
        dora: whether to learn the length of each output feature's weights apart from their direction.
    """

    def __init__(self, base: nn.Linear, r: int, alpha: float, rslora: bool = False, dora: bool = False):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))  # B A is zero, so the layer begins as its base
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as torch begins a linear layer
        self.scale = alpha / (math.sqrt(r) if rslora else r)
        self.magnitude = nn.Parameter(base.weight.norm(dim=1)) if dora else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x (..., D_in) by the adapted weight; the product B A itself is never made, but for DoRA's norms."""
        added = self.scale * F.linear(F.linear(x, self.A), self.B)
        if self.magnitude is None:
            return self.base(x) + added
        norm = self._adapted().norm(dim=1).detach()  # Liu et al., sec. 4.3: it follows the weight, without a gradient
        y = (F.linear(x, self.base.weight) + added) * (self.magnitude / norm)
        return y if self.base.bias is None else y + self.base.bias

    def merged(self) -> nn.Linear:
        """Return the adapted layer as one plain linear layer, for use after training."""
        weight = self._adapted()
        if self.magnitude is not None:
            weight = weight * (self.magnitude / weight.norm(dim=1))[:, None]
        linear = copy.deepcopy(self.base)
        linear.weight.data = weight.detach()
        return linear

    def _adapted(self) -> torch.Tensor:
        return self.base.weight + self.scale * self.B @ self.A


def start_of(error: torch.Tensor, r: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute LoftQ's start: the A and B for which s B A is the best approximation of a rounding error with rank r.

    What is left of the error has the length sqrt(s_1^2 + s_2^2 + ...), over its singular values without the r largest.

    Args:
        error: W minus what the quantised W unpacks to, fp32 of shape (D_out, D_in).
        r: the rank.
        scale: LoRA's s, by which the layer will multiply B A.

    Returns:
        A (k, D_in) and B (D_out, k), where k is r, or the shorter side of W if that is less.
    """
    wide = error if error.shape[0] <= error.shape[1] else error.T
    # The best approximation is the error's projection on its main directions. They are the eigenvectors of E E^T, which
    # is small, so this is faster than a singular value decomposition. eigh sorts them upwards.
    directions = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -r:]
    projected = directions.T @ wide
    # Each row is as long as its singular value. As in the paper both factors get the root of it, and here also of s.
    # A direction without an error keeps a length, because A and B that are both zero would never learn.
    roots = projected.norm(dim=1).sqrt().clamp(min=1e-4)
    left = directions * roots / math.sqrt(scale)
    right = projected / roots[:, None] / math.sqrt(scale)
    if wide is error:
        return right, left
    return left.T, right.T
