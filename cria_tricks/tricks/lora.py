r"""LoRA: freeze W, learn a product of two thin matrices beside it.

Saves    gradients and optimizer states of all but r (D_in + D_out) weights a matrix [bytes]
Costs    two more thin products for every adapted matrix, but one wide product less, because a frozen W needs no
         gradient. DoRA also computes B A itself and the norms of W + B A, every time. LoftQ: before the first step,
         for one matrix after the other, its rounding error in fp32 and an eigendecomposition of its shorter side
Claim    reparametrised: identical to the base at step 0 (DoRA: but for a rounding; LoftQ: nearer to the base before it
         was quantised); afterwards W + s B A, s = alpha / r (rsLoRA: alpha / sqrt(r))
Needs    tricks.peft, so head, prompt_tuning and side_network are excluded; composes with every other trick
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
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Lora
from cria_tricks.step_plan import Plan

ALL_LINEAR = "all-linear"
"""peft's name for all linear layers but the head."""
SWITCHES = ("peft=lora",)
CLAIM = "reparametrised"
LESSON = "lora"
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


def trained_weights(widths: Iterable[tuple[int, int]], r: int, dora: bool = False) -> int:
    """Count the weights that LoRA trains.

    Args:
        widths: (D_in, D_out) of every adapted matrix.
        r: the rank.
        dora: whether a magnitude per output feature is trained too.
    """
    return sum(r * (d_in + d_out) + d_out * dora for d_in, d_out in widths)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask peft for adapters on the named linears."""
    if recipe.tricks.peft != "lora":
        if recipe.lora.init != "default" or recipe.lora.continue_from:
            field = "continue_from" if recipe.lora.continue_from else "init"
            raise BadInput(f"lora.{field} with tricks.peft={recipe.tricks.peft}: it is for LoRA; set tricks.peft=lora")
        if recipe.lora != Lora():
            plan = plan.warn(f"the lora.* settings have no effect: tricks.peft is {recipe.tricks.peft}")
        return plan
    lora = recipe.lora
    if ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
        raise BadInput(
            f"lora.target_modules={','.join(lora.target_modules)}: {ALL_LINEAR} means every linear but the head; leave "
            "the other names out"
        )
    plan = plan.with_(
        "peft",
        kind="lora",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=list(dict.fromkeys(lora.target_modules)),
    ).then("add_adapter")
    if lora.init == "default":
        start = lora.continue_from
        return plan.with_("peft", continue_from=start).then("continue_from_adapter") if start else plan
    if lora.continue_from:
        raise BadInput("lora.init=loftq: lora.continue_from says where B A starts; set lora.init=default")
    if recipe.tricks.quantization == "none":
        raise BadInput(
            "lora.init=loftq with tricks.quantization=none: it starts at the rounding error of quantised weights, and "
            "there is none; set tricks.quantization=nf4 or lora.init=default"
        )
    if lora.dora:
        raise BadInput("lora.init=loftq with lora.dora=true: peft sets DoRA's magnitudes first; set lora.dora=false")
    return plan.then("start_at_rounding_error")


def refuse_unestimated(recipe: Recipe, shape: Shape) -> None:
    """Refuse targets that peft can train, but whose bytes the formulas do not know.

    Raises:
        BadInput: naming the first one, and targets that have an estimate.
    """
    if recipe.tricks.peft != "lora":
        return
    known = ",".join(shape.packable)
    if ALL_LINEAR in recipe.lora.target_modules and shape.experts > 1:
        raise BadInput(
            f"lora.target_modules={ALL_LINEAR}: no estimate for {shape.name}, all of whose experts peft adapts in one "
            f"tensor; an estimate is there for lora.target_modules={known}"
        )
    for name in recipe.lora.target_modules:
        if name != ALL_LINEAR and name not in shape.packable:
            raise BadInput(f"lora.target_modules: no estimate for {name}; an estimate is there for {known}")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill two thin fp32 matrices, and two thin products, for each adapted one; nothing else has a gradient.

    Without gradient checkpointing no gradient goes below the first adapter.
    """
    if recipe.tricks.peft != "lora":
        return step
    shape = step.shape
    lora = recipe.lora
    targets = tuple(shape.linears if ALL_LINEAR in lora.target_modules else dict.fromkeys(lora.target_modules))
    for name in targets:
        if name not in shape.linears:
            raise BadInput(f"lora.target_modules: no estimate for {name}; there are {', '.join(shape.linears)}")
    return replace(
        step,
        trains_all=False,
        trains_head=False,
        reaches_embedding=False,
        added=_trained_tensors(shape, lora, targets),
        adapted=targets,
        rank=lora.r,
        dora=lora.dora,
        dropout=lora.dropout > 0,
    )


def _trained_tensors(shape: Shape, lora: Lora, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """List the tensors that train beside matrices of a block: how many of each kind, and the elements of one."""
    found: list[tuple[int, int]] = []
    for name in names:
        d_in, d_out = shape.linears[name]
        many = shape.layers * shape.copies(name)
        found += [(many, lora.r * d_in), (many, lora.r * d_out)]  # A and B
        if lora.dora:
            found.append((many, d_out))  # the magnitudes
    return tuple(found)
