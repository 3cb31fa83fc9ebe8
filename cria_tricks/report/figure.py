"""Draw the figure of a report: loss and memory over the steps."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.common.themes import THEMES

_BLUE, _ORANGE, *_ = THEMES["light"].series
"""The picture has a white background of its own, so it is the same in both modes."""


def draw(report: Mapping[str, Any]) -> bytes:
    """Draw the loss and the peak memory of each step, and return the picture as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because matplotlib starts slowly
    from matplotlib.figure import Figure

    training = [entry for entry in report["history"] if "loss" in entry]
    evaluations = [entry for entry in report["history"] if "eval_loss" in entry]
    measured = [entry for entry in training if "peak_bytes" in entry]  # on a CPU, the steps that could set a new peak
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and without pyplot's global state
    losses, memory = figure.subplots(1, 2)
    losses.plot(_column(training, "step"), _column(training, "loss"), color=_BLUE, marker=".", label="training step")
    if evaluations:
        losses.plot(
            _column(evaluations, "step"),
            _column(evaluations, "eval_loss"),
            color=_ORANGE,
            marker="o",
            linestyle="--",
            label="evaluation, all rows",
        )
    losses.set(xlabel="optimizer step", ylabel="loss per trained token, nats", title="Loss")
    losses.legend(frameon=False)
    mebibytes = [peak / 2**20 for peak in _column(measured, "peak_bytes")]
    memory.plot(_column(measured, "step"), mebibytes, color=_BLUE, marker=".")
    memory.set(xlabel="optimizer step", ylabel="peak in the step, MiB", title="Memory", ylim=(0, None))
    for axes in (losses, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


def _column(entries: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [entry[key] for entry in entries]
