"""Make a figure fit the width of a phone: legends above their panels, long labels in several lines, fewer labels.

A drawing function says nothing of widths: it draws into :func:`cria_tricks.bench.style.panels`, which are narrow while
a narrow variant is saved. What is too wide then is changed here, and :func:`collisions` finds what is left.
"""

import itertools
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox, blended_transform_factory

WIDTH = 4.4
"""Width of a narrow figure (inches): on a phone of 360 pixels, its letters of 9 points are 9 pixels high."""
LABELS = 0.36
"""The share of the width that the labels of a vertical axis may take."""
BETWEEN = 3.0
"""Space between the labels of two ticks (points)."""


def fit(figure: Figure) -> list[str]:
    """Change what does not fit a narrow figure, and return the collisions that are left.

    Args:
        figure: a figure as a drawing function leaves it, with panels of :data:`WIDTH`.
    """
    charts = [axes for axes in figure.axes if axes.axison]
    for axes in figure.axes:
        for text in axes.texts:
            text.set_in_layout(axes.axison)  # else words that are too wide would squeeze a sketch
    for axes in charts:
        _without_unit(axes)
    for legend in list(figure.legends):
        _legend(figure, legend)
    for axes in charts:
        _legend(axes if len(charts) > 1 else figure, axes.get_legend())
    for axes in charts:
        _vertical_labels(axes)
    figure.draw_without_rendering()
    for axes in charts:
        _horizontal_labels(axes)
        _names_of_axes(axes)
        _raise_legend(axes)
    figure.draw_without_rendering()
    for axes in charts:
        _other_sides(axes)
    words = {text: text.get_text() for axes in figure.axes for text in axes.texts}
    if (left := collisions(figure)) and words:
        _break_words(figure, words)
        left = collisions(figure)
    if left and words:
        for text, before in words.items():
            text.set(text=before, fontsize=min(8, text.get_fontsize()))
        _break_words(figure, words)
        left = collisions(figure)
    return left


def collisions(figure: Figure) -> list[str]:
    """Find words that overlap other words, leave the figure, or leave or cross the boxes of a sketch.

    Args:
        figure: any figure; it is laid out anew.
    """
    figure.draw_without_rendering()
    found = [f"{one.get_text()!r} overlaps {other.get_text()!r}" for one, other in _overlaps(figure)]
    found += [f"{text.get_text()!r} leaves the figure" for text in _leaving(figure)]
    return found + [f"{text.get_text()!r} crosses a box" for text in _crossing(figure)]


def _without_unit(axes: Axes) -> None:
    """Leave out the unit behind the numbers at bars, where the name of the axis says it."""
    unit = axes.get_xlabel().rpartition(", ")[2]
    for text in axes.texts:
        if re.fullmatch(rf"\s*[\d.,]+ {re.escape(unit)}", text.get_text()):
            text.set_text(text.get_text().removesuffix(f" {unit}"))


