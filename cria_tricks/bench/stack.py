"""Draw a ladder of memory bills: one bar for each rung, stacked by what the memory is for; small enough for a phone."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cria_tricks.bench.style import GIB, Drawing, Theme
from cria_tricks.common.themes import PARTS
from cria_tricks.hardware.device import T4


class Rung(NamedTuple):
    """One bar.

    Attributes:
        label: what was switched on.
        parts: bytes of each of ``themes.PARTS`` at the peak of the step.
    """

    label: str
    parts: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes of the whole bar."""
        return sum(self.parts)


CARD = T4.memory_bytes / GIB
ROOM_OF_A_SUM = 6
"""How much of the axis the words behind a bar take [GiB]."""


def stack(rungs: Sequence[Rung]) -> Drawing:
    """Draw rungs from the top down, each label above its bar, beside the memory of a T4.

    The figure is 4.6 inches wide, so that its letters can still be read when a phone shows it at 360 pixels.
    """

    def draw(theme: Theme) -> Figure:
        figure = Figure(figsize=(4.6, 0.46 * len(rungs) + 0.95), layout="constrained")
        FigureCanvasAgg(figure)  # needs no screen
        axes = figure.subplots()
        axes.axis("off")
        for place, rung in enumerate(rungs):
            _bar(axes, theme, place, rung)
        widest = max(rung.peak for rung in rungs) / GIB
        _card(axes, theme, len(rungs))
        axes.set(xlim=(0, 1.22 * widest), ylim=(len(rungs) - 0.35, -0.95))
        swatches = [Patch(color=color, label=name) for name, color in zip(PARTS, theme.parts, strict=True)]
        figure.legend(
            handles=swatches, loc="outside upper left", ncols=3, fontsize=9, handlelength=0.9, handleheight=0.9,
            columnspacing=1.2, handletextpad=0.5, borderaxespad=0,
        )  # fmt: skip
        return figure

    return draw


def _bar(axes: Axes, theme: Theme, place: int, rung: Rung) -> None:
    """Draw one rung: its label, below it the bar, and behind the bar its sum."""
    left = 0.0
    for size, color in zip(rung.parts, theme.parts, strict=True):
        axes.barh(place + 0.22, size / GIB, left=left, color=color, height=0.4)
        left += size / GIB
    plus = "+ " if place else ""
    behind = left
    if left < CARD < left + ROOM_OF_A_SUM:  # the words would lie across the line of the card
        behind = CARD
    axes.text(0, place - 0.2, plus + rung.label, va="center", color=theme.ink, fontsize=9.5)
    axes.text(behind, place + 0.22, f" {left:.1f} GiB", va="center", color=theme.ink, fontsize=9.5, weight="bold")


def _card(axes: Axes, theme: Theme, rungs: int) -> None:
    """Mark the memory of a T4 in each row, at the height of the bars only, because a label stands above each bar."""
    rows = range(rungs)
    axes.vlines([CARD] * rungs, [row - 0.03 for row in rows], [row + 0.47 for row in rows], theme.alarm, linewidth=1.8)
    axes.text(CARD, -0.66, f"a T4 has {CARD:.1f} GiB", color=theme.alarm, va="center", ha="center", fontsize=9.5)
    axes.vlines(CARD, -0.45, 0.47, theme.alarm, linewidth=1.8)
