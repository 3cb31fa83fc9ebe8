r"""Optimizer in the backward pass: each weight takes its step when its gradient arrives, and the gradient is freed.

Saves    gradients: 4 bytes for each trained weight -> the gradient of the largest tensor. An embedding that is also the
         head needs up to three tensors of its size for a moment: the gradients of both uses, and their sum  [bytes]
Costs    the norm of all gradients is known only when every weight has taken its step, so it can be logged, but it
         cannot limit the step. Before each weight's step the CPU waits for the GPU, to see that its gradient is finite
Claim    exact without clipping: the same bits as the plain step with train.max_grad_norm=0, except in an fp16 step that
         overflows. clip is not the usual clipping: train.max_grad_norm limits the norm of each weight's gradient
Needs    gradient_accumulation=1, one process, and train.max_grad_norm=0 or the value clip
Breaks   whatever must see all gradients before the first step. Gradient accumulation and several processes are
         refused. A gradient that is not finite ends the steps of its backward pass, but the weights nearer to the loss
         (the head and the last blocks) have taken theirs. Then fp16's loss scaler counts the step as skipped and halves
         the scale, and in fp32 and bf16 the run ends. With LoRA there is little to save
Sources  Lv et al. 2023, arXiv:2306.09782 (LOMO), sec. 3; the PyTorch tutorial "How to save memory by fusing the
         optimizer step into the backward pass"; torchtune's ``optimizer_in_bwd``
Ours     one optimizer for all weights, as in a plain run, so either run can resume the other's checkpoint. The tutorial
         and torchtune make one optimizer for each weight. LOMO is stochastic gradient descent, and finds the norm of
         all gradients by a second backward pass

Shapes: a gradient is as large as its weight, and is freed after its step.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

REFERENCE = ("StepInBackward.__init__", "StepInBackward._step")
PLAIN = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
optimizers = {
    weight: torch.optim.AdamW([weight], lr=2e-5, fused=True)
    for weight in model.parameters()
}


def step(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(step)
ids = torch.arange(3, 19)[None]
model(ids, labels=ids).loss.backward()  # and there is no optimizer.step()
"""


class Scaler(torch.amp.GradScaler):
    """fp16's loss scaler for gradients that are gone when the optimizer's turn comes.

    ``GradScaler`` would look for overflows in the gradients then. Here :class:`StepInBackward` has looked at each of
    them when it arrived, and says in ``overflowed`` what it found.
    """

    overflowed = False

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found_inf.fill_(float(self.overflowed))
        self.overflowed = False
        return {found_inf.device: found_inf}


class StepInBackward:
    """Let each trained weight take its optimizer step when its gradient arrives, and free the gradient.

    When a gradient arrives, all others are freed already or not there yet. So ``optimizer.step()``, which leaves out
    weights without a gradient, updates this weight alone. After the backward pass ``optimizer.step()`` has nothing
    left to update. Keep a reference to this object: without it the hooks do nothing.

    Args:
        model: its trained weights take steps; a weight that is used twice takes one, after both gradients are added.
        optimizer: of all these weights.
        limit: the largest norm of one weight's gradient; a longer gradient is clipped to it.
        scaler: the loss scaler, if the precision is fp16.
        finite: tells whether a norm is finite. A dry run gives a function of its own, because its norms have no value.

    Attributes:
        norms: the norms of the gradients that have arrived since the last call of :meth:`norm`, before clipping.
        steps: how many weights have taken a step since then.
        stopped: whether one of these gradients was not finite. From it on no weight takes a step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        limit: float = math.inf,
        scaler: torch.amp.GradScaler | None = None,
        finite: Callable[[torch.Tensor], bool] = lambda norm: bool(torch.isfinite(norm)),
    ):
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = optimizer
        self.limit = limit
        self.scaler = scaler
        self.finite = finite
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        self.steps = 0
        self.stopped = False
        # Weak, because Python's garbage collector does not look into these hooks: a model that refers to itself through
        # one would never be freed.
        step = weakref.WeakMethod(self._step)
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(functools.partial(_call, step))

    def _step(self, weight: Any) -> None:
        """Take the step of one weight, whose gradient has just arrived."""
        if self.scaler and self.scaler.is_enabled():
            weight.grad.mul_(1 / self.scaler.get_scale())  # exact, because the scale is a power of two
        norm = torch.linalg.vector_norm(weight.grad)
        self.norms[weight] = norm
        self.stopped = self.stopped or not self.finite(norm)
        if not self.stopped:
            if self.limit < math.inf:
                weight.grad.mul_((self.limit / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_ does it
            self.optimizer.step()
            self.steps += 1
        elif isinstance(self.scaler, Scaler):
            self.scaler.overflowed = True
        weight.grad = None

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients together, for the history, and begin anew."""
        # In the order of the weights, not of arrival, so that it is rounded as in a plain step.
        found = [self.norms[weight] for weight in self.weights if weight in self.norms]
        self.norms.clear()
        self.steps = 0
        self.stopped = False
        return torch.linalg.vector_norm(torch.stack(found))


def _call(step: Callable[[], Callable[[Any], None] | None], weight: torch.Tensor) -> None:
    """Call a method with a weight, if its object is still there."""
    if found := step():
        found(weight)