def _legend(place: Any, legend: Legend | None) -> None:
    """Put a legend above its panel, or above all panels, in as many columns as there is room for."""
    if legend is None:
        return
    figure = place if isinstance(place, Figure) else place.figure
    handles, texts = legend.legend_handles, legend.get_texts()
    fontsize = float(texts[0].get_fontsize())
    em = fontsize * figure.dpi / 72
    widest = max(text.get_window_extent().width for text in texts) + 3.2 * em
    columns = max(1, min(len(texts), int(0.97 * figure.bbox.width / widest)))
    where: dict[str, Any] = {"loc": "outside upper left"}
    if isinstance(place, Axes):
        where = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    room = 0.94 * figure.bbox.width - 3.2 * em
    labels = [_within(text, room) for text in texts]
    legend.remove()
    new = place.legend(
        handles, labels, ncols=columns, fontsize=fontsize, columnspacing=1, handlelength=1.6, handletextpad=0.5, **where
    )
    if isinstance(place, Axes):
        new.set_in_layout(False)  # until it has its place, or it would squeeze the panel
    lines = -(-sum(label.count("\n") + 1 for label in labels) // columns)
    figure.set_figheight(figure.get_figheight() + 1.35 * lines * fontsize / 72)


def _within(text: Text, room: float) -> str:
    """Words in as many lines as keep them within a width (pixels)."""
    words, width = text.get_text(), text.get_window_extent().width
    return words if width <= room else _lines(words, int(len(words) * room / width))


def _raise_legend(axes: Axes) -> None:
    """Move a legend above what else stands above its panel, and to the left edge of the figure if it needs the room."""
    legend = axes.get_legend()
    if legend is None:
        return
    box = axes.get_window_extent()
    above = [_extent(text).y1 for text in (*axes.texts, axes.title) if text.get_visible() and text.get_text()]
    top = max([box.y1, *above])
    left = box.x0
    over = legend.get_window_extent().width - (axes.figure.bbox.x1 - box.x0)
    if over > -4:
        left -= over + 4
    legend.set_in_layout(True)
    figure = axes.get_figure(root=True)
    assert figure is not None
    # Its left edge keeps its place in the figure, or a panel that shrinks would pull it.
    where = blended_transform_factory(figure.transFigure, axes.transAxes)
    legend.set_bbox_to_anchor((left / figure.bbox.width, 1 + (top - box.y1) / box.height), where)


def _vertical_labels(axes: Axes) -> None:
    """Break the labels of a vertical axis into lines where they take too much of the width."""
    labels = [label for label in axes.get_yticklabels() if label.get_text()]
    room = LABELS * axes.figure.bbox.width
    if not labels or not isinstance(axes.yaxis.get_major_locator(), FixedLocator):
        return
    if max(label.get_window_extent().width for label in labels) <= room:
        return
    texts = [_within(label, room) for label in axes.get_yticklabels()]
    axes.set_yticks(axes.get_yticks(), texts, fontsize=8, linespacing=0.95)


def _horizontal_labels(axes: Axes) -> None:
    """Where labels of a horizontal axis would touch, leave out numbers, or break words at their spaces or turn them."""
    limits = axes.get_xlim()
    shown = [
        (place, label.get_text())
        for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if min(limits) <= place <= max(limits)
    ]
    places, words = [place for place, _ in shown], [text for _, text in shown]
    if not _touch(axes):
        return
    # Numbers that matplotlib chose, or that grow by a factor, say the scale; all others name what stands there.
    if axes.get_xscale() == "log" or not isinstance(axes.xaxis.get_major_locator(), FixedLocator):
        for step in (2, 3, 4):
            axes.set_xticks(places[::step], words[::step])
            if not _touch(axes):
                return
    axes.set_xticks(places, [text.replace(" ", "\n") for text in words], fontsize=8)
    if _touch(axes):
        axes.set_xticks(places, words, fontsize=8, rotation=35, ha="right", rotation_mode="anchor")


def _touch(axes: Axes) -> bool:
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    boxes = sorted(boxes, key=lambda box: box.x0)
    return any(one.x1 + BETWEEN > other.x0 for one, other in itertools.pairwise(boxes))


def _names_of_axes(axes: Axes) -> None:
    """Break the names of a panel's axes, and its title, into lines."""
    box = axes.get_window_extent()
    for label, room in (
        (axes.xaxis.label, axes.figure.bbox.width * 0.98),
        (axes.yaxis.label, box.height * 1.1),
        (axes.title, axes.figure.bbox.width * 0.98),
    ):
        found = label.get_window_extent()
        length = found.height if label is axes.yaxis.label else found.width
        if label is axes.xaxis.label:
            # It stands below the middle of the panel, so it has less room than the figure is wide.
            room = min(room, 2 * (axes.figure.bbox.x1 - (box.x0 + box.x1) / 2) - 4)
        if length > room:
            label.set_text(_lines(label.get_text(), int(len(label.get_text()) * room / length)))


def _other_sides(axes: Axes) -> None:
    """Move the names of points to other sides of their points where they overlap other names or points."""
    names = [text for text in axes.texts if isinstance(text, Annotation)]
    points = [axes.transData.transform(name.xy) for name in names if name.xycoords == "data"]
    if len(points) != len(names):
        return
    for done, name in enumerate(names):
        x, y = name.xyann
        for right, above in ((x, y), (-x, y), (x, -7 - y), (-x, -7 - y), (-x, -3.5), (x, -3.5)):
            name.xyann = (right, above)
            name.set_horizontalalignment("left" if right > 0 else "right")
            box = _extent(name)
            others = (*(_extent(other) for other in names[:done]), *(Bbox.from_extents(*p - 4, *p + 4) for p in points))
            if box.x0 > 0 and box.x1 < axes.figure.bbox.x1 and not box.count_overlaps(others):
                break
        else:
            name.xyann = (x, y)


def _break_words(figure: Figure, own: Collection[Text]) -> None:
    """Break words in a panel that overlap others, or leave their box, into one more line each time, up to three."""
    for _ in range(3):
        figure.draw_without_rendering()
        wrong = [text for pair in _overlaps(figure) for text in pair] + _crossing(figure) + _leaving(figure)
        for text in {*wrong} & {*own}:
            flat = text.get_text().replace("\n", " ")
            lines = text.get_text().count("\n") + 2
            if lines <= 3:
                text.set_text(_lines(flat, max(-(-len(flat) // lines) + 1, *map(len, flat.split(" ")))))


def _lines(words: str, columns: int) -> str:
    """Break words into lines, and keep spaces in front of them."""
    start = words[: len(words) - len(words.lstrip())]
    # A plus alone says nothing, and a shape is read as one.
    whole = re.sub(r"(?<=\+) |(?<=,) (?=\w+\))", "\N{NO-BREAK SPACE}", words.strip())
    lines = textwrap.wrap(whole, max(columns, 1), break_long_words=False, break_on_hyphens=False)
    return start + "\n".join(lines)


def _texts(figure: Figure) -> Iterator[Text]:
    """All words that a figure shows."""
    found: list[Text] = list(figure.texts)
    legends = list(figure.legends)
    for axes in figure.axes:
        found += axes.texts
        found.append(axes.title)
        if (legend := axes.get_legend()) is not None:
            legends.append(legend)
        if axes.axison:
            found += [axes.xaxis.label, axes.yaxis.label]
            for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                low, high = sorted((low, high))
                ticks = axis.get_major_ticks()
                for tick, place in zip(ticks, axis.get_majorticklocs(), strict=False):
                    if low <= place <= high:
                        found.append(tick.label1)
    for legend in legends:
        found += legend.get_texts()
    return (text for text in found if text.get_visible() and text.get_text().strip())


def _extent(text: Text) -> Bbox:
    """Where words stand, without an annotation's arrow and without the spaces at their ends."""
    return Text.get_window_extent(text) if isinstance(text, Annotation) else text.get_window_extent()


def _overlaps(figure: Figure) -> list[tuple[Text, Text]]:
    texts = list(_texts(figure))
    boxes = [_extent(text) for text in texts]
    found = []
    for (one, its), (other, others) in itertools.combinations(zip(texts, boxes, strict=True), 2):
        turned = one.get_rotation() % 90 and other.get_rotation() % 90
        across = min(its.x1, others.x1) - max(its.x0, others.x0)
        along = min(its.y1, others.y1) - max(its.y0, others.y0)
        if not turned and across > 1 and along > 1.5:
            found.append((one, other))
    return found


def _leaving(figure: Figure) -> list[Text]:
    found = []
    for text in _texts(figure):
        box = _extent(text)
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            found.append(text)
    return found


def _crossing(figure: Figure) -> list[Text]:
    """Words of sketches that leave their box, or reach into another."""
    found = []
    for axes in figure.axes:
        if axes.axison:
            continue
        boxes = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, Rectangle)]
        arrows = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        boxes += [box for box in arrows if box.height < 0.1 * figure.dpi < box.width]  # those that lie flat
        for text in axes.texts:
            its = _extent(text)
            for box in boxes:
                apart = its.x1 < box.x0 - 1 or its.x0 > box.x1 + 1 or its.y1 < box.y0 + 1 or its.y0 > box.y1 - 1
                within = its.x0 > box.x0 and its.x1 < box.x1 and its.y0 > box.y0 - 1 and its.y1 < box.y1 + 1
                if not apart and not within:
                    found.append(text)
                    break
    return found
