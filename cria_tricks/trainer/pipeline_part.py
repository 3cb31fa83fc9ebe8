"""What a stage has: its blocks of a model of transformers, and its rows of an optimizer step."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.losses import trained_places
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.shared import CONTEXTS
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Models whose hidden states go from block to block as they are, and whose head is one product. (Gemma scales its
embeddings, which some versions of transformers would do again in every stage; Gemma 2 caps what its head gives.)"""


class Part(nn.Module):
    """What one stage computes of a model. The rest of the model is emptied, in place.

    The model's own forward pass runs, with its mask and rotary angles; blocks of other stages hand on what they are
    given. So every parameter keeps its name, and the adapter is put together again by names. A head that is tied to the
    embedding is whole in the last stage, and the embedding in the first: both are frozen.

    Args:
        model: a ``PeftModel`` with LoRA, of one of :data:`KINDS`, whole.
        plan: by which it was loaded.
        blocks: this stage's.

    Attributes:
        first: whether token ids go in.
        last: whether it has the head.
    """

    def __init__(self, model: Any, plan: Plan, blocks: range):
        super().__init__()
        self.model, self.plan, self.causal_lm = model, plan, model.get_base_model()
        backbone, self.head = self.causal_lm.base_model, self.causal_lm.get_output_embeddings()
        self.first, self.last = blocks.start == 0, blocks.stop == len(backbone.layers)
        own = list(backbone.layers[blocks.start : blocks.stop])
        own += [self.causal_lm.get_input_embeddings()] if self.first else []
        own += [backbone.norm, self.head] if self.last else []
        for module in (*backbone.layers, backbone.norm):
            if module not in own:
                module.forward = _hand_on
        _empty(model, {id(parameter) for module in own for parameter in module.parameters()})
        if plan.training.get("gradient_checkpointing"):
            switch_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            switch_on(plan.training["gradient_checkpointing_kwargs"])  # its name since transformers 5.2x comes first

    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) or hidden states (B, T, D) -> hidden states; the last stage's logits for the full loss."""
        inputs = {"input_ids" if self.first else "inputs_embeds": x}
        with self._precision_and_contexts():
            hidden_BTD = self.causal_lm.base_model(**inputs, **more).last_hidden_state
            return self.head(hidden_BTD) if self.last and self.plan.loss["kind"] == "full" else hidden_BTD

    def loss_sum(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """The losses of a micro-batch's trained tokens, from what the last stage put out; fp32."""
        with self._precision_and_contexts():
            if self.plan.loss["kind"] == "full":
                logits, labels = output[:, :-1].float().flatten(0, 1), labels_BT[:, 1:].flatten()
                return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            row_N, column_N, label_N = trained_places(labels_BT)
            hidden_ND, chunk = output[row_N, column_N], self.plan.loss["tokens_per_chunk"]
            return chunked_cross_entropy(hidden_ND, self.head.weight, label_N, chunk)

    @contextlib.contextmanager
    def _precision_and_contexts(self) -> Iterator[None]:
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}
        with contextlib.ExitStack() as contexts:
            for name in half.keys() & self.plan.training.keys():
                contexts.enter_context(torch.autocast(self.plan.device.kind, half[name]))
            for name in self.plan.step_context:
                contexts.enter_context(CONTEXTS[name](self.model))
            yield


def _hand_on(hidden_BTD: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_BTD


def _empty(model: nn.Module, own: set[int]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) not in own:
                module._parameters[name] = None  # as a bias that is none; with packed weights go their scales


@dataclass(frozen=True)
class Window:
    """One pipeline's rows of an optimizer step, all of one length.

    Attributes:
        inputs: ``input_ids``, and ``position_ids`` of packed rows; shape (k B, T).
        labels: the same shape.
        trained: tokens that make a loss in the whole step, the other pipelines' included.
        tokens: real ones in the whole step.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    trained: int
    tokens: int


def cut_windows(
    rows: Sequence[dict[str, list[int]]],
    length: int,
    batch_size: int,
    micro_batches: int,
    pad_id: int,
    share: int = 0,
    shares: int = 1,
) -> Iterator[Window]:
    """Cut rows into optimizer steps, and take from each the micro-batches of one pipeline.

    torch's stages keep the shapes of their first step. So all rows get one length, and the last window is filled up
    with rows in which nothing is trained. There is no attention mask: no token sees the padding, which is to its right.

    Args:
        rows: in the order of the epoch.
        length: T, at least the longest row's.
        batch_size: B, rows of a micro-batch.
        micro_batches: k of a step, of all pipelines together; a multiple of ``shares``.
        pad_id: token id that fills up.
        share: this pipeline's number: it takes the micro-batches share, share + shares, ...
        shares: how many pipelines there are.
    """
    fill = {"input_ids": pad_id, "labels": IGNORED, "position_ids": 0}
    for start in range(0, len(rows), batch_size * micro_batches):
        window = rows[start : start + batch_size * micro_batches]
        made = {}
        for name in rows[0]:
            values = torch.full((micro_batches * batch_size, length), fill[name])
            for index, row in enumerate(window):
                values[index, : len(row[name])] = torch.tensor(row[name])
            made[name] = values.unflatten(0, (micro_batches, batch_size))[share::shares].flatten(0, 1)
        trained = sum(label != IGNORED for row in window for label in row["labels"][1:])
        tokens = sum(len(row["input_ids"]) for row in window)
        yield Window(made, made.pop("labels"), trained, tokens)
