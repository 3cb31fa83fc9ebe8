"""Draw figures of results for light and dark pages; the same data always gives the same file.

This module measures nothing. It draws bytes and speeds as they were measured or counted, with ratios, errors and growth
exponents computed from them. ``style.save`` writes an SVG in which letters are paths, so it looks the same everywhere.
"""

import operator
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cria_tricks.bench import growth
from cria_tricks.bench.growth import Curve
from cria_tricks.bench.results import Case, by_device
from cria_tricks.bench.style import GIB, MARKERS, Drawing, Theme, marked, panels, readable, short
from cria_tricks.hardware.device import T4


def ladder(ladder_steps: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """Draw the peak of Llama-3.2-1B while techniques are switched on one after the other, and the memory of a T4.

    Args:
        ladder_steps: for each step of the ladder, by its label, ``peak_bytes`` and whether it ``fits`` a T4.
    """

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=0.34 * len(ladder_steps) + 1.0)
        peaks = [step["peak_bytes"] / GIB for step in ladder_steps.values()]
        places = range(len(peaks))
        fits = [step["fits"] for step in ladder_steps.values()]
        bars = {True: theme.ink, False: theme.quiet}  # no colour: on other pictures colours are parts of the memory
        words = {True: theme.ink, False: theme.quiet}
        axes.barh(places, peaks, color=[bars[ok] for ok in fits], height=0.66)
        for place, peak, ok in zip(places, peaks, fits, strict=True):
            axes.text(peak, place, f" {peak:.1f} GiB", va="center", color=words[ok])
        axes.set_yticks(places, readable(ladder_steps))
        # The y axis points down, so the first bar is at the top. Above it is room for the label of the T4's line.
        axes.set(xlabel="peak of a training step, GiB", xlim=(0, max(peaks) * 1.12), ylim=(len(peaks) - 0.4, -1.2))
        capacity(axes, theme)
        axes.grid(axis="x")
        return figure

    return draw


def capacity(axes: Axes, theme: Theme) -> None:
    """Draw the memory of a T4 as a vertical line through horizontal bars, with a label above the first bar.

    Numbers behind bars that would lie on the line move to its right side.

    Args:
        axes: the panel, with its bars, numbers and limits: the x axis is in GiB, the first bar is at y = 0, and the y
            axis points down.
        theme: the colours.
    """
    has = T4.memory_bytes / GIB
    width = 0.13 * axes.get_xlim()[1]  # of a number: nobody knows it yet, because the figure is laid out later
    for text in axes.texts:
        if has - width < text.get_position()[0] < has:
            text.set_x(has)
    axes.axvline(has, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(has, -0.75, f" a T4 has {has:.1f} GiB", color=theme.alarm, va="center")


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, Drawing]:
    """Return the figures that can be drawn of any set of cases, by name; a figure without data is left out.

    Args:
        cases: cases of any devices.
        counted: results of the dry runs in which one size grows, by label (see :func:`growth.counted`).
    """
    cases = list(cases)
    found: dict[str, Drawing] = {}
    for name, compared in (("tricks", pairs(cases)), ("together", capstone_pairs(cases))):
        if compared:
            found[name] = ratios(compared)
    if any(estimate_error(case) is not None for case in cases):
        found["errors"] = errors(cases)
    for what, label in growth.AXES.items():
        by_bytes = growth.counted(counted, what) + growth.measured(cases, what, PEAK)
        by_seconds = growth.measured(cases, what, STEP)
        if by_bytes or by_seconds:
            found[f"growth_{what}"] = growing(label, by_bytes, by_seconds)
    return found


PEAK = operator.attrgetter("peak_allocated_bytes")
"""Read the peak of a case (bytes)."""
TOKEN = operator.attrgetter("seconds_per_token")
"""Read a case's time for each trained token (seconds)."""
STEP = operator.attrgetter("median_seconds")
"""Read a case's median time for a step (seconds)."""


def estimate_error(case: Case) -> float | None:
    """Compute how far a case's estimated peak is above the measured one (per cent); ``None`` if either is missing."""
    if not case.estimated_bytes or not case.peak_allocated_bytes:
        return None
    return 100 * (case.estimated_bytes / case.peak_allocated_bytes - 1)


class Pair(NamedTuple):
    """The same optimizer step without a switch and with it.

    Attributes:
        label: the switch.
        series: the group of points that share a colour: the device, or the way of comparing.
        off: the step without the switch.
        on: the step with the switch.
    """

    label: str
    series: str
    off: Case
    on: Case


