"""Draw figures of results, light and dark; the same data gives the same bytes.

Bytes and speeds are drawn as they were measured or counted; nothing here measures, and only growth's exponents are
computed. ``save`` makes an SVG whose letters are paths, so that it looks alike everywhere.
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


def ladder(rungs: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """Draw the peak bytes of Llama-3.2-1B, one toggle after the other, beside what a T4 has."""

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=0.34 * len(rungs) + 1.0)
        peaks = [rung["peak_bytes"] / GIB for rung in rungs.values()]
        places = range(len(peaks))
        fits = [rung["fits"] for rung in rungs.values()]
        bars = {True: theme.series[0], False: theme.quiet}
        words = {True: theme.ink, False: theme.quiet}
        axes.barh(places, peaks, color=[bars[ok] for ok in fits], height=0.66)
        for place, peak, ok in zip(places, peaks, fits, strict=True):
            axes.text(peak, place, f" {peak:.1f} GiB", va="center", color=words[ok])
        capacity(axes, theme)
        axes.set_yticks(places, readable(rungs))
        axes.set(xlabel="peak of a training step, GiB", xlim=(0, max(peaks) * 1.12), ylim=(len(peaks) - 0.4, -1.2))
        axes.grid(axis="x")
        return figure

    return draw


def capacity(axes: Axes, theme: Theme) -> None:
    """Draw the memory of a T4 as a line across bars of GiB."""
    has = T4.memory_bytes / GIB
    axes.axvline(has, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(has, -0.75, f" a T4 has {has:.1f} GiB", color=theme.alarm, va="center")


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, Drawing]:
    """Choose the figures in which a reader's own cases can stand; one without any data is left out.

    Args:
        cases: cases of any devices.
        counted: the dry runs of growth, by their labels.
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
"""Peak of a case (bytes)."""
TOKEN = operator.attrgetter("seconds_per_token")
"""Time of a token (seconds)."""
STEP = operator.attrgetter("median_seconds")
"""Time of a step (seconds)."""


def estimate_error(case: Case) -> float | None:
    """Compute how far the estimated peak of a case is off (percent); ``None`` without estimate or measurement."""
    if not case.estimated_bytes or not case.peak_allocated_bytes:
        return None
    return 100 * (case.estimated_bytes / case.peak_allocated_bytes - 1)


class Pair(NamedTuple):
    """The same optimizer step without a toggle and with it.

    Attributes:
        label: the toggle.
        series: the points of one colour: those of a device, or of a way to compare.
        off: the step without it.
        on: the step with it.
    """

    label: str
    series: str
    off: Case
    on: Case


APART = ("together", "growth", "interactions", "peers")
"""Benches with figures or tables of their own."""


def pairs(cases: Iterable[Case]) -> list[Pair]:
    """Pair every trick's cases with their baselines on the same device."""
    found = []
    for case, other in against(case for case in cases if case.bench not in APART):
        label = case.bench
        if case.name != "on":
            label += f": {case.name}"
        found.append(Pair(label, case.device, other, case))
    return found


def capstone_pairs(cases: Iterable[Case]) -> list[Pair]:
    """Pair the capstone's toggles with their baselines: each alone over what it needs, and each beside all others."""
    found = [case for case in cases if case.bench == "together"]
    several = len(by_device(found)) > 1
    made = []
    for case, other in against(found):
        kind, _, field = case.name.partition("_")
        where = f", {case.device}" if several else ""
        if kind == "alone":
            made.append(Pair(field, f"alone{where}", other, case))
        elif kind == "removed":  # its case is the one without it
            made.append(Pair(field, f"beside all others{where}", case, other))
    return made


def against(cases: Iterable[Case]) -> Iterator[tuple[Case, Case]]:
    """Yield each case that ran and has a baseline that ran, with this baseline."""
    cases = [case for case in cases if case.status == "ok"]
    found = {(case.device, case.bench, case.name): case for case in cases}
    for case in cases:
        baseline = found.get((case.device, case.bench, case.against))
        if baseline:
            yield case, baseline


def ratios(compared: Sequence[Pair]) -> Drawing:
    """Draw two panels of each toggle against the same step without it: bytes, and seconds of a trained token."""
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
    """Draw bytes against speed: our toggle sets, and TRL's flags.

    Hollow points have the bytes of an uncompiled twin.
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
                # Names of neighbours stand on either side, and a twin's name below its hollow point's.
                above = hollow or (name not in twins and not above)
                over = 5 if above else -12
                beside = 6
                align = "left"
                if way == "trl" and x > 0.9 * max(peaks.values()):  # at the right edge there is no room for a name
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
    """Sort points by their bytes; of two with the same bytes the twin comes last."""
    return sorted(peaks, key=lambda name: (peaks[name], name in twins))


def growing(what: str, byte_curves: Sequence[Curve], second_curves: Sequence[Curve]) -> Drawing:
    """Draw bytes and seconds against one thing that grows, both in logarithms, each line with its exponent."""
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
    """Split a curve's label into the recipe, which has the colour, and the place, which has the marker."""
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
    """Choose the sizes that get a label on the axis; labels closer than these would be written over each other."""
    sizes: set[float] = set()
    for curve in curves:
        sizes.update(curve.xs)
    ticks: list[float] = []
    for size in sorted(sizes):
        if not ticks or size > 1.5 * ticks[-1]:
            ticks.append(size)
    return ticks


def errors(cases: Iterable[Case]) -> Drawing:
    """Draw the bill by hand against the measured peak, in per cent, case by case."""
    found = {}
    for device, some in by_device(cases).items():
        off = [estimate_error(case) for case in some]
        found[device] = sorted(error for error in off if error is not None)

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=2.8)
        for number, (device, values) in enumerate(found.items()):
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
