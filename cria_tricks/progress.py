"""Progress in the terminal: one bar where there is one, plain lines where there is none."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback

T = TypeVar("T")


def new_bar(console: Console) -> Progress:
    """A bar with counts and times, and a ``note`` at its end; nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def counted(rows: Iterable[T], what: str, console: Console) -> Iterator[Iterator[T]]:
    """Show how many rows were read, while they are: a bar without an end, and a plain line before and after.

    Args:
        rows: to be read.
        what: it is for.
        console: where it is shown.
    """
    number = 0
    bar = new_bar(console)

    def each() -> Iterator[T]:
        nonlocal number
        for number, row in enumerate(rows, 1):
            yield row
            if number % 1000 == 0:
                bar.update(task, completed=number, note=f"{number:,} rows")

    console.print(f"{what}: all rows are read once")
    with bar:
        task = bar.add_task("reading", total=None, note="")
        yield each()
    console.print(f"{what}: {number:,} rows read")


class ShowProgress(TrainerCallback):
    """Draws a bar for the training steps and one for each evaluation, inside ``with progress.bar:``."""

    def __init__(self, console: Console, eval_batches: int):
        self.console, self.eval_batches = console, eval_batches
        self.bar = new_bar(console)
        self.evaluating: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = self.bar.add_task("training", total=state.max_steps, completed=state.global_step, note="")

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.evaluating is None:
            self.evaluating = self.bar.add_task("evaluating", total=self.eval_batches, note="")
        self.bar.advance(self.evaluating)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if self.evaluating is not None:
            self.bar.remove_task(self.evaluating)
        self.evaluating = None
        self.console.print(f"step {state.global_step:>4}  evaluation loss {metrics['eval_loss']:.4f}")

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" not in logs:
            return
        speed = logs["tokens"] / logs["step_seconds"]
        note = f"loss {logs['loss']:.3f}  {speed:,.0f} tokens/s" + ("  skipped" if logs["skipped"] else "")
        self.bar.update(self.training, completed=state.global_step, note=note)
        if not self.console.is_terminal:
            self.console.print(f"step {state.global_step:>4}/{state.max_steps}  {note}")
