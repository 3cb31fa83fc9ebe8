"""Define how figures look (colours of the light and the dark theme, panels, markers), and save them as SVG."""

import io
import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cria_tricks.bench import narrow as narrow_figures
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
"""Width of a figure (inches); a narrow variant has that of :data:`cria_tricks.bench.narrow.WIDTH`."""

_narrow = ContextVar("narrow", default=False)
"""Whether a narrow variant is being drawn, for :func:`panels`."""

MARKERS = ("o", "s", "D", "^")


def marked(theme: Theme, number: int) -> dict[str, Any]:
    """Choose a colour and a marker for a series; 16 series get different pairs."""
    # After each round of the four colours the markers are shifted by one, so that no pair comes twice.
    return {"color": theme.series[number % 4], "marker": MARKERS[(number + number // 4) % 4]}


def is_narrow() -> bool:
    """Say whether a narrow variant is being drawn."""
    return _narrow.get()


def save(drawing: Drawing, theme: str, *, narrow: bool = False) -> bytes:
    """Draw a figure as an SVG with a transparent background.

    Args:
        drawing: draws the figure.
        theme: ``light`` or ``dark``, the theme of the page that shows it.
        narrow: whether to draw the variant for phones. It is empty if words would overlap in it.
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
        "text.hinting": "none",  # so that words are measured as wide as they are drawn
    }
    picture = io.BytesIO()
    token = _narrow.set(narrow)
    try:
        with rc_context(style):
            figure = drawing(chosen)
            if narrow and narrow_figures.fit(figure):
                return b""
            figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    finally:
        _narrow.reset(token)
    return picture.getvalue()


def panels(number: int, height: float, **arguments: Any) -> tuple[Figure, list[Axes]]:
    """Make an empty figure with panels side by side, or below each other while a narrow variant is drawn.

    Args:
        number: how many panels.
        height: height of a panel with its labels (inches).
        **arguments: for matplotlib's ``subplots``.
    """
    size, rows, columns = (WIDTH, height), 1, number
    if is_narrow():
        size, rows, columns = (narrow_figures.WIDTH, height * number), number, 1
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # needs no screen, and none of pyplot's global state
    axes = list(numpy.atleast_1d(figure.subplots(rows, columns, **arguments)))
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


PHONE = "(max-width: 45em)"
"""The windows that get narrow figures; ``docs/assets/course.css`` and ``course.js`` have the same width."""


def picture(name: str, sentence: str, *, narrow: bool = False) -> str:
    """Return the HTML of a figure, with a sentence on what it shows.

    The browser takes the light or the dark file, whichever the reader prefers, and on a phone the narrow one.

    Args:
        name: address of the files without ``-light.svg``.
        sentence: what the figure shows.
        narrow: whether there are narrow variants.
    """
    dark = "(prefers-color-scheme: dark)"
    sources = [(dark, "dark")]
    if narrow:
        sources = [(f"{PHONE} and {dark}", "narrow-dark"), (PHONE, "narrow-light"), *sources]
    found = "".join(f'<source media="{media}" srcset="{name}-{end}.svg">' for media, end in sources)
    return f'<picture>{found}<img alt="{sentence}" src="{name}-light.svg"></picture>'
