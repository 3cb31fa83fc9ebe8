"""What the trainer does between steps: measure them, save and end in time."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from cria_tricks.common import interrupts
from cria_tricks.common.errors import Diverged
from cria_tricks.data.batches import real_tokens
from cria_tricks.data.tokens import IGNORED
from cria_tricks.processes.world import World

SKIPS_IN_A_ROW = 10
"""From its first scale, 65536, the loss scaler needs a few halvings to find the right one; ten are no search."""


class StepMeter(TrainerCallback):
    """Counts one optimizer step's tokens, seconds and bytes.

    Until the optimizer has taken its first step, in which its states come to life, everything is watched; from then
    on those micro-batches that can set a new peak.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.tokens: list[torch.Tensor] = []
        self.measured: dict[str, Any] = {}
        self.first = True
        self.watched = False
        self.whole_step = contextlib.ExitStack()
        self.skipped_in_a_row = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.tokens = []
        self.trainer.meter.lap()
        self.watched = self.first
        if self.first:
            self.whole_step.enter_context(self.trainer.meter.watch())
        self.began = time.perf_counter()

    def count(self, inputs: dict[str, torch.Tensor]) -> None:
        trained = (inputs["labels"][:, 1:] != IGNORED).sum()
        # Where nothing is trained, the row was made to let this process wait for the others.
        self.tokens.append(torch.stack([real_tokens(inputs) * (trained > 0), trained]))

    @contextlib.contextmanager
    def watching(self, inputs: dict[str, torch.Tensor]) -> Iterator[None]:
        """Count a micro-batch's bytes if it can set a new peak."""
        trainer = self.trainer
        meter = self.trainer.meter
        later = bool(self.tokens)  # in the window: then gradients are alive
        if self.first or not meter.counts or not meter.may_set_a_peak("train", *sizes(inputs), later):
            yield
            return
        self.watched = True
        gradients = (p.grad for p in trainer.model.parameters() if p.grad is not None)
        states = (t for state in trainer.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        meter.track((*gradients, *states, *inputs.values()))
        with meter.watch():
            yield

    def on_step_end(self, args, state, control, **kwargs):
        world = self.trainer.world
        tokens, trained = world.sum(torch.stack(self.tokens).sum(0)).tolist()  # waits for the GPU
        seconds, watched = world.max_over_ranks(time.perf_counter() - self.began, self.watched)
        self.measured = {
            "step_seconds": seconds,
            "tokens": tokens,
            "trained_tokens": trained,
            "skipped": int(self.trainer.accelerator.optimizer_step_was_skipped),
        }
        [peak] = map(int, world.max_over_ranks(self.trainer.meter.lap()))
        if watched or not self.trainer.meter.counts:
            self.measured["peak_bytes"] = peak
        self.close()
        if self.first and not self.measured["skipped"]:
            self.first = False
            self.trainer.meter.forget_sizes()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.measured["skipped"] else 0
        nothing_trained = self.skipped_in_a_row == state.global_step == state.max_steps
        if self.skipped_in_a_row == SKIPS_IN_A_ROW or nothing_trained:
            raise Diverged(
                f"the loss scaler skipped {self.skipped_in_a_row} steps in a row, up to step {state.global_step}: the "
                "fp16 gradients stay infinite or NaN at any scale. Try tricks.precision=bf16 or fp32"
            )

    def close(self) -> None:
        """Stop watching, wherever the step came to an end."""
        self.whole_step.close()

    def take(self) -> dict[str, Any]:
        return self.measured


class Agree(TrainerCallback):
    """Lets what one process asks for, a checkpoint or the end, be done by all of them. It comes last."""

    def __init__(self, world: World):
        self.world = world

    def on_step_end(self, args, state, control, **kwargs):
        save, stop = self.world.max_over_ranks(control.should_save, control.should_training_stop)
        control.should_save = bool(save)
        control.should_training_stop = bool(stop)


class StopOnSignal(TrainerCallback):
    """Ctrl-C, the system's SIGTERM, or SIGHUP ends the run after the current optimizer step, with a checkpoint.

    SIGHUP comes when the terminal goes away; under nohup it is ignored, and stays so. A second signal ends the run at
    once; with several processes only after :attr:`LAUNCHERS`.

    Args:
        world: the processes of the run.
    """

    LAUNCHERS = 10.0
    """Seconds within which a launcher repeats a signal that the terminal has sent to every process already."""

    requested = False
    since = 0.0

    def __init__(self, world: World):
        self.world = world

    def __enter__(self) -> None:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are the caller's business
            for number in interrupts.heard():
                self.before[number] = signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            interrupts.hung_up()
        if self.requested and self.world.size > 1 and time.monotonic() - self.since < self.LAUNCHERS:
            return
        if self.requested or self.world.size == 1:
            self.__exit__()
        if self.requested:
            signal.raise_signal(number)
        self.requested = True
        self.since = time.monotonic()
        if not self.world.is_main:
            return
        again = "Ctrl-C again"
        if self.world.size > 1:
            again = f"Ctrl-C after {self.LAUNCHERS:.0f} s"
        # Not print(): a signal may come while the progress bar is printing.
        with contextlib.suppress(OSError):  # nobody may be there any more to read it
            os.write(2, f"\nstopping after this step, to save it; {again} stops at once\n".encode())

    def __exit__(self, error: object = None, *more: object) -> None:
        # Where one of several processes has failed, the launcher's signal must not cut off what the others have to say.
        deaf = error is not None and self.world.size > 1
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_IGN if deaf else handler)

    def on_step_end(self, args, state, control, **kwargs):
        if self.requested:
            control.should_save = control.should_training_stop = True


class SaveOnClock(TrainerCallback):
    """Asks for a checkpoint when the last one is older than so many minutes; the steps' own cadence goes on."""

    def __init__(self, minutes: float):
        self.minutes = minutes

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # and not what the checkpoint says that it was resumed from
        self.last = time.monotonic()

    def on_save(self, args, state, control, **kwargs):
        self.last = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self.minutes and time.monotonic() - self.last >= self.minutes * 60:
            control.should_save = True


class StopOnBudget(TrainerCallback):
    """Ends the run, with a checkpoint, when another step and what comes after the last would not fit in its time.

    Args:
        budget: seconds; 0 for no limit.
        elapsed: gives the seconds since the process began.
        save_seconds: gives the seconds that the last checkpoint took.
    """

    def __init__(self, budget: float, elapsed: Callable[[], float], save_seconds: Callable[[], float]):
        self.budget = budget
        self.elapsed = elapsed
        self.save_seconds = save_seconds
        self.last = 0.0
        self.longest_step = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.last = self.elapsed()

    def on_step_end(self, args, state, control, **kwargs):
        now = self.elapsed()
        self.longest_step = max(self.longest_step, now - self.last)
        evaluation = max((entry.get("eval_seconds", 0) for entry in state.log_history), default=0)
        to_come = self.longest_step + evaluation + 2 * self.save_seconds()  # the checkpoint and the result
        if self.budget and now + to_come > self.budget and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


def sizes(inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Tokens of a batch, padding included, and trained tokens: what its activations and its logits grow with."""
    return inputs["input_ids"].numel(), int((inputs["labels"][:, 1:] != IGNORED).sum())
