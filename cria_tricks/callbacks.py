"""What the trainer does between steps: measure them, look at their gradients, end well on Ctrl-C."""

import os
import signal
import threading
import time
from typing import Any

import torch
from transformers import TrainerCallback

from cria_tricks.data.tokens import IGNORED
from cria_tricks.errors import Diverged

SKIPS_IN_A_ROW = 10
"""From its first scale, 65536, the loss scaler needs a few halvings to find the right one; ten are no search."""


class StepMeter(TrainerCallback):
    """Counts one optimizer step's tokens, seconds and bytes, and looks at its gradients."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.tokens: list[torch.Tensor] = []
        self.measured: dict[str, Any] = {}
        self.skipped_in_a_row = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.tokens = []
        self.trainer.meter.lap()
        self.began = time.perf_counter()

    def count(self, inputs: dict[str, torch.Tensor]) -> None:
        self.tokens.append(torch.stack([inputs["attention_mask"].sum(), (inputs["labels"][:, 1:] != IGNORED).sum()]))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.trainer.accelerator.scaler is not None:
            return  # the scaler looks itself, and skips the step
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trainer.model.parameters() if p.grad is not None])
        if not torch.isfinite(norm):
            raise Diverged(
                f"the gradients are not finite at step {state.global_step + 1}; stopped before the optimizer "
                "touched any weight. Try a lower train.learning_rate"
            )

    def on_step_end(self, args, state, control, **kwargs):
        tokens, trained = torch.stack(self.tokens).sum(0).tolist()  # waits for the GPU
        self.measured = {
            "step_seconds": time.perf_counter() - self.began,
            "tokens": tokens,
            "trained_tokens": trained,
            "peak_bytes": self.trainer.meter.lap(),
            "skipped": int(self.trainer.accelerator.optimizer_step_was_skipped),
        }
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.measured["skipped"] else 0
        nothing_trained = self.skipped_in_a_row == state.global_step == state.max_steps
        if self.skipped_in_a_row == SKIPS_IN_A_ROW or nothing_trained:
            raise Diverged(
                f"the loss scaler skipped {self.skipped_in_a_row} steps in a row, up to step {state.global_step}: the "
                "fp16 gradients stay infinite or NaN at any scale. Try tricks.precision=bf16 or fp32"
            )

    def take(self) -> dict[str, Any]:
        return self.measured


class StopOnSignal(TrainerCallback):
    """Ctrl-C ends the run after the current optimizer step, with a checkpoint; a second one at once."""

    requested = False

    def __enter__(self) -> None:
        self.before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are the caller's business
            signal.signal(signal.SIGINT, self._request)

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self.before)
        # Not print(): a signal may come while the progress bar is printing.
        os.write(2, b"\nstopping after this step, to save it; Ctrl-C again stops at once\n")

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.before)

    def on_step_end(self, args, state, control, **kwargs):
        if self.requested:
            control.should_save = control.should_training_stop = True
