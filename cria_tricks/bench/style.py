"""Define how figures look (colours of the light and the dark theme, panels, markers), and save them as SVG."""

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

SAYS = {
    "ladder": "Peak bytes of Llama-3.2-1B by dry run, one switch after the other, beside what a T4 has",
    "frontier": "Trained tokens a second against peak bytes, our switches beside TRL's flags",
    "tricks": "Every trick against the same step without it: bytes, and seconds of a token",
    "together": "Every switch of the capstone, alone and beside all others: bytes, and seconds of a token",
    "errors": "The bill by hand against the measured peak, in per cent, case by case",
    "growth_tokens": "Bytes and seconds of a step against the length of a row",
    "growth_rows": "Bytes and seconds of a step against the rows of a micro-batch",
    "growth_model": "Bytes and seconds of a step against the weights of the model",
}
"""Each figure's name -> what it shows in words, for readers who cannot see it."""


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


def picture(name: str, sentence: str) -> str:
    """Return the HTML of a figure, with a sentence on what it shows.

    The browser takes the light or the dark file, whichever the reader prefers.

    Args:
        name: address of the files without ``-light.svg``.
        sentence: what the figure shows.
    """
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">'
    return f'<picture>{dark}<img alt="{sentence}" src="{name}-light.svg"></picture>'
