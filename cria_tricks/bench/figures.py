"""Figures of results, light and dark: each a function of plain data, the same bytes for the same data.

Bytes and speeds are drawn as they were measured or counted; nothing here measures, and only growth's exponents are
computed. ``save`` makes an SVG whose letters are paths, so that it looks alike everywhere.
"""

import operator
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Peak bytes of Llama-3.2-1B, one toggle after the other, beside what a T4 has."""

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=0.34 * len(rungs) + 1.0)
        peaks = [rung["peak_bytes"] / GIB for rung in rungs.values()]
        places = range(len(peaks))
        fits = [rung["fits"] for rung in rungs.values()]
        colours = [theme.series[0] if ok else theme.quiet for ok in fits]
        axes.barh(places, peaks, color=colours, height=0.66)
        for place, peak, ok in zip(places, peaks, fits, strict=True):
            axes.text(peak, place, f" {peak:.1f} GiB", va="center", color=theme.ink if ok else theme.quiet)
        capacity(axes, theme)
        axes.set_yticks(places, readable(rungs))
        axes.set(xlabel="peak of a training step, GiB", xlim=(0, max(peaks) * 1.12), ylim=(len(peaks) - 0.4, -1.2))
        axes.grid(axis="x")
        return figure

    return draw


def capacity(axes: Axes, theme: Theme) -> None:
    """What a T4 has, as a line across bars of GiB."""
    has = T4.memory_bytes / GIB
    axes.axvline(has, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(has, -0.75, f" a T4 has {has:.1f} GiB", color=theme.alarm, va="center")


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, Drawing]:
    """The figures in which a reader's own cases can stand: those that there is something for.

    Args:
        cases: of any devices.
        counted: the dry runs of growth, by their labels.
    """
    cases = list(cases)
    found: dict[str, Drawing] = {}
    if compared := pairs(cases):
        found["tricks"] = ratios(compared)
    if compared := capstone_pairs(cases):
        found["together"] = ratios(compared)
    if any(case.estimated_bytes and case.peak_allocated_bytes for case in cases):
        found["errors"] = errors(cases)
    for what, label in growth.AXES.items():
        by_bytes = growth.counted(counted, what) + growth.measured(cases, what, PEAK)
        by_seconds = growth.measured(cases, what, STEP)
        if by_bytes or by_seconds:
            found[f"growth_{what}"] = growing(label, by_bytes, by_seconds)
    return found


PEAK, TOKEN, STEP = (
    operator.attrgetter(name) for name in ("peak_allocated_bytes", "seconds_per_token", "median_seconds")
)
"""What is compared of cases: bytes, seconds of a token, seconds of a step."""


class Pair(NamedTuple):
    """The same optimizer step without a toggle and with it."""

    label: str
    series: str
    off: Case
    on: Case


APART = ("together", "growth", "interactions", "peers")
"""Benches with figures or tables of their own."""


def pairs(cases: Iterable[Case]) -> list[Pair]:
    """Every trick's cases beside what they are to be held against, on the same device."""
    found = [case for case in cases if case.bench not in APART]
    return [
        Pair(case.bench if case.name == "on" else f"{case.bench}: {case.name}", case.device, other, case)
        for case, other in against(found)
    ]


def capstone_pairs(cases: Iterable[Case]) -> list[Pair]:
    """The capstone's toggles, each alone over what it needs, and each beside all others."""
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
    """Cases that ran, with those that they are to be held against."""
    cases = [case for case in cases if case.status == "ok"]
    found = {(case.device, case.bench, case.name): case for case in cases}
    for case in cases:
        if other := found.get((case.device, case.bench, case.against)):
            yield case, other


