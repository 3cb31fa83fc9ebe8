"""Show the progress of a run: a panel that redraws itself in a terminal, plain lines where there is none."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from transformers import TrainerCallback

from cria_tricks.common.progress_bars import new_bar
from cria_tricks.common.units import human
from cria_tricks.data.samples import answer_line, one_line
from cria_tricks.measure.utilisation import Utilisation

HEIGHTS = "▁▂▃▄▅▆▇█"
SHOWN = 24
"""How many of the last losses the small curve shows."""
QUESTION = 80
"""How much of a question is shown (``eval.samples``) [characters]."""
ANSWER = 240
"""How much of an answer is shown [characters]; the report has more, and ``report.json`` all of it."""
A_SECOND = 4
"""How often the panel is drawn in a second."""


def curve(values: list[float]) -> str:
    """Draw values as a line of small bars; the lowest value gets the lowest bar.

    Examples:
        >>> curve([3.0, 2.0, 1.0])
        '█▅▁'
    """
    low = min(values, default=0)
    high = max(values, default=0)
    # Equal values make a step of 0, by which nothing can be divided.
    step = (high - low) / (len(HEIGHTS) - 1) or 1
    return "".join(HEIGHTS[round((value - low) / step)] for value in values)


class ShowProgress(TrainerCallback):
    """Draw bars for training and evaluation, and the run's numbers below them, inside ``with progress.panel:``.

    Args:
        console: where to draw.
        eval_batches: how many batches an evaluation has.
        predicted: the estimated peak memory of a step [bytes].
        sample: returns the newest sample of the monitor.
        counted: the operations of a token and the peak of the cards, for MFU.
    """

    def __init__(
        self,
        console: Console,
        eval_batches: int,
        predicted: int | None = None,
        sample: Callable[[], Mapping[str, Any]] = dict,
        counted: Utilisation | None = None,
    ):
        self.console = console
        self.eval_batches = eval_batches
        self.predicted = predicted
        self.sample = sample
        self.counted = counted
        self.bar = new_bar(console)  # not started, so it does not draw itself: the panel draws it
        self.evaluating: Any = None
        self.losses: list[float] = []
        self.speed = self.peak = 0.0
        self.panel: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if console.is_terminal:
            self.panel = Live(get_renderable=self.draw, console=console, refresh_per_second=A_SECOND)

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
        for found in metrics.get("eval_answers", ()):
            asked = one_line(found["question"], QUESTION)
            # A model may write anything, also what rich would take for its own marks.
            answer = answer_line(found["answer"], ANSWER)
            self.console.print(f"  {asked}\n    {answer}", markup=False, highlight=False)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" not in logs:
            return
        # StepMeter (step_meter.py) measures tokens, seconds, bytes and skipped steps.
        self.losses.append(logs["loss"])
        self.speed = logs["tokens"] / logs["step_seconds"]
        self.peak = max(self.peak, logs.get("peak_bytes", 0))
        self.bar.update(self.training, completed=state.global_step, note="skipped" if logs["skipped"] else "")
        if not self.console.is_terminal:
            note = f"loss {logs['loss']:.3f}  {self.speed:,.0f} tokens/s" + ("  skipped" if logs["skipped"] else "")
            self.console.print(f"step {state.global_step:>4}/{state.max_steps}  {note}")

    def draw(self) -> RenderableType:
        """Draw the bars, and below them the numbers that are known so far."""
        grid = Table.grid(padding=(0, 2))
        for name, value in self.numbers().items():
            grid.add_row(f"{name:<10}", value)
        return Group(self.bar.get_renderable(), grid)

    def numbers(self) -> dict[str, str]:
        """Return the numbers below the bars as text, by their names."""
        sample = self.sample()
        rows = {}
        if self.losses:
            rows["loss"] = f"{self.losses[-1]:.3f}  {curve(self.losses[-SHOWN:])}"
            rows["speed"] = f"{self.speed:,.0f} tokens/s"
        if self.losses and self.counted:
            mfu = self.counted.mfu(self.speed)
            rows["MFU"] = "unknown: no datasheet rate of this device" if mfu is None else f"{mfu:.0%} of the peak"
        if self.peak:
            predicted = f" of {human(self.predicted)} predicted" if self.predicted else ""
            rows["peak"] = f"{human(self.peak)}{predicted}"
        if "rss_bytes" in sample:
            rows["process"] = f"{human(sample['rss_bytes'])}  {sample['cpu_cores']:.1f} cores"
        for number, card in enumerate(sample.get("cards", ())):
            known = (
                (written, card.get(key))
                for key, written in (
                    ("memory_bytes", human),
                    ("utilisation", "{:.0%} busy".format),
                    ("celsius", "{:.0f} °C".format),
                    ("watts", "{:.0f} W".format),
                )
            )
            rows[f"card {number}"] = "  ".join(written(value) for written, value in known if value is not None)
        return rows
