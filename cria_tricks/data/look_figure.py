"""Draw a look at a data set: the lengths of its rows by kind, and how many rows of each kind there are."""

import io
from collections.abc import Mapping

from cria_tricks.common.themes import THEMES
from cria_tricks.data.look import Look

_LIGHT = THEMES["light"]
"""The picture has a white background of its own, so it is the same in both modes."""
BINS = 24
"""The bars of the histogram."""


def draw(looks: Mapping[str, Look]) -> bytes:
    """Draw the histogram of the training rows' lengths and the rows of each kind, and return the picture as a PNG.

    Args:
        looks: the look at the rows of ``train``, and of ``eval`` if there are some.
    """
    # matplotlib starts slowly, and most looks draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and without pyplot's global state
    lengths, kinds = figure.subplots(1, 2, width_ratios=(3, 2))
    names = dict.fromkeys(kind for look in looks.values() for kind in look.kinds)
    colours = {name: _LIGHT.parts[number % len(_LIGHT.parts)] for number, name in enumerate(names)}
    _histogram(lengths, looks["train"], colours)
    _bars(kinds, looks, colours)
    for axes in (lengths, kinds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25)
    figure.legend(*lengths.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=8)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


def _histogram(axes, look: Look, colours: Mapping[str, str]) -> None:
    """Draw the lengths, the kinds stacked, with a line at ``data.max_length`` if a row comes near it."""
    axes.set(xlabel="length of a row, tokens", ylabel="training rows", title="Lengths")
    lengths: dict[str, list[int]] = {kind: [] for kind in look.kinds}
    for row in look.counted:
        lengths[row.kind].append(row.tokens or 0)
    if not look.counted:
        axes.text(0.5, 0.5, "no lengths were read", ha="center", transform=axes.transAxes, color=_LIGHT.quiet)
        return
    shades = [colours[kind] for kind in lengths]
    axes.hist(list(lengths.values()), bins=BINS, stacked=True, color=shades, label=list(lengths))
    longest = max(row.tokens or 0 for row in look.counted)
    # Far to the right of all rows the line would squeeze the bars.
    if longest > 0.7 * look.max_length:
        axes.axvline(look.max_length, color=_LIGHT.alarm, linestyle="--", label=f"data.max_length={look.max_length:,}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)


def _bars(axes, looks: Mapping[str, Look], colours: Mapping[str, str]) -> None:
    """Draw a bar for each kind, of each part beside the other."""
    names = list(colours)
    height = 0.8 / len(looks)
    for number, (part, look) in enumerate(looks.items()):
        rows = [look.kinds[name] for name in names]
        middles = [place + (number - (len(looks) - 1) / 2) * height for place in range(len(names))]
        bars = axes.barh(middles, rows, height, color=list(colours.values()), alpha=1 if part == "train" else 0.45)
        axes.bar_label(bars, labels=[f"{count:,} {part}" for count in rows], padding=3, color=_LIGHT.quiet)
    axes.set(xlabel="rows", title="Kinds of rows", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.margins(x=0.25)  # room for the label of the longest bar
    axes.xaxis.get_major_locator().set_params(integer=True)
