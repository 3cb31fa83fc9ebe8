"""The colours of all figures, for light and for dark pages."""

from typing import NamedTuple

PARTS = ("weights", "gradients", "optimizer states", "activations", "logits")
"""The parts of a step's memory that figures tell apart, in the order in which they are stacked."""


class Theme(NamedTuple):
    """Colours for light or for dark pages.

    Attributes:
        page: the background, on which figures have none of their own.
        ink: text.
        quiet: axes, and what is not important.
        grid: grid lines.
        series: lines and points; they can be told apart with any kind of colour vision.
        alarm: limits.
        parts: one colour for each of :data:`PARTS`; ``docs/assets/fit.css`` has the same for "Will it fit?".
    """

    page: str
    ink: str
    quiet: str
    grid: str
    series: tuple[str, ...]
    alarm: str
    parts: tuple[str, ...]


_LIGHT = ("#0b62a8", "#c2510c", "#1a7f37", "#8250df")
_DARK = ("#58a6ff", "#f0883e", "#56d364", "#bc8cff")

THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#57606a", "#d8dee4", _LIGHT, "#b3261e", (*_LIGHT, "#c0357a")),
    "dark": Theme("#1e2329", "#e6edf3", "#9aa4ae", "#30363d", _DARK, "#ff7b72", (*_DARK, "#ff8dc7")),
}
