r"""Gradient accumulation: k small batches, one optimizer step.

Saves    activations and logits: those of k B rows -> those of B rows                [bytes]
Costs    time: k forward and backward passes on small batches keep a card less busy than one on a large batch. As many
         FLOPs, and with B = 1 no padding. The gradients stay between micro-batches: 4 bytes a trained weight
Claim    exact within rounding, also with ragged lengths and a partial last window, when the loss is divided by the
         window's trained tokens and not averaged micro-batch by micro-batch
Needs    optimizer_in_backward=false, which is refused beside it; composes with every other technique
Breaks   batch statistics (there are none here); a mean of the micro-batches' means (transformers 34191): on the 107
         Kwanzaa rows, 8 a step, it assigns 14 % of the gradient to the wrong examples, in the worst window 21 %
Sources  Huang et al. 2018, arXiv:1811.06965, sec. 2.2 (micro-batches); transformers PR 34198
Ours     15 lines: the sum of a window's losses, divided by the window's trained tokens. The switch leaves the window to
         transformers' Trainer, with a loss that sums

Shapes: k micro-batches of (B, T) make a window, that is, an optimizer step.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from cria_tricks.data.tokens import IGNORED

REFERENCE = ("accumulated",)
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments(
    "plain", max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=8
)
"""

Batch = dict[str, torch.Tensor]


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Count the labels that have a loss: all trained ones but a row's first, which no token before it predicts."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def accumulated(loss_sum: Callable[[Batch], torch.Tensor], micro_batches: Sequence[Batch], k: int) -> Iterator[float]:
    """Accumulate the gradients of k micro-batches in ``.grad``, and yield whenever the optimizer may take a step.

    Use it so::

        for loss in accumulated(loss_sum, micro_batches, k=8):
            optimizer.step()
            optimizer.zero_grad()

    Huang et al., sec. 2.2: all micro-batches see the same weights. Their gradients are added up and applied at the end.

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
