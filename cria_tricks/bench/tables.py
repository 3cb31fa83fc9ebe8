"""Tables of results, in Markdown: what a case cost, beside what the same step costs without the trick."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cria_tricks.bench import growth as growing
from cria_tricks.bench.figures import APART, PEAK, STEP, TOKEN, Pair, against, capstone_pairs
from cria_tricks.bench.growth import Curve
from cria_tricks.bench.results import Case, by_device
from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.common.units import human

TITLES = {
    "tricks": "Every trick against the step without it",
    "rungs": "The capstone's switches, one after the other",
    "together": "The capstone's switches, alone and beside all others",
    "interactions": "Two at a time",
    "peers": "Beside others, in the same run",
    "growth": "Growth",
}
"""What a table of cases is about."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows."""
    return "\n".join(markdown_table(columns, rows))


def tricks(cases: Iterable[Case]) -> str:
    """Every case of every trick, one table a device, refusals included."""
    return "\n\n".join(f"{heading(some)}\n\n{_cases(some)}" for some in by_device(cases).values())


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """The tables in which a reader's own cases can stand, by name.

    Args:
        cases: of any devices.
        counted: the dry runs of growth, by their labels.
    """
    cases = list(cases)
    curves = {}
    for kind, what in growing.AXES.items():
        curves[f"bytes with {what}"] = growing.counted(counted, kind) + growing.measured(cases, kind, PEAK)
        curves[f"seconds with {what}"] = growing.measured(cases, kind, STEP)
    return {
        "tricks": tricks(case for case in cases if case.bench not in APART),
        "rungs": rungs(cases),
        "together": toggles(capstone_pairs(cases)),
        "interactions": interactions(cases),
        "peers": tricks(case for case in cases if case.bench == "peers"),
        "growth": growth(curves),
    }


def rungs(cases: Iterable[Case]) -> str:
    """The capstone's ladder as it was measured, rung by rung."""
    found = []
    for some in by_device(case for case in cases if case.bench == "together").values():
        by_name = {case.name: case for case in some}
        after = {case.against: case for case in some if case.name.startswith("ladder_")}
        chain, name = [], "off"
        while name in by_name:
            chain.append(by_name[name])
            name = after[name].name if name in after else ""
        found.append(f"{heading(some)}\n\n{_cases(chain)}")
    return "\n\n".join(found)


def heading(cases: Sequence[Case]) -> str:
    """On what, when, with which versions."""
    days = sorted({case.date[:10] for case in cases})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = cases[0].versions
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    models = ", ".join(dict.fromkeys(case.model.removeprefix("random:") for case in cases))
    return f"**{cases[0].device}** ({when}; {models}, random weights; {libraries})"


def _cases(cases: Sequence[Case]) -> str:
    compared = {(case.bench, case.name): other for case, other in against(cases)}
    rows = []
    for case in cases:
        other = compared.get((case.bench, case.name))
        name = f"`{case.bench}` {case.name}"
        if case.status != "ok":
            rows.append((name, f"{case.status}: {case.why}", "", "", _bytes(case.estimated_bytes), "", ""))
            continue
        rows.append(
            (
                name,
                _bytes(case.peak_allocated_bytes),
                _times(case, other, PEAK),
                _error(case),
                _bytes(case.estimated_bytes),
                _speed(case),
                _times(case, other, TOKEN),
            )
        )
    columns = ("case", "peak", "times the baseline's", "estimate off by", "estimated", "tokens/s", "time, times its")
    return table(columns, rows)


