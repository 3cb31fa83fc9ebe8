"""What the evaluation loss decides during a run: what is kept (``train.keep_best``), and an early end.

transformers has both, but neither fits a run that may be interrupted anywhere. It keeps the best *checkpoint*, with the
states of the optimizer, and must then save at every evaluation. Its ``EarlyStoppingCallback`` counts in a state of its
own, which a resumed run does not read by default. Here both follow from the history, which every checkpoint has.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback


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