APART = ("together", "growth", "interactions", "peers")
"""Benchmarks that have their own figures or tables."""


def pairs(cases: Iterable[Case]) -> list[Pair]:
    """Pair every trick's cases with their baselines on the same device."""
    found = []
    for case, other in against(case for case in cases if case.bench not in APART):
        label = case.bench
        if case.name != "on":  # "on" would add nothing to the name of the bench
            label += f": {case.name}"
        found.append(Pair(label, case.device, other, case))
    return found


def capstone_pairs(cases: Iterable[Case]) -> list[Pair]:
    """Pair each switch of the capstone twice: with only the switches that it needs, and with all the others."""
    found = [case for case in cases if case.bench == "together"]
    several = len(by_device(found)) > 1
    made = []
    for case, other in against(found):
        kind, _, field = case.name.partition("_")
        where = f", {case.device}" if several else ""
        if kind == "alone":
            made.append(Pair(field, f"alone{where}", other, case))
        elif kind == "removed":  # here the case is the step without the switch
            made.append(Pair(field, f"beside all others{where}", case, other))
    return made


def against(cases: Iterable[Case]) -> Iterator[tuple[Case, Case]]:
    """Yield each case with its baseline, if both have run."""
    cases = [case for case in cases if case.status == "ok"]
    found = {(case.device, case.bench, case.name): case for case in cases}
    for case in cases:
        baseline = found.get((case.device, case.bench, case.against))
        if baseline:
            yield case, baseline


def ratios(compared: Sequence[Pair]) -> Drawing:
    """Draw how a step with a switch compares with the same step without it: ratios of bytes and of time per token."""
    labels = list(dict.fromkeys(pair.label for pair in compared))
    series = list(dict.fromkeys(pair.series for pair in compared))
    measures = (("bytes, times those without", PEAK), ("seconds of a token, times those without", TOKEN))

    def draw(theme: Theme) -> Figure:
        figure, all_axes = panels(2, height=0.27 * len(labels) + 1.3, sharey=True)
        for axes, (title, measure) in zip(all_axes, measures, strict=True):
            for number, name in enumerate(series):
                xs = []
                ys = []
                for pair in compared:
                    on = measure(pair.on)
                    off = measure(pair.off)
                    if pair.series == name and on and off:
                        xs.append(on / off)
                        ys.append(labels.index(pair.label))
                axes.scatter(xs, ys, s=26, **marked(theme, number), label=name, zorder=3)
            axes.axvline(1, color=theme.quiet, linewidth=1)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set(xlabel=title, ylim=(len(labels) - 0.4, -0.6))
            axes.grid()
        all_axes[0].set_yticks(range(len(labels)), labels)
        if len(series) > 1:
            figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=7.5)
        return figure

    return draw


def frontier(result: Mapping[str, Any]) -> Drawing:
    """Draw peak memory against speed, for our switch sets and for TRL's flags.

    On a CPU the bytes inside compiled kernels cannot be counted. So a compiled point gets the bytes of another point,
    its uncompiled twin, and is drawn hollow.

    Args:
        result: ``trl``, TRL's version, and ``points`` by name: ``way``, ``speeds`` by run, and ``peak_bytes``, or the
            twin's name in ``bytes_of``.
    """
    points = {name: entry for name, entry in result["points"].items() if entry["speeds"]}
    labels = {"ours": "cria_tricks", "trl": f"TRL {result['trl']}"}

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=4.2)
        for number, (way, label) in enumerate(labels.items()):
            mine = {name: entry for name, entry in points.items() if entry["way"] == way}
            twins = {entry.get("bytes_of") for entry in mine.values()}
            peaks = {name: points[entry.get("bytes_of", name)]["peak_bytes"] / GIB for name, entry in mine.items()}
            colour = theme.series[number]
            marker = MARKERS[number]
            above = True
            for name in _from_left(peaks, twins):
                hollow = "bytes_of" in mine[name]
                x = peaks[name]
                y = statistics.median(mine[name]["speeds"].values())
                face = "none" if hollow else colour
                axes.scatter(x, y, s=46, facecolor=face, edgecolor=colour, marker=marker, zorder=3)
                # Write names above and below in turn, so that neighbours do not overlap. A hollow point and its twin
                # have the same x, so the hollow point's name goes above and the twin's below.
                above = hollow or (name not in twins and not above)
                over = 5 if above else -12
                beside = 6
                align = "left"
                # At the right edge of the figure there is no room for a name. In our results TRL's points reach it.
                if way == "trl" and x > 0.9 * max(peaks.values()):
                    beside = -6
                    align = "right"
                axes.annotate(name, (x, y), xytext=(beside, over), textcoords="offset points", color=colour, ha=align)
            axes.scatter([], [], s=46, color=colour, marker=marker, label=label)
        axes.set(xlabel="peak of a training step, GiB", ylabel="trained tokens per second")
        axes.margins(0.15)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid()
        axes.legend(loc="lower right")
        return figure

    return draw


