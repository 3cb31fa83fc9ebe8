r"""Mixed precision: multiply in 16 bits, keep what is trained in 32.

Saves    activations and frozen weights: 4 bytes -> 2 bytes an element               [bytes]
Costs    a 16-bit copy of each trained weight, which waits for the backward pass, if its block is not recomputed. Eager
         attention saves its probabilities in fp32 and in 16 bits. fp16: a loss scale, and now and then a skipped step.
         bf16: 8 significant bits, where fp16 has 11
Claim    approximate: products are rounded to 11 (fp16) or 8 (bf16) significant bits
Needs    fp16: any GPU. bf16: compute capability 8.0; a T4 says that it supports bf16, but emulates it slowly
Breaks   trained weights that are stored in fp16, because torch's GradScaler refuses them ("Attempting to unscale FP16
         gradients"); so adapters stay in fp32
Sources  Micikevicius et al. 2018, arXiv:1710.03740, sec. 3.1 (master weights), 3.2 (loss scaling)
Ours     a product in 16 bits, the dynamic loss scale, and a step on fp32 master weights. torch's autocast chooses the
         dtype operation by operation, and its GradScaler looks at all gradients in one kernel. We switch autocast's
         cache of cast weights off where whole matrices train: it would hold all copies until the forward pass ends

Shapes: none; every matrix product is concerned.
"""

from collections.abc import Iterable
from typing import Any

import torch

from cria_tricks.step_plan import Plan

REFERENCE = ("half_linear", "LossScale.step", "cast_without_cache")
PLAIN = """
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
# bf16 needs compute capability 8.0. A T4 has 7.5: there it is fp16=True.
arguments = TrainingArguments(
    "plain", max_steps=1, bf16=True, use_cpu=not torch.cuda.is_available()
)
"""


def half_linear(x: torch.Tensor, weight_OD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply in 16 bits by a weight that is kept in fp32.

    Args:
        x: shape (..., D_in).
        weight_OD: the master weight, fp32 of shape (D_out, D_in); it is cast here, at every use, and its gradient
            comes back in fp32.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        Shape (..., D_out), in ``dtype``.
    """
    return torch.nn.functional.linear(x.to(dtype), weight_OD.to(dtype))


class LossScale:
    """Keep the factor for the loss, so that small gradients stay above fp16's smallest number, 6e-8.

    The scale adjusts itself: it is halved after a step whose gradients overflowed, and doubled after so many steps
    without an overflow. It is a power of two, so it changes only the exponents of numbers, and rounds nothing.

    Args:
        scale: the first one.
        growth_interval: steps without an overflow after which it is doubled.

    Attributes:
        scale: what the loss is multiplied by.
        good: steps without an overflow since the scale last changed.
        skipped: steps that were skipped so far.
    """

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000):
        self.scale = scale
        self.growth_interval = growth_interval
        self.skipped = self.good = 0

    def step(self, optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> bool:
        """Undo the scale and update the weights, unless a gradient is infinite or NaN.

        Args:
            optimizer: of the master weights.
            weights: the weights of that optimizer, with the gradients of ``loss * scale``.

        Returns:
            Whether the step was taken.

        Raises:
            ValueError: if a gradient is in fp16: a division there would lose what the scale has saved.
        """
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("gradients in fp16 cannot be unscaled; keep what trains in fp32")
        for gradient in gradients:
            gradient.div_(self.scale)
        if not all(torch.isfinite(gradient).all() for gradient in gradients):
            self.scale = self.scale / 2
            self.good = 0
            self.skipped = self.skipped + 1
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.growth_interval:
            self.scale = self.scale * 2
            self.good = 0
        return True


def cast_without_cache(model: Any, plan: Plan | None = None) -> Any:
    """Switch autocast's cache off while the decoder of a model runs, unless it writes an answer.

    The cache keeps the 16-bit copy of each trained weight until the forward pass ends, in case the weight is used once
    more. A decoder uses each weight once, so the cache saves no cast, but holds the copies that a checkpointed block or
    an evaluation could free at once. Only a model that answers uses all weights again, for each new token.
    """
    before: list[bool] = []

    def off(_: Any, arguments: Any, named: dict[str, Any]) -> None:
        before.append(torch.is_autocast_cache_enabled())
        # Without earlier tokens there is no answer. They have the first name from transformers 5.24 on.
        if named.get("cache", named.get("past_key_values")) is None:
            torch.set_autocast_cache_enabled(False)

    def as_before(_: Any, arguments: Any, result: Any) -> None:
        torch.set_autocast_cache_enabled(before.pop())

    model.base_model.register_forward_pre_hook(off, with_kwargs=True)
    model.base_model.register_forward_hook(as_before, always_call=True)  # also after an error
    return model
