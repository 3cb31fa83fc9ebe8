"""Compute the loss of a batch, summed over its trained tokens, in one of two ways: all logits at once, or in chunks.

The trainer and the dry run use the same functions.

Shapes: B rows, T tokens, D hidden width, V vocabulary, N trained tokens of the batch.
"""

from collections.abc import Callable
from typing import Any

import torch

from cria_tricks.data.tokens import IGNORED
from cria_tricks.step_plan import Plan
from cria_tricks.techniques.chunked_loss import chunked_cross_entropy

Batch = dict[str, Any]
"""The tensors of a batch, by name; ``trained`` is a tuple of three (see :func:`chunked_loss_sum`)."""
Loss = Callable[[Any, Batch], torch.Tensor]
"""A function from a model and a batch to the summed loss."""


def find(plan: Plan, autocast: Callable[[], Any]) -> Loss:
    """Return the loss function that the plan names.

    Args:
        plan: its ``loss`` slot decides.
        autocast: makes the autocast context of the recipe's precision.

    Returns:
        A function from a model and a batch to the summed loss, fp32, not divided by anything.
    """
    if plan.loss["kind"] == "full":
        return full_loss_sum  # it calls the model's own forward, which runs in autocast already

    assert plan.loss["kind"] == "chunked", plan.loss

    def chunked(model: Any, batch: Batch) -> torch.Tensor:
        # Autocast is around the model's own forward (trainer/forward.py). The chunked loss calls modules below it.
        with autocast():
            return chunked_loss_sum(model, batch, plan.loss["tokens_per_chunk"])

    return chunked


class LossSum(torch.nn.Module):
    """A module that holds the model and maps a batch to its summed loss. Strategies such as ddp wrap it.

    A wrapper acts when its own ``forward`` is called: DDP then prepares to average the gradients, and FSDP gathers
    weights. The chunked loss calls modules inside the model, and not the model's ``forward``. So a wrapper around the
    model alone would miss these calls.

    Args:
        model: the model that is trained.
        loss_sum: a function from the model and a batch to the summed loss.
    """

    def __init__(self, model: torch.nn.Module, loss_sum: Loss):
        super().__init__()
        self.model = model
        self.loss_sum = loss_sum

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, summed over its trained tokens."""
        return self.loss_sum(self.model, batch)


def full_loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """Compute the summed loss from all logits at once, as transformers does."""
    # transformers divides the summed loss by num_items_in_batch, so 1 leaves the sum.
    return model(**batch, num_items_in_batch=1).loss.float()


def chunked_loss_sum(model: Any, batch: Batch, tokens_per_chunk: int) -> torch.Tensor:
    """Compute the summed loss in chunks, so that only the logits of some trained tokens are in memory at a time.

    Args:
        model: a causal language model, or peft's wrapper of one.
        batch: the model's inputs, and either ``labels`` or ``trained``, the three tensors that :func:`trained_places`
            finds from labels. (The dry run gives ``trained``, because its fake labels have no values.)
        tokens_per_chunk: number of tokens whose logits are in memory at the same time.
    """
    causal_lm = model
    # The base_model of peft's wrapper still has the head, so unwrap. LoRA's layers are inside the model, so they run.
    if hasattr(model, "get_base_model"):
        causal_lm = model.get_base_model()
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "trained")}
    hidden_BTD = causal_lm.base_model(**inputs).last_hidden_state  # the model without its head
    if "trained" in batch:
        row_N, column_N, label_N = batch["trained"]
    else:
        row_N, column_N, label_N = trained_places(batch["labels"])
    head_VD = causal_lm.get_output_embeddings().weight
    # If the blocks are on several GPUs, the last hidden states are not where the head is.
    hidden_ND = hidden_BTD.to(head_VD.device)[row_N, column_N]
    return chunked_cross_entropy(hidden_ND, head_VD, label_N, tokens_per_chunk)


def trained_places(labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the hidden states that predict trained tokens: the one at position t predicts token t + 1.

    Args:
        labels_BT: labels, shape (B, T), int64; ``IGNORED`` for tokens that are not trained.

    Returns:
        The row and the position t of each such hidden state, and the label of token t + 1; each of shape (N,), int64.
    """
    return places(labels_BT[:, 1:])


def places(following_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the same, as :func:`trained_places`, from the label of the token that follows each hidden state, (B, T)."""
    row_N, column_N = (following_BT != IGNORED).nonzero(as_tuple=True)
    return row_N, column_N, following_BT[row_N, column_N]