def _from_left(peaks: Mapping[str, float], twins: Collection[str]) -> list[str]:
    """Sort points by their bytes; of two points with the same bytes, the twin comes last."""
    return sorted(peaks, key=lambda name: (peaks[name], name in twins))


def growing(what: str, byte_curves: Sequence[Curve], second_curves: Sequence[Curve]) -> Drawing:
    """Draw bytes and seconds against a size that grows, on logarithmic axes, with the exponent of each line.

    Args:
        what: the label of the size.
        byte_curves: peaks (bytes).
        second_curves: times of a step (seconds).
    """
    panes = [(byte_curves, "peak of a training step, GiB", GIB), (second_curves, "seconds of a step", 1)]
    panes = [pane for pane in panes if pane[0]]
    names = [_split(curve) for curve in (*byte_curves, *second_curves)]
    recipes = list(dict.fromkeys(recipe for recipe, _ in names))
    places = list(dict.fromkeys(place for _, place in names))

    def draw(theme: Theme) -> Figure:
        figure, all_axes = panels(len(panes), height=3.6 + 0.17 * max(len(byte_curves), len(second_curves)))
        for axes, (curves, label, unit) in zip(all_axes, panes, strict=True):
            for curve in curves:
                recipe, place = _split(curve)
                power = ""
                if len(curve.xs) > 1:
                    power = f", grows like x^{curve.exponent:.2f}"
                axes.plot(
                    curve.xs,
                    [y / unit for y in curve.ys],
                    color=theme.series[recipes.index(recipe) % 4],
                    marker=MARKERS[places.index(place) % 4],
                    markersize=4,
                    linewidth=1.4,
                    label=curve.label + power,
                )
            if unit == GIB:
                _memory_of_a_t4(axes, theme)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            ticks = _ticks(curves)
            axes.set_xticks(ticks, [short(x) for x in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set(xlabel=what, ylabel=label)
            axes.grid()
            axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        return figure

    return draw


def _split(curve: Curve) -> tuple[str, str]:
    """Split a curve's label into the recipe, which decides the colour, and the rest, which decides the marker.

    The rest is the device, e.g. ``on a T4``. The model's name comes before it, unless the model is what grows.
    """
    recipe, _, place = curve.label.partition(", ")
    return recipe, place


def _memory_of_a_t4(axes: Axes, theme: Theme) -> None:
    has = T4.memory_bytes / GIB
    axes.axhline(has, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        "a T4", (0.01, has), xycoords=("axes fraction", "data"), color=theme.alarm,
        xytext=(0, 3), textcoords="offset points",
    )  # fmt: skip


def _ticks(curves: Sequence[Curve]) -> list[float]:
    """Choose the sizes that get a label on the axis: each is more than 1.5 times the last, so no labels overlap."""
    sizes: set[float] = set()
    for curve in curves:
        sizes.update(curve.xs)
    ticks: list[float] = []
    for size in sorted(sizes):
        if not ticks or size > 1.5 * ticks[-1]:
            ticks.append(size)
    return ticks


def errors(cases: Iterable[Case]) -> Drawing:
    """Draw how far estimated peaks are above the measured ones, as a cumulative distribution for each device."""
    found = {}
    for device, some in by_device(cases).items():
        off = [estimate_error(case) for case in some]
        found[device] = sorted(error for error in off if error is not None)

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=2.8)
        for number, (device, values) in enumerate(found.items()):
            # The distribution steps from n / N to (n + 1) / N at its n-th value, so draw the point in the middle.
            shares = [100 * (n + 0.5) / len(values) for n in range(len(values))]
            axes.plot(
                values, shares, **marked(theme, number), markersize=3.5,
                linewidth=0, label=f"{device}: {len(values)} cases",
            )  # fmt: skip
        axes.axvline(0, color=theme.quiet, linewidth=1)
        axes.set(xlabel="estimated against measured, %", ylabel="cases, % of them below")
        axes.grid()
        axes.legend(fontsize=7.5)
        return figure

    return draw
