"""Draw the figures and write the tables of the benchmarks' pages from committed results; it measures nothing.

    python -m tools.figures                            # docs/assets/benchmarks/*.svg, and the tables of three pages
    python -m tools.figures --into FOLDER              # the same elsewhere, to compare
    python -m tools.figures --into FOLDER --mine FILE  # with your cases, of cria bench or of --benchmark-json

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of NAME -->``; only what is there is drawn. Letters in an
SVG are paths, so it looks the same everywhere, and the same results always give the same file.
"""

import argparse
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cria_tricks.bench import results
from cria_tricks.bench.results import Case, by_device, study
from cria_tricks.bench.tables import PEAK, TOKEN, estimate_error, quality
from cria_tricks.common.figures import GIB, MARKERS, Drawing, Theme, limit, marked, panels, readable, save, short
from cria_tricks.common.themes import THEMES
from cria_tricks.hardware.device import T4
from tools import compared, curated_tables, tables
from tools.compared import STEP, Curve, Pair

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path("docs") / "assets" / "benchmarks"
PAGES = (Path("docs/benchmarks.md"), Path("docs/guide/evaluate.md"), Path("docs/index.md"))
SAYS = {
    "ladder": "Peak bytes of Llama-3.2-1B by dry run, one switch after the other, beside what a T4 has",
    "frontier": "Trained tokens a second against peak bytes, our switches beside TRL's flags",
    "tricks": "Every trick against the same step without it: bytes, and seconds of a token",
    "together": "Every switch of the capstone, alone and beside all others: bytes, and seconds of a token",
    "errors": "The bill by hand against the measured peak, in per cent, case by case",
    "growth_tokens": "Bytes and seconds of a step against the length of a row",
    "growth_rows": "Bytes and seconds of a step against the rows of a micro-batch",
    "growth_model": "Bytes and seconds of a step against the weights of the model",
}
"""Each figure's name -> what it shows in words, for readers who cannot see it."""


def picture(name: str, sentence: str) -> str:
    """Return the HTML of a figure. The browser takes the light or the dark file, whichever the reader prefers.

    Args:
        name: address of the files without ``-light.svg``.
        sentence: what the figure shows.
    """
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">'
    return f'<picture>{dark}<img alt="{sentence}" src="{name}-light.svg"></picture>'


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
        has = T4.memory_bytes / GIB
        limit(axes, theme, has, f"a T4 has {has:.1f} GiB")
        axes.grid(axis="x")
        return figure

    return draw


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, Drawing]:
    """Return the figures that can be drawn of any set of cases, by name; a figure without data is left out.

    Args:
        cases: cases of any devices.
        counted: results of the dry runs in which one size grows, by label (see :func:`compared.counted`).
    """
    cases = list(cases)
    found: dict[str, Drawing] = {}
    for name, found_pairs in (("tricks", compared.pairs(cases)), ("together", compared.capstone_pairs(cases))):
        if found_pairs:
            found[name] = ratios(found_pairs)
    if any(estimate_error(case) is not None for case in cases):
        found["errors"] = errors(cases)
    for what, label in compared.AXES.items():
        by_bytes = compared.counted(counted, what) + compared.measured(cases, what, PEAK)
        by_seconds = compared.measured(cases, what, STEP)
        if by_bytes or by_seconds:
            found[f"growth_{what}"] = growing(label, by_bytes, by_seconds)
    return found


def ratios(found: Sequence[Pair]) -> Drawing:
    """Draw how a step with a switch compares with the same step without it: ratios of bytes and of time per token."""
    labels = list(dict.fromkeys(pair.label for pair in found))
    series = list(dict.fromkeys(pair.series for pair in found))
    measures = (("bytes, times those without", PEAK), ("seconds of a token, times those without", TOKEN))

    def draw(theme: Theme) -> Figure:
        figure, all_axes = panels(2, height=0.27 * len(labels) + 1.3, sharey=True)
        for axes, (title, measure) in zip(all_axes, measures, strict=True):
            for number, name in enumerate(series):
                xs = []
                ys = []
                for pair in found:
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