def ratios(compared: Sequence[Pair]) -> Drawing:
    """Two panels, each toggle against the same step without it: bytes, and seconds of a trained token."""
    labels = list(dict.fromkeys(pair.label for pair in compared))
    series = list(dict.fromkeys(pair.series for pair in compared))
    measures = (("bytes, times those without", PEAK), ("seconds of a token, times those without", TOKEN))

    def draw(theme: Theme) -> Figure:
        figure, all_axes = panels(2, height=0.27 * len(labels) + 1.3, sharey=True)
        for axes, (title, measure) in zip(all_axes, measures, strict=True):
            for number, name in enumerate(series):
                points = [
                    (on / off, labels.index(pair.label))
                    for pair in compared
                    if pair.series == name and (on := measure(pair.on)) and (off := measure(pair.off))
                ]
                xs, ys = zip(*points, strict=True) if points else ((), ())
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
    """Bytes against speed: our toggle sets, and TRL's flags; hollow where the bytes are those of an uncompiled twin."""
    points = {name: entry for name, entry in result["points"].items() if entry["speeds"]}

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, height=4.2)
        for number, way in enumerate(("ours", "trl")):
            mine = {name: entry for name, entry in points.items() if entry["way"] == way}
            twins = {entry.get("bytes_of") for entry in mine.values()}
            peaks = {name: points[entry.get("bytes_of", name)]["peak_bytes"] / GIB for name, entry in mine.items()}
            above = True
            for name in sorted(mine, key=lambda name: (peaks[name], name in twins)):
                hollow, x = "bytes_of" in mine[name], peaks[name]
                y = statistics.median(mine[name]["speeds"].values())
                colour = theme.series[number]
                face = "none" if hollow else colour
                axes.scatter(x, y, s=46, facecolor=face, edgecolor=colour, marker=MARKERS[number], zorder=3)
                above = hollow or (name not in twins and not above)  # names of neighbours are on either side
                right = x > 0.9 * max(peaks.values()) and way == "trl"
                axes.annotate(
                    name, (x, y), xytext=(-6 if right else 6, 5 if above else -12), textcoords="offset points",
                    color=colour, ha="right" if right else "left",
                )  # fmt: skip
            label = "cria_tricks" if way == "ours" else f"TRL {result['trl']}"
            axes.scatter([], [], s=46, color=theme.series[number], marker=MARKERS[number], label=label)
        axes.set(xlabel="peak of a training step, GiB", ylabel="trained tokens per second")
        axes.margins(0.15)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid()
        axes.legend(loc="lower right")
        return figure

    return draw


def growing(what: str, byte_curves: Sequence[Curve], second_curves: Sequence[Curve]) -> Drawing:
    """Bytes and seconds against one thing that grows, both in logarithms, each line with its exponent."""

    def draw(theme: Theme) -> Figure:
        measured = [(byte_curves, "peak of a training step, GiB", GIB), (second_curves, "seconds of a step", 1)]
        measured = [(curves, label, unit) for curves, label, unit in measured if curves]
        names = [curve.label.split(", ", 1) for curve in (*byte_curves, *second_curves)]
        recipes, places = (list(dict.fromkeys(column)) for column in zip(*names, strict=True))
        figure, all_axes = panels(len(measured), height=3.6 + 0.17 * max(len(byte_curves), len(second_curves)))
        for axes, (curves, label, unit) in zip(all_axes, measured, strict=True):
            for curve in curves:
                recipe, place = curve.label.split(", ", 1)
                colour, marker = theme.series[recipes.index(recipe) % 4], MARKERS[places.index(place) % 4]
                power = f", grows like x^{curve.exponent:.2f}" if len(curve.xs) > 1 else ""
                axes.plot(
                    curve.xs,
                    [y / unit for y in curve.ys],
                    color=colour,
                    marker=marker,
                    markersize=4,
                    linewidth=1.4,
                    label=curve.label + power,
                )
            if unit == GIB:
                axes.axhline(T4.memory_bytes / GIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
                axes.annotate(
                    "a T4", (0.01, T4.memory_bytes / GIB), xycoords=("axes fraction", "data"), color=theme.alarm,
                    xytext=(0, 3), textcoords="offset points",
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            ticks: list[float] = []
            for x in sorted({x for curve in curves for x in curve.xs}):
                if not ticks or x > 1.5 * ticks[-1]:  # others would be written over each other
                    ticks.append(x)
            axes.set_xticks(ticks, [short(x) for x in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set(xlabel=what, ylabel=label)
            axes.grid()
            axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        return figure

    return draw


def errors(cases: Iterable[Case]) -> Drawing:
    """The bill by hand against the measured peak, in per cent, case by case."""
    found = {
        device: sorted(
            100 * (case.estimated_bytes / case.peak_allocated_bytes - 1)
            for case in some
            if case.estimated_bytes and case.peak_allocated_bytes
        )
        for device, some in by_device(cases).items()
    }

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
