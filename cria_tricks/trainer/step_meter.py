"""Measure each optimizer step: its tokens, its seconds and its peak bytes; and give up a run that takes no step."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerState

from cria_tricks.common.errors import Diverged
from cria_tricks.data.batches import real_tokens, trained_tokens
from cria_tricks.measure.memory import Meter
from cria_tricks.processes.world import World

Batch = dict[str, torch.Tensor]

SKIPS_IN_A_ROW = 10
"""After this many skipped steps in a row the run ends.

The loss scaler begins at 65536 and halves its scale at each overflow. It needs a few halvings to find a scale that
fits. But ten halvings of 65536 lead to 64. With that scale only gradients that are infinite, NaN or above 1,000
overflow in fp16 (its largest number is 65,504). We give such a run up.
"""


class StepMeter:
    """Measure the tokens, the seconds and the peak bytes of each optimizer step.

    On a CPU, counting bytes slows a step down, so not every micro-batch is watched. Until the optimizer has taken its
    first step, which creates its states, all of them are; after that, only those that can set a new peak.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, meter: Meter, world: World):
        self.model = model
        self.optimizer = optimizer
        self.meter = meter
        self.world = world
        self.tokens: list[torch.Tensor] = []  # of each micro-batch so far: real tokens, trained tokens
        self.first = True  # until the optimizer has taken a step that was not skipped
        self.watched = False  # whether the bytes of this step were counted
        self.skipped_in_a_row = 0

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """Measure the step that is taken inside ``with``."""
        self.tokens = []
        self.meter.lap()
        self.watched = self.first
        with self.meter.watch() if self.first else contextlib.nullcontext():
            self.began = time.perf_counter()
            yield

    def count(self, inputs: Batch) -> None:
        """Count the tokens of a micro-batch that has run."""
        trained = trained_tokens(inputs)
        # A micro-batch without a trained token is the filler row of training.py, whose tokens do not count.
        self.tokens.append(torch.stack([real_tokens(inputs) * (trained > 0), trained]))

    @contextlib.contextmanager
    def watching(self, *micro_batches: Batch) -> Iterator[None]:
        """Count the bytes of the micro-batches that run inside ``with``, if they can set a new peak."""
        meter = self.meter
        if self.first or not meter.counts:
            yield
            return
        later = bool(self.tokens)  # not the first micro-batch of its step, so gradients exist already
        tokens, trained = map(sum, zip(*map(sizes, micro_batches), strict=True))
        if not meter.may_set_a_peak("train", tokens, trained, later):
            yield
            return
        self.watched = True
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        states = (t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        batches = (tensor for batch in micro_batches for tensor in batch.values())
        meter.track((*gradients, *states, *batches))  # they were made while nothing was counted
        with meter.watch():
            yield

    def measured(self, state: TrainerState, *, skipped: bool) -> dict[str, Any]:
        """Return what was measured in the step, for its entry of the history; called at its end, inside ``with``.

        Raises:
            Diverged: if the loss scaler has skipped too many steps in a row.
        """
        world = self.world
        meter = self.meter
        # tolist() waits for the GPU. The time is taken after it, so it includes all of the GPU's work.
        tokens, trained = world.sum(torch.stack(self.tokens).sum(0)).tolist()
        seconds, watched = world.max_over_ranks(time.perf_counter() - self.began, self.watched)
        found = {"step_seconds": seconds, "tokens": tokens, "trained_tokens": trained, "skipped": int(skipped)}
        [peak] = map(int, world.max_over_ranks(meter.lap()))
        if watched or not meter.counts:
            found["peak_bytes"] = peak
        if self.first and not skipped:  # from now on the optimizer states exist
            self.first = False
            meter.forget_sizes()  # beside them, a batch as large as an earlier one can set a new peak
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self._refuse_to_skip_for_ever(state)
        return found

    def _refuse_to_skip_for_ever(self, state: TrainerState) -> None:
        steps = f"{self.skipped_in_a_row} steps in a row, up to step {state.global_step}"
        if self.skipped_in_a_row == SKIPS_IN_A_ROW:
            raise Diverged(
                f"the loss scaler skipped {steps}: the fp16 gradients stay infinite or NaN at any scale. Try "
                "tricks.precision=bf16 or fp32"
            )
        if self.skipped_in_a_row == state.global_step == state.max_steps:
            raise Diverged(
                f"the loss scaler skipped {steps}: the run ended while it was still looking for a scale at which the "
                f"fp16 gradients are finite. Take {SKIPS_IN_A_ROW} steps or more, or tricks.precision=bf16 or fp32"
            )


def sizes(inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the tokens of a batch, padding included, and its trained tokens.

    Activations and the logits of the full loss grow with the first number, logits of the chunked loss with the second.
    """
    return inputs["input_ids"].numel(), int(trained_tokens(inputs))