def drawings(cases: Sequence[Case]) -> dict[str, Drawing]:
    """Return all figures, by name."""
    found: dict[str, Drawing] = {}
    if ladder_study := study("ladder"):
        found["ladder"] = ladder(ladder_study["cases"])
    if frontier_study := study("frontier"):
        found["frontier"] = frontier(frontier_study)
    return found | of_cases(cases, counted_growth())


OF_STUDIES = {
    "ladder": ("ladder", lambda study: tables.ladder(study["cases"])),
    "without_checkpointing": ("without_checkpointing", tables.without_checkpointing),
    "long_rows": ("long_rows", tables.long_rows),
    "per_process": ("per_process", lambda study: tables.per_process(_large(study), "LoRA")),
    "per_process_of_all_weights": ("per_process", lambda study: tables.per_process(_large(study), "all weights")),
    "shared_rows": ("per_process", lambda study: tables.shared_rows(_large(study))),
    "links": ("links", tables.links),
    "frontier": ("frontier", tables.frontier),
    "seconds_error": ("seconds_error", tables.seconds_error),
    "step_profile": ("step_profile", tables.step_profile),
    "trajectories": ("trajectories", tables.trajectories),
    "quality": ("quality", lambda study: quality(study["runs"])),
    "curated": ("kwanzaa_curated_small", lambda study: curated_tables.scores(study, "history_notes")),
    "curated_on_real_rows": ("kwanzaa_curated_small", lambda study: curated_tables.scores(study, "kwanzaa")),
    "curated_answers": ("kwanzaa_curated_small", curated_tables.answers),
    "curated_answer_on_home": ("kwanzaa_curated_small", curated_tables.answer_on_home),
    "real_rows": ("kwanzaa_small", lambda study: curated_tables.scores(study, "kwanzaa")),
    "real_rows_with_the_contract": (
        "kwanzaa_small",
        lambda study: curated_tables.scores(study, "kwanzaa with the contract"),
    ),
}
"""Each table -> the study that it shows, and how."""


def blocks(cases: Sequence[Case]) -> dict[str, str]:
    """Return all tables, by name."""
    found = tables.of_cases(cases, counted_growth())
    benchmarks = ROOT / "benchmarks"
    found["published"] = tables.published(results.read_json(benchmarks / "peers" / "published.json"))
    found["public_runs"] = tables.public_runs(results.read_json(benchmarks / "results" / "published_runs.json"))
    for name, (of_study, lay_out) in OF_STUDIES.items():
        if one := study(of_study):
            found[name] = lay_out(one)
    return found


def _large(study: Mapping[str, Any]) -> list[Any]:
    return [case for case in study["cases"] if case["model"] == "smollm2"]


def counted_growth() -> dict[str, Any]:
    """Return the dry runs of growth."""
    found = study("growth")
    return found["cases"] if found else {}


def with_blocks(text: str, found: Mapping[str, str]) -> str:
    """Return a page with its tables as they should be."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end of \2 -->)",
        lambda match: f"{match[1]}\n{found[match[2]]}\n\n{match[3]}" if match[2] in found else match[0],
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Draw everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT, help="the checkout when left out")
    parser.add_argument("--mine", type=Path, nargs="+", default=[], help="files of yours, drawn beside the others")
    chosen = parser.parse_args()
    if chosen.mine and chosen.into == ROOT:
        parser.error("--mine: name a folder with --into, or your cases would be among the committed ones")
    cases = results.read(results.COMMITTED)
    for file in chosen.mine:
        for case in results.read_cases(file):
            cases.append(case.model_copy(update={"device": f"{case.device} ({file.stem})"}))
    for name, drawing in drawings(cases).items():
        for theme in THEMES:
            path = chosen.into / ASSETS / f"{name}-{theme}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(save(drawing, theme))
    found = blocks(cases)
    for page in PAGES:
        path = chosen.into / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_blocks((ROOT / page).read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
