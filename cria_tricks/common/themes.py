"""The colours of all figures, for light and for dark pages."""

from typing import NamedTuple


class Theme(NamedTuple):
    """Colours for light or for dark pages.

    Attributes:
        ink: text.
        quiet: axes, and what is not important.
        grid: grid lines.
        series: lines and points; they can be told apart with any kind of colour vision.
        alarm: limits.
    """

    ink: str
    quiet: str
    grid: str
    series: tuple[str, ...]
    alarm: str


THEMES = {
    "light": Theme("#1f2328", "#57606a", "#d8dee4", ("#0b62a8", "#c2510c", "#1a7f37", "#8250df"), "#b3261e"),
    "dark": Theme("#e6edf3", "#9aa4ae", "#30363d", ("#58a6ff", "#f0883e", "#56d364", "#bc8cff"), "#ff7b72"),
}
