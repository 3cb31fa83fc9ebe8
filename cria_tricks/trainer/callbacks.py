"""The trainer's callbacks: measure each optimizer step, ask for checkpoints, and end a run in time."""

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from cria_tricks.common.errors import Diverged
from cria_tricks.data.batches import real_tokens
from cria_tricks.data.tokens import IGNORED
from cria_tricks.processes.world import World

SKIPS_IN_A_ROW = 10
"""After this many skipped steps in a row the run ends.

The loss scaler begins at 65536 and halves its scale at each overflow. It needs a few halvings to find a scale that
fits. But ten halvings of 65536 lead to 64. With that scale only gradients that are infinite, NaN or above 1,000
overflow in fp16 (its largest number is 65,504). We give such a run up.
"""


class StepMeter(TrainerCallback):
    """Measure the tokens, the seconds and the peak bytes of each optimizer step.

    On a CPU, counting bytes slows a step down, so not every micro-batch is watched. Until the optimizer has taken its
    first step, which creates its states, all of them are; after that, only those that can set a new peak.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.tokens: list[torch.Tensor] = []  # of each micro-batch so far: real tokens, trained tokens
        self.measured: dict[str, Any] = {}
        self.first = True  # until the optimizer has taken a step that was not skipped
        self.watched = False  # whether the bytes of this step were counted
        self.whole_step = contextlib.ExitStack()  # counts the bytes of a whole step, as long as `first` is True
        self.skipped_in_a_row = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.tokens = []
        self.trainer.meter.lap()
        self.watched = self.first
        if self.first:
            self.whole_step.enter_context(self.trainer.meter.watch())
        self.began = time.perf_counter()

    def count(self, inputs: dict[str, torch.Tensor]) -> None:
        """Count the tokens of a micro-batch that has run."""
        trained = (inputs["labels"][:, 1:] != IGNORED).sum()
        # A micro-batch without a trained token is the filler row of shares.py, whose tokens do not count.
        self.tokens.append(torch.stack([real_tokens(inputs) * (trained > 0), trained]))

    @contextlib.contextmanager
    def watching(self, *micro_batches: dict[str, torch.Tensor]) -> Iterator[None]:
        """Count the bytes of the micro-batches that run inside ``with``, if they can set a new peak."""
        trainer = self.trainer
        meter = self.trainer.meter
        later = bool(self.tokens)  # not the first micro-batch of its step, so gradients exist already
        tokens, trained = map(sum, zip(*map(sizes, micro_batches), strict=True))
        if self.first or not meter.counts or not meter.may_set_a_peak("train", tokens, trained, later):
            yield
            return
        self.watched = True
        gradients = (p.grad for p in trainer.model.parameters() if p.grad is not None)
        states = (t for state in trainer.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        batches = (tensor for batch in micro_batches for tensor in batch.values())
        meter.track((*gradients, *states, *batches))  # they were made while nothing was counted
        with meter.watch():
            yield

    def on_step_end(self, args, state, control, **kwargs):
        world = self.trainer.world
        # tolist() waits for the GPU. The time is taken after it, so it includes all of the GPU's work.
        tokens, trained = world.sum(torch.stack(self.tokens).sum(0)).tolist()
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
        if self.first and not self.measured["skipped"]:  # from now on the optimizer states exist
            self.first = False
            self.trainer.meter.forget_sizes()  # beside them, a batch as large as an earlier one can set a new peak
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.measured["skipped"] else 0
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

    def close(self) -> None:
        """Stop counting bytes; also called when an error ends a step."""
        self.whole_step.close()

    def take(self) -> dict[str, Any]:
        """Return what was measured in the last step, for its entry in the log history."""
        return self.measured


class Agree(TrainerCallback):
    """Make all processes save or stop when one of them asks for it, because both take all processes.

    It must come after the callbacks that ask.
    """

    def __init__(self, world: World):
        self.world = world

    def on_step_end(self, args, state, control, **kwargs):
        save, stop = self.world.max_over_ranks(control.should_save, control.should_training_stop)
        control.should_save = bool(save)
        control.should_training_stop = bool(stop)


class StopOnSignal(TrainerCallback):
    """End the run with a checkpoint after the current optimizer step, on Ctrl-C (SIGINT), SIGTERM or SIGHUP.

    Signals are handled inside ``with``. SIGHUP comes when the terminal is closed; under nohup it stays ignored. A
    second signal ends the run at once; with several processes it must come :data:`REPEAT_SECONDS` later.

    Args:
        world: the processes of the run.

    Attributes:
        requested: whether a signal has asked for the end.
        since: when it came, in seconds of ``time.monotonic``.
    """

    REPEAT_SECONDS = 10.0
    """Seconds within which a second signal counts as a repetition of the first one.

    Ctrl-C in a terminal reaches every process of a run, and then the launcher sends it to its processes once more.
    """

    requested = False
    since = 0.0

    def __init__(self, world: World):
        self.world = world

    def __enter__(self) -> None:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # in other threads Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self.before[number] = signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.requested and self.world.size > 1 and time.monotonic() - self.since < self.REPEAT_SECONDS:
            return
        if self.requested or self.world.size == 1:
            self.__exit__()  # restore the earlier handlers: with them the next signal ends the run at once
        if self.requested:
            signal.raise_signal(number)
        self.requested = True
        self.since = time.monotonic()
        if not self.world.is_main:
            return
        again = "Ctrl-C again"
        if self.world.size > 1:
            again = f"Ctrl-C after {self.REPEAT_SECONDS:.0f} s"
        # Not print(), because the signal may have interrupted the progress bar while it prints.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\nstopping after this step, to save it; {again} stops at once\n".encode())

    def __exit__(self, error: object = None, *more: object) -> None:
        # If one of several processes fails, the launcher sends SIGTERM to the others. Ignore it after an error, so that
        # each process can still print what went wrong.
        deaf = error is not None and self.world.size > 1
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_IGN if deaf else handler)

    def on_step_end(self, args, state, control, **kwargs):
        if self.requested:
            control.should_save = control.should_training_stop = True


def _leave_terminal() -> None:
    """Redirect what belonged to the closed terminal to /dev/null; files and pipes stay.

    Otherwise the next thing that a library prints would raise an ``OSError``, and nothing would be saved.
    """
    for descriptor in range(3):
        with contextlib.suppress(OSError):
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):  # a terminal that is gone is no tty any more
                devnull = os.open(os.devnull, os.O_RDWR)
                os.dup2(devnull, descriptor)
                os.close(devnull)


class SaveOnClock(TrainerCallback):
    """Ask for a checkpoint when the last one is older than ``minutes`` (0: never), in addition to ``save_steps``."""

    def __init__(self, minutes: float):
        self.minutes = minutes

    def on_train_begin(self, args, state, control, **kwargs):
        state.save_steps = args.save_steps  # a resumed run would keep the value of its checkpoint
        self.last = time.monotonic()

    def on_save(self, args, state, control, **kwargs):
        self.last = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self.minutes and time.monotonic() - self.last >= self.minutes * 60:
            control.should_save = True


class StopOnBudget(TrainerCallback):
    """End the run with a checkpoint before its time budget is used up.

    It ends when the time that is left is too short for one more step and for what follows the last step.

    Args:
        budget: seconds; 0 for no limit.
        elapsed: returns the seconds since this process began with the run.
        save_seconds: returns the seconds that writing what is still to be written takes.
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
        evaluation = max(map(_evaluation_seconds, state.log_history), default=0)
        to_come = self.longest_step + evaluation + self.save_seconds()
        if self.budget and now + to_come > self.budget and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


def _evaluation_seconds(entry: dict[str, Any]) -> float:
    """Return the seconds of an evaluation, with its answers (``eval.samples``); 0 for another entry."""
    return entry.get("eval_seconds", 0) + entry.get("eval_answers_seconds", 0)


def sizes(inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the tokens of a batch, padding included, and its trained tokens.

    Activations and the logits of the full loss grow with the first number, logits of the chunked loss with the second.
    """
    return inputs["input_ids"].numel(), int((inputs["labels"][:, 1:] != IGNORED).sum())
