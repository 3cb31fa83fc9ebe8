"""The figure of a report: loss and memory over the steps."""

import io
from collections.abc import Mapping
from typing import Any


def draw(report: Mapping[str, Any]) -> bytes:
    # It takes half a second to import, and only the end of a run draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training = [entry for entry in report["history"] if "loss" in entry]
    evaluations = [entry for entry in report["history"] if "eval_loss" in entry]
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no screen, and no global state, needed
    losses, memory = figure.subplots(1, 2)
    steps = [entry["step"] for entry in training]
    losses.plot(steps, [entry["loss"] for entry in training], color="#2a6f97", marker=".", label="training step")
    if evaluations:
        losses.plot(
            [entry["step"] for entry in evaluations],
            [entry["eval_loss"] for entry in evaluations],
            color="#c1440e",
            marker="o",
            linestyle="--",
            label="evaluation, all rows",
        )
    losses.set(xlabel="optimizer step", ylabel="loss per trained token, nats", title="Loss")
    losses.legend(frameon=False)
    measured = [entry for entry in training if "peak_bytes" in entry]  # on a CPU where a peak could come
    memory.plot(
        [entry["step"] for entry in measured],
        [entry["peak_bytes"] / 2**20 for entry in measured],
        color="#2a6f97",
        marker=".",
    )
    memory.set(xlabel="optimizer step", ylabel="peak in the step, MiB", title="Memory", ylim=(0, None))
    for axes in (losses, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()
