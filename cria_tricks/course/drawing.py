"""The course's figures: charts, sketches of tensors, and the staircase of its bills."""

import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cria_tricks.bench import figures, style
from cria_tricks.bench.style import Drawing, Theme
from cria_tricks.course.job import CAPSTONE, LESSON_OF, bill, so_far
from cria_tricks.hardware import T4
from cria_tricks.predict import toggles

GIB = 2**30
LIGHT = "image/vnd.cria.light+svg"
DARK = "image/vnd.cria.dark+svg"
"""The MIME types of a figure for the site's two modes; a notebook shows the light one on white."""


def staircase(lesson: str) -> Drawing:
    """The bills of the course until this lesson, one toggle after the other; its own are drawn strong."""
    reached = so_far(lesson)
    fields = toggles.switched_on(reached)
    names = ["plain fp32", *(toggles.named(CAPSTONE, field) for field in fields)]
    peaks = [bill(toggles.with_only(reached, fields[:n])).needed_bytes / GIB for n in range(len(names))]
    own = [LESSON_OF.get(name, "00")[:2] == lesson[:2] for name in names]

    def draw(theme: Theme) -> Figure:
        drawn, axes = figure(height=0.36 * len(names) + 1.0)
        strong = theme.series[0]
        colours = [strong if mine else theme.quiet for mine in own]
        axes.barh(range(len(names)), peaks, color=colours, height=0.66)
        for place, peak in enumerate(peaks):
            axes.text(peak, place, f" {peak:.1f} GiB", va="center", color=theme.ink)
        figures.capacity(axes, theme)
        axes.set_yticks(range(len(names)), style.readable(names))
        axes.set(xlabel="needed for a training step, GiB", xlim=(0, max(*peaks, T4.memory_bytes / GIB) * 1.15))
        axes.set_ylim(len(names) - 0.4, -1.2)
        axes.grid(axis="x")
        return drawn

    return draw


def figure(height: float = 3.0) -> tuple[Figure, Axes]:
    """An empty figure of the course, inches."""
    drawn, (axes,) = style.panels(1, height)
    return drawn, axes


def show(drawing: Drawing, says: str) -> None:
    """Show a figure, in both themes, with one sentence of what to see.

    Args:
        drawing: theme -> figure; called once for a light page and once for a dark one.
        says: the sentence; it is the picture's text for those who do not see it.
    """
    light, dark = (style.save(drawing, theme).decode() for theme in ("light", "dark"))
    try:
        # A plain script may run where there are no notebooks.
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:  # a plain script on a machine without notebooks
        return
    if get_ipython() is not None:
        white = light.replace("<defs>", '<rect width="100%" height="100%" fill="#ffffff"/>\n <defs>', 1)
        display({"image/svg+xml": white, LIGHT: light, DARK: dark, "text/plain": says}, raw=True)


class Sketch:
    """A picture of tensors: boxes with names and shapes, and arrows between them.

    Args:
        theme: whose colours are used.
        width: of the picture, in units; so is everything that is drawn.
        height: of the picture.
    """

    def __init__(self, theme: Theme, width: float, height: float):
        self.theme = theme
        self.figure, self.axes = figure(height=8.2 * height / width)
        self.axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        self.axes.axis("off")

    def tensor(self, x: float, y: float, w: float, h: float, name: str, *, color: int = 0, kept: bool = True) -> None:
        """A tensor: filled while it is kept, dashed once it is gone."""
        edge = self.theme.series[color]
        style: dict[str, Any] = {"facecolor": (*_rgb(edge), 0.22)}
        if not kept:
            style = {"facecolor": "none", "linestyle": "--"}
        self.axes.add_patch(Rectangle((x, y), w, h, edgecolor=edge, linewidth=1.2, **style))
        self.text(x + w / 2, y + h / 2, name)

    def text(self, x: float, y: float, words: str, *, quiet: bool = False, align: str = "center") -> None:
        """Words, beside where they are put; ``align`` says on which side."""
        color = self.theme.quiet if quiet else self.theme.ink
        self.axes.text(x, y, words, ha=align, va="center", color=color, fontsize=9)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], *, color: int | None = None) -> None:
        """An arrow between two points."""
        ink = self.theme.quiet
        if color is not None:
            ink = self.theme.series[color]
        style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(start, end, color=ink, linewidth=1.2, **style))


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(part, 16) / 255 for part in re.findall("..", color[1:]))
