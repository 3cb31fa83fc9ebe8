"""The shared trainer for streamed blocks: a window's micro-batches go through each block together."""

import contextlib
import functools
from collections.abc import Iterator

import torch

from cria_tricks.hardware.attention_kernels import WatchAttention
from cria_tricks.load.model import blocks_of
from cria_tricks.trainer.shared import SharedTrainer
from cria_tricks.tricks.layer_by_layer import one_pass


class OnePassTrainer(SharedTrainer):
    """Compute the losses and gradients of a window when its first micro-batch comes, and give the losses one by one.

    transformers asks for a loss for each micro-batch, so the others wait in ``losses``.
    """

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Return a window's micro-batches, and its trained tokens; remember the micro-batches."""
        self.window, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.losses: list[torch.Tensor] = []
        return self.window, tokens

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Take the step of one micro-batch; the first one runs the whole window, whose bytes are then counted."""
        if self.losses:
            return super().training_step(model, inputs, num_items_in_batch)
        self._look_at_the_first_batch(inputs)
        with self.step.watching(*self.window):
            self.losses = self._of_window(model, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)

    def forward_and_backward(self, model, inputs, num_items_in_batch):
        """Return the loss of the next micro-batch, which is computed already."""
        return self.losses.pop(0)

    def _of_window(self, model: torch.nn.Module, trained_tokens: torch.Tensor) -> list[torch.Tensor]:
        model.train()
        watch = WatchAttention()
        known = self.attention_kernel

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with self.contexts(), contextlib.nullcontext() if known else watch:
                yield

        runs = []
        for micro_batch in self.window:
            inputs = self._prepare_inputs(micro_batch)
            runs.append(functools.partial(self.compute_loss, model, inputs, num_items_in_batch=trained_tokens))
        losses = one_pass(blocks_of(self.model), runs, self.accelerator.backward, around)
        self.attention_kernel = known or watch.kernel  # compute_loss has seen no block run
        return losses
