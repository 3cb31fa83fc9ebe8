"""Draw figures that look alike: panels, markers and limits in the colours of both themes, saved as SVG."""

import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cria_tricks.common.themes import THEMES, Theme

GIB = 2**30


Drawing = Callable[[Theme], Figure]
"""A function that draws one figure in any theme."""

WIDTH = 8.2
"""Width of a figure (inches); a phone shows it 600 pixels wide (``course.css``), so 9-point letters have 9 pixels."""

MARKERS = ("o", "s", "D", "^")


def marked(theme: Theme, number: int) -> dict[str, Any]:
    """Choose a colour and a marker for a series; 16 series get different pairs."""
    # After each round of the four colours the markers are shifted by one, so that no pair comes twice.
    return {"color": theme.series[number % 4], "marker": MARKERS[(number + number // 4) % 4]}


def save(drawing: Drawing, theme: str) -> bytes:
    """Draw a figure as an SVG with a transparent background.

    Args:
        drawing: draws the figure.
        theme: ``light`` or ``dark``, the theme of the page that shows it.
    """
    chosen = THEMES[theme]
    style = {
        "svg.hashsalt": "cria_tricks",  # else the ids inside the file would differ from run to run
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": chosen.ink,
        "axes.labelcolor": chosen.ink,
        "axes.edgecolor": chosen.quiet,
        "xtick.color": chosen.quiet,
        "ytick.color": chosen.quiet,
        "xtick.labelcolor": chosen.ink,
        "ytick.labelcolor": chosen.ink,
        "grid.color": chosen.grid,
        # A legend inside a panel hides the grid lines behind its words.
        "legend.facecolor": chosen.page,
        "legend.edgecolor": "none",
        "legend.framealpha": 0.9,
        "legend.borderpad": 0.2,
    }
    picture = io.BytesIO()
    with rc_context(style):
        drawing(chosen).savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return picture.getvalue()


def panels(number: int, height: float, **arguments: Any) -> tuple[Figure, list[Axes]]:
    """Make an empty figure with panels side by side.

    Args:
        number: how many panels.
        height: height of a panel with its labels (inches).
        **arguments: for matplotlib's ``subplots``.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = list(numpy.atleast_1d(figure.subplots(1, number, **arguments)))
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.set_axisbelow(True)
    return figure, axes


def readable(labels: Iterable[str]) -> list[str]:
    """Write the labels of a ladder, with a plus in front of each setting that is switched on."""
    return [f"+ {label}" if "=" in label else label for label in labels]


def short(value: float) -> str:
    """Write a number of weights or tokens for an axis: ``1.5B``, ``135M``, ``2k``.

    Here k is 1,024: row lengths are powers of two. Below a million, other numbers are written in full.
    """
    if value >= 1e9:
        return f"{value / 1e9:.2g}B"
    if value >= 1e6:
        return f"{value / 1e6:.0f}M"
    if value >= 1024 and math.log2(value).is_integer():
        return f"{int(value) // 1024}k"
    return f"{value:g}"


def limit(axes: Axes, theme: Theme, gib: float, words: str) -> None:
    """Draw a limit of memory as a vertical line through horizontal bars, with a label above the first bar.

    Numbers behind bars that would lie on the line move to its right side.

    Args:
        axes: the panel, with its bars, numbers and limits: the x axis is in GiB, the first bar is at y = 0, and the y
            axis points down.
        theme: the colours.
        gib: the limit (GiB).
        words: the label.
    """
    width = 0.13 * axes.get_xlim()[1]  # of a number: nobody knows it yet, because the figure is laid out later
    for text in axes.texts:
        if gib - width < text.get_position()[0] < gib:
            text.set_x(gib)
    axes.axvline(gib, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(gib, -0.75, f" {words}", color=theme.alarm, va="center")
