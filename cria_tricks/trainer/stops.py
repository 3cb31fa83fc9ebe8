"""What ends a run, and what asks for a checkpoint: a signal, the clock, a time budget, and the evaluation loss.

transformers keeps the best *checkpoint*, with the states of the optimizer, and must then save at every evaluation. Its
``EarlyStoppingCallback`` counts in a state of its own, which a resumed run does not read by default. Here both follow
from the history, which every checkpoint has.
"""

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from cria_tricks.processes.world import World


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


def lowest(history: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], int]:
    """Find the evaluation with the lowest loss, the first of several, and count those after it.

    Returns:
        Its entry, and the number of later evaluations; an empty entry and 0 if there was no evaluation.
    """
    best: Mapping[str, Any] = {}
    later = 0
    for entry in history:
        if "eval_loss" not in entry:
            continue
        if not best or entry["eval_loss"] < best["eval_loss"]:
            best = entry
            later = 0
        else:
            later += 1
    return best, later


class KeepBest(TrainerCallback):
    """Keep what was just evaluated, if its loss is the lowest of all that are kept or were.

    The evaluation before the first step does not count, because nothing is trained by then.

    Args:
        keep: writes the weights as they are now; in all processes.
        known: the loss of what an earlier part of the run has kept; infinity if there is nothing.
    """

    def __init__(self, keep: Callable[[], None], known: float):
        self.keep = keep
        self.known = known
        self.seconds = 0.0  # that the last writing took

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if not state.global_step or metrics["eval_loss"] >= self.known:
            return
        began = time.perf_counter()
        self.keep()
        self.known = metrics["eval_loss"]
        self.seconds = time.perf_counter() - began


class Patience(TrainerCallback):
    """End the run, with a checkpoint, when so many evaluations in a row have not lowered the loss.

    Args:
        patience: how many; 0 for no limit.

    Attributes:
        stopped: where and why it has ended the run; empty if it has not.
    """

    def __init__(self, patience: int):
        self.patience = patience
        self.stopped: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._look(state, control)  # a run that was ended before does not go on when it is resumed

    def on_evaluate(self, args, state, control, **kwargs):
        self._look(state, control)
        if self.stopped:
            control.should_save = True

    def _look(self, state: Any, control: Any) -> None:
        best, later = lowest(state.log_history)
        if not self.patience or later < self.patience or state.global_step >= state.max_steps:
            return
        control.should_training_stop = True
        self.stopped = {
            "step": state.global_step,
            "patience": self.patience,
            "lowest_step": best["step"],
            "lowest_loss": best["eval_loss"],
        }