def ladder(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """Every rung of the dry run's ladder, and what the bill by hand says of it."""
    rows, before = [], None
    for label, rung in counted.items():
        peak = rung["peak_bytes"]
        step = "" if before is None else f"{'-' if peak < before else '+'}{human(abs(peak - before))}"
        off = 100 * (rung["estimated_bytes"] / peak - 1)
        name = label if before is None else f"+ `{label}`"
        rows.append((name, human(peak), step, "yes" if rung["fits"] else "no", f"{round(off, 2) + 0.0:+.2f} %"))
        before = peak
    return table(("toggle", "peak by dry run", "this step", "fits a T4", "by hand, off by"), rows)


def toggles(compared: Sequence[Pair]) -> str:
    """The capstone's toggles: bytes and time of each alone, and beside all others."""
    series = list(dict.fromkeys(pair.series for pair in compared))
    found = {(pair.label, pair.series): pair for pair in compared}
    rows = []
    for label in dict.fromkeys(pair.label for pair in compared):
        cells = [f"`{label}`"]
        for name in series:
            pair = found.get((label, name))
            cells += [_times(pair.on, pair.off, PEAK), _times(pair.on, pair.off, TOKEN)] if pair else ["", ""]
        rows.append(tuple(cells))
    columns = ["toggle", *(f"{name}: {what}" for name in series for what in ("bytes", "time"))]
    return table(columns, rows)


def interactions(cases: Iterable[Case]) -> str:
    """Two tricks at a time: neither, one, the other, both, and what both would be if each did what it does alone.

    Bytes of one moment add, so there their differences are added; of seconds the ratios are multiplied.
    """
    rows = []
    for device, some in by_device(case for case in cases if case.bench == "interactions").items():
        found: dict[str, dict[str, Case]] = {}
        for case in some:
            pair, _, which = case.name.rpartition("-")
            found.setdefault(pair, {})[which] = case
        for pair, four in found.items():
            for what, measure, write in (("peak", PEAK, _bytes), ("seconds", STEP, _seconds)):
                values = [measure(four[which]) if which in four else None for which in FOUR]
                neither, first, second, _ = values
                alone = None
                if neither and first and second:
                    alone = first + second - neither if measure is PEAK else first * second / neither
                rows.append((pair.replace("_", " "), what, *map(write, (*values, alone)), device))
    return table(("pair", "", *FOUR, "if independent", "device"), rows)


FOUR = ("neither", "first", "second", "both")


def frontier(result: Mapping[str, Any]) -> str:
    """Every point of the frontier, and what our two recipes, ``fast`` and ``small``, are over TRL's."""
    points, rows = result["points"], []
    for name, entry in points.items():
        speeds = list(entry["speeds"].values())
        times = [over(points[ours], entry) if entry["way"] == "trl" and ours in points else {} for ours in OURS]
        fast, small = times
        peak = f"as `{entry['bytes_of']}`" if "bytes_of" in entry else _bytes(entry.get("peak_bytes"))
        rows.append(
            (
                name,
                f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})" if speeds else "",
                peak,
                f"{fast['speed']:.2f} ({fast['slowest']:.2f} to {fast['fastest']:.2f})" if "speed" in fast else "",
                f"{small['bytes']:.2f}" if "bytes" in small else "",
            )
        )
    columns = ("", "trained tokens/s", "peak", "speed of ours `fast` over it", "bytes of ours `small` over it")
    return table(columns, rows)


def quality(runs: Sequence[Mapping[str, Any]]) -> str:
    """What changes the numbers, or what trains, against fp32 LoRA with the same seed: held-out loss and peak."""
    plain = {run["seed"]: run["eval_loss_after"] for run in runs if run["case"] == "fp32"}
    rows = []
    for case in dict.fromkeys(run["case"] for run in runs):
        mine = [run for run in runs if run["case"] == case]
        losses = [run["eval_loss_after"] for run in mine]
        apart = [run["eval_loss_after"] - plain[run["seed"]] for run in mine if run["seed"] in plain]
        peaks = [run["peak_bytes"] for run in mine if "peak_bytes" in run]
        rows.append(
            (
                f"`{case}`",
                str(len(mine)),
                f"{statistics.mean(losses):.4f}",
                f"{max(losses) - min(losses):.4f}" if len(mine) > 1 else "",
                "" if case == "fp32" else " to ".join(f"{end:+.4f}" for end in _ends(apart)),
                _bytes(max(peaks)) if peaks else "",
                f"{mine[0]['trainable']:,}",
            )
        )
    return table(("case", "seeds", "loss", "spread", "against fp32", "peak", "trained weights"), rows)


def _ends(numbers: Sequence[float]) -> list[float]:
    """The smallest and the largest, or the only one."""
    return sorted({min(numbers), max(numbers)}) if numbers else []


OURS = ("fast", "small")


def over(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """One point of the frontier over another: speed by runs of one pair, and bytes."""
    pairs = [ours["speeds"][n] / theirs["speeds"][n] for n in ours["speeds"] if n in theirs["speeds"]]
    found = {"speed": statistics.median(pairs), "slowest": min(pairs), "fastest": max(pairs)} if pairs else {}
    if "peak_bytes" in ours and "peak_bytes" in theirs:
        found["bytes"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return found


def growth(curves: Mapping[str, Sequence[Curve]]) -> str:
    """The exponents of all growth figures."""
    rows = [
        (what, curve.label, f"{curve.xs[0]:g} to {curve.xs[-1]:g}", f"{curve.exponent:.2f}")
        for what, some in curves.items()
        for curve in some
        if len(curve.xs) > 1
    ]
    return table(("what grows with what", "recipe", "from, to", "exponent"), rows)


def published(entries: Iterable[Mapping[str, str]]) -> str:
    """Figures of others, each with its source and what makes it another thing than ours."""
    columns = ("what", "figure", "on", "source", "date", "not comparable, because")
    keys = ("what", "figure", "card", "source", "date", "why")
    return table(columns, [tuple(entry[key] for key in keys) for entry in entries])


def _bytes(count: float | None) -> str:
    return human(count) if count is not None else ""


def _seconds(value: float | None) -> str:
    return f"{value:.3g} s" if value is not None else ""


def _times(case: Case, other: Case | None, measure: Any) -> str:
    mine, its = measure(case), measure(other) if other else None
    return f"{mine / its:.2f}" if mine and its else ""


def _speed(case: Case) -> str:
    speed = case.trained_tokens_per_second or case.tokens_per_second
    return f"{speed:,.0f}" if speed else ""


def _error(case: Case) -> str:
    if not case.estimated_bytes or not case.peak_allocated_bytes:
        return ""
    return f"{100 * (case.estimated_bytes / case.peak_allocated_bytes - 1):+.2f} %"
