r"""Gradient accumulation: k small batches, one optimizer step.

Saves    activations and logits: those of k B rows -> those of B rows                [bytes]
Costs    k smaller, less busy forward and backward passes instead of one; as many FLOPs, and with B = 1 no padding. One
         gradient that waits between micro-batches: 4 bytes a trained weight
Claim    exact, also with ragged lengths and a partial last window, when the loss is divided by the
         window's trained tokens and not averaged micro-batch by micro-batch
Needs    nothing; composes with every other trick
Breaks   batch statistics (there are none here); a mean of means (transformers 34191): on the 107 Kwanzaa rows,
         8 a step, it gives 14 % of the gradient to the wrong rows, in the worst window 21 %
Sources  Huang et al. 2018, arXiv:1811.06965, sec. 2.2 (micro-batches); transformers PR 34198
Ours     15 lines: a window's sum over a window's tokens. The switch leaves the window to transformers' Trainer,
         with a loss that sums

Shapes: k micro-batches of (B, T).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.work import Work
from cria_tricks.data.tokens import IGNORED
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("gradient_accumulation=8",)
CLAIM = "exact"
LESSON = "02_gradient_accumulation"
REFERENCE = ("accumulated",)
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments("plain", max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=8)
"""

Batch = dict[str, torch.Tensor]


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Count the labels that make a loss: the token at t is predicted from those before it, so the first never does."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def accumulated(loss_sum: Callable[[Batch], torch.Tensor], micro_batches: Sequence[Batch], k: int) -> Iterator[float]:
    """Yield once per optimizer step, when ``.grad`` holds the gradient of k micro-batches at once::

        for loss in accumulated(loss_sum, micro_batches, k=8):
            optimizer.step()
            optimizer.zero_grad()

    Sec. 2.2: all micro-batches see the same weights; their gradients are added up, and applied at the end.

    Args:
        loss_sum: from a micro-batch to the sum, not the mean, of its trained tokens' losses.
        micro_batches: with ``labels`` of shape (B, T), ``IGNORED`` where nothing is trained; B and T may differ.
        k: micro-batches per step. The last window is shorter when k does not divide their number.

    Yields:
        The window's mean loss per trained token: what one large batch of all its rows would have.
    """
    for start in range(0, len(micro_batches), k):
        window = micro_batches[start : start + k]
        tokens = sum(trained_tokens(batch) for batch in window)  # of the whole window, before its first loss
        loss = 0.0
        for batch in window:
            share = loss_sum(batch) / tokens
            share.backward()  # adds to .grad, and frees this micro-batch's activations before the next one's come
            loss += share.item()
        yield loss


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Tell the trainer how many micro-batches make a step."""
    return plan.with_("training", gradient_accumulation_steps=recipe.tricks.gradient_accumulation)


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """From the second micro-batch on the gradients of the first ones wait: 4 bytes for each trained weight."""
    # That they wait also means that a new gradient is added to an old one. Where that opens something is said beside
    # each product and at the embedding (`accumulates` of the facts), because it is another tensor every time.
    if recipe.tricks.gradient_accumulation > 1:
        return replace(memory, waiting_gradient_bytes=FP32 * memory.trained_weights)
    return memory


ACCUMULATE = 12
"""Bytes moved for one trained weight when a micro-batch's gradient is added to those before: two read, one written."""


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """All of it k times, but for the optimizer's step; and k - 1 times a gradient is added to the sum."""
    k = recipe.tricks.gradient_accumulation
    return replace(work, micro_batches=k, gradient_bytes=work.gradient_bytes + ACCUMULATE * (k - 1))
