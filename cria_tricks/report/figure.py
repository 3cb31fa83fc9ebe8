"""Draw the figure of a report, loss and memory over the steps, and the losses of several runs."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.common.themes import THEMES

_BLUE, _ORANGE, *_ = THEMES["light"].series
"""The picture has a white background of its own, so it is the same in both modes."""
_COLOURS = THEMES["light"].series
_MARKS = (".", "s", "^")


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


def draw_losses(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Draw the training and evaluation losses of several runs, and return the picture as a PNG.

    Args:
        histories: the history of each run, by its name; those that did not finish have none.

    Returns:
        No bytes if no run has a history.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because matplotlib starts slowly
    from matplotlib.figure import Figure

    if not any(histories.values()):
        return b""
    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = dict(zip(("loss", "eval_loss"), figure.subplots(1, 2), strict=True))
    for number, (name, history) in enumerate(histories.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        # After the last colour they begin again, with other marks.
        mark = _MARKS[number // len(_COLOURS) % len(_MARKS)]
        for key, plot in axes.items():
            entries = [entry for entry in history if entry.get(key) is not None]
            if entries:
                plot.plot(_column(entries, "step"), _column(entries, key), color=colour, marker=mark, label=name)
    axes["loss"].set(title="Training steps", ylabel="loss per trained token, nats")
    axes["eval_loss"].set(title="Evaluations, all rows")
    for plot in axes.values():
        plot.set_xlabel("optimizer step")
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes["loss"].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


def _column(entries: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [entry[key] for entry in entries]
