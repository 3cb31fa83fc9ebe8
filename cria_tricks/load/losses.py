"""The two ways from a batch to the sum of its trained tokens' losses, for the trainer and for the dry run."""

from collections.abc import Callable
from typing import Any

import torch

from cria_tricks.data.tokens import IGNORED
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]


def find(plan: Plan, autocast: Callable[[], Any]) -> Loss:
    """Pick the loss that the plan names.

    Args:
        plan: its ``loss`` slot decides.
        autocast: the context of the recipe's precision, for what is called below that.

    Returns:
        From a model and a batch to the sum, fp32, not divided by anything.
    """
    return LOSSES[plan.loss["kind"]](plan, autocast)


def _full(plan: Plan, autocast: Callable[[], Any]) -> Loss:
    # The model's own forward runs in autocast already.
    return full_loss_sum


def _chunked(plan: Plan, autocast: Callable[[], Any]) -> Loss:
    def loss_sum(model: Any, batch: Batch) -> torch.Tensor:
        # It calls modules below the model's forward, around which accelerate lays autocast.
        with autocast():
            return chunked_loss_sum(model, batch, plan.loss["tokens_per_chunk"])

    return loss_sum


LOSSES: dict[str, Callable[[Plan, Callable[[], Any]], Loss]] = {"full": _full, "chunked": _chunked}
"""What a ``kind`` in ``Plan.loss`` means."""


class LossSum(torch.nn.Module):
    """A model and its loss as one module, from a batch to a number: what strategies for several processes lay hold of.

    The chunked loss calls the model's inside past its own ``forward``, so a wrapper around the model would not see it.

    Args:
        model: what is trained.
        loss_sum: from the model and a batch to the sum.
    """

    def __init__(self, model: torch.nn.Module, loss_sum: Loss):
        super().__init__()
        self.model = model
        self.loss_sum = loss_sum

    def forward(self, batch: Batch) -> torch.Tensor:
        """The batch's losses, summed over its trained tokens."""
        return self.loss_sum(self.model, batch)


def full_loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """Of all logits at once, as transformers computes it."""
    # It divides its summed loss by num_items_in_batch: 1 leaves the sum.
    return model(**batch, num_items_in_batch=1).loss.float()


def chunked_loss_sum(model: Any, batch: Batch, tokens_per_chunk: int) -> torch.Tensor:
    """Of the logits of some trained tokens at a time.

    Args:
        model: a causal language model, or peft's wrapper of one.
        batch: with ``labels``, or, for who knows them already, with ``trained``: places (row, column) of the trained
            tokens' predecessors and their labels, three tensors of shape (N,).
        tokens_per_chunk: logits that are alive at once.
    """
    causal_lm = model
    if hasattr(model, "get_base_model"):
        causal_lm = model.get_base_model()
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "trained")}
    hidden_BTD = causal_lm.base_model(**inputs).last_hidden_state  # all but the head
    if "trained" in batch:
        row_N, column_N, label_N = batch["trained"]
    else:
        row_N, column_N, label_N = trained_places(batch["labels"])
    head_VD = causal_lm.get_output_embeddings().weight
    hidden_ND = hidden_BTD.to(head_VD.device)[row_N, column_N]  # with blocks on several cards it is elsewhere
    return chunked_cross_entropy(hidden_ND, head_VD, label_N, tokens_per_chunk)


def trained_places(labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the hidden states are that predict trained tokens: t predicts t + 1.

    Returns:
        Rows, columns and labels, each of shape (N,), int64.
    """
    row_N, column_N = (labels_BT[:, 1:] != IGNORED).nonzero(as_tuple=True)
    return row_N, column_N, labels_BT[row_N, column_N + 1]
