"""Draw the course's figures: charts, sketches of tensors, and the bars of its memory bills lesson by lesson."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cria_tricks.common import figures
from cria_tricks.common.figures import GIB, Drawing, Theme
from cria_tricks.common.lessons import LESSONS
from cria_tricks.course.job import CAPSTONE, LESSON_OF, bill, so_far
from cria_tricks.course.notebook import shown
from cria_tricks.hardware import T4
from cria_tricks.predict import toggles

LIGHT = "image/vnd.cria.light+svg"
DARK = "image/vnd.cria.dark+svg"
"""The MIME types under which the site finds a figure's light and dark version.

A notebook does not know them. It shows the plain SVG, which is the light version on a white background.
"""


def ladder(lesson: str) -> Drawing:
    """Draw the peak memory as one bar for each switch that the course has reached, each added to those before it.

    Args:
        lesson: the name of the lesson's file, e.g. ``gradient_checkpointing``. The bars of the switches that this
            lesson explains are coloured, all others are grey.
    """
    reached = so_far(lesson)
    fields = toggles.switched_on(reached)
    # The first bar is plain fp32; bar n has the first n switches.
    names = ["plain fp32", *(toggles.named(CAPSTONE, field) for field in fields)]
    peaks = [bill(toggles.with_only(reached, fields[:n])).peak_bytes / GIB for n in range(len(names))]
    own = [LESSON_OF.get(name, LESSONS[0]) == lesson for name in names]  # plain fp32 belongs to the first lesson

    def draw(theme: Theme) -> Figure:
        drawn, axes = figure(height=0.36 * len(names) + 1.0)
        coloured = theme.series[0]
        colours = [coloured if is_own else theme.quiet for is_own in own]
        axes.barh(range(len(names)), peaks, color=colours, height=0.66)
        for place, peak in enumerate(peaks):
            axes.text(peak, place, f" {peak:.1f} GiB", va="center", color=theme.ink)
        axes.set_yticks(range(len(names)), figures.readable(names))
        axes.set(xlabel="peak of a training step, GiB", xlim=(0, max(*peaks, T4.memory_bytes / GIB) * 1.15))
        axes.set_ylim(len(names) - 0.4, -1.2)  # from the top down, with room above for the label of the T4's line
        capacity(axes, theme)
        axes.grid(axis="x")
        return drawn

    return draw


def figure(height: float = 3.0) -> tuple[Figure, Axes]:
    """Make an empty figure of the course's width, with one panel.

    Args:
        height: height of the figure [inches].
    """
    drawn, (axes,) = figures.panels(1, height)
    return drawn, axes


def capacity(axes: Axes, theme: Theme) -> None:
    """Draw the memory of a T4 as a vertical line through horizontal bars, see :func:`figures.limit`."""
    has = T4.memory_bytes / GIB
    figures.limit(axes, theme, has, f"a T4 has {has:.1f} GiB")


def show(drawing: Drawing, says: str) -> None:
    """Show a figure in a notebook, in both themes; outside a notebook, show nothing.

    Args:
        drawing: a function from a theme to a figure; called once for each theme.
        says: one sentence on what the figure shows, for readers who cannot see it (alt text).
    """
    # Draw both even if nothing is shown, so that running a lesson as a plain script finds a broken figure.
    light, dark = (figures.save(drawing, theme).decode() for theme in ("light", "dark"))
    # A notebook may have a dark page, so the plain SVG gets a white background.
    white = light.replace("<defs>", '<rect width="100%" height="100%" fill="#ffffff"/>\n <defs>', 1)
    shown({"image/svg+xml": white, LIGHT: light, DARK: dark, "text/plain": says})


class Sketch:
    """Draw a picture of tensors: boxes with names and shapes, and arrows between them.

    All places and sizes are in units of the picture. The origin is at the top left, and y grows downwards.

    Args:
        theme: gives the colours.
        width: width of the picture [units]; it is scaled to the width of the page.
        height: height of the picture [units].
    """

    def __init__(self, theme: Theme, width: float, height: float):
        self.theme = theme
        self.figure, self.axes = figure(height=figures.WIDTH * height / width)
        self.axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        self.axes.axis("off")

    def tensor(self, x: float, y: float, w: float, h: float, name: str, *, color: int = 0, kept: bool = True) -> None:
        """Draw a tensor as a box with its name.

        Args:
            x: left edge.
            y: upper edge.
            w: width.
            h: height.
            name: the words in the middle of the box.
            color: index of one of the theme's series colours.
            kept: whether the tensor is still in memory; if not, its box is empty, with a dashed edge.
        """
        edge = self.theme.series[color]
        fill: dict[str, Any] = {"facecolor": to_rgba(edge, 0.22)}
        if not kept:
            fill = {"facecolor": "none", "linestyle": "--"}
        self.axes.add_patch(Rectangle((x, y), w, h, edgecolor=edge, linewidth=1.2, **fill))
        self.text(x + w / 2, y + h / 2, name)

    def text(self, x: float, y: float, words: str, *, quiet: bool = False, align: str = "center") -> None:
        """Write words.

        Args:
            x: place of the words, see ``align``.
            y: their middle.
            words: the text.
            quiet: whether the text is in the theme's grey.
            align: which part of the words lies at x: ``left``, ``center`` or ``right``.
        """
        color = self.theme.quiet if quiet else self.theme.ink
        self.axes.text(x, y, words, ha=align, va="center", color=color, fontsize=9)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], *, color: int | None = None) -> None:
        """Draw an arrow between two points (x, y), in a series colour of the theme, or in its grey."""
        ink = self.theme.quiet
        if color is not None:
            ink = self.theme.series[color]
        head: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(start, end, color=ink, linewidth=1.2, **head))
