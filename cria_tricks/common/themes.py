"""The colours of every figure, for pages in light and in dark mode."""

from typing import NamedTuple


class Theme(NamedTuple):
    """Colours of one mode; the series' colours can be told apart with any kind of colour vision.

    Attributes:
        ink: of text.
        quiet: of axes and of what is said by the way.
        grid: of grid lines.
        series: of the series, the first one first.
        alarm: of what does not fit.
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
