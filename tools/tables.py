"""The tables of the benchmarks' pages, as Markdown, from committed results."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cria_tricks.bench import tables
from cria_tricks.bench.results import Case, by_device
from cria_tricks.bench.tables import BESIDE_BASELINE, PEAK, TOKEN, Measure, times
from cria_tricks.common.markdown_table import table
from cria_tricks.common.units import human, off_by
from tools import compared
from tools.compared import APART, STEP, Curve, Pair

Found = Mapping[str, Any]
"""What a study says, or one of its cases."""


def of(entries: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Lay out entries, one line each: a column's heading, and what it says of an entry."""
    rows = []
    for entry in entries:
        rows.append([say(entry) for say in columns.values()])
    return table(list(columns), rows)


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return the tables of measured cases, by name.

    Args:
        cases: cases of any devices.
        counted: results of the dry runs of growth, by label (see ``compared.counted``).
    """
    cases = list(cases)
    curves = {}
    for kind, what in compared.AXES.items():
        curves[f"bytes with {what}"] = compared.counted(counted, kind) + compared.measured(cases, kind, PEAK)
        curves[f"seconds with {what}"] = compared.measured(cases, kind, STEP)
    return {
        "tricks": tables.tricks(case for case in cases if case.bench not in APART),
        "ladder_steps": ladder_steps(cases),
        "together": toggles(compared.capstone_pairs(cases)),
        "interactions": interactions(cases),
        "peers": tables.tricks(case for case in cases if case.bench == "peers"),
        "growth": growth(curves),
    }


def ladder_steps(cases: Iterable[Case]) -> str:
    """Lay out the measured ladder of the capstone, in which each step switches on one more technique."""
    found = []
    for some in by_device(case for case in cases if case.bench == "together").values():
        # Each step names the step below as its baseline. Begin at "off" and follow these names, as in a linked list.
        above = {case.against: case for case in some if case.name.startswith("ladder_")}
        chain = [case for case in some if case.name == "off"][:1]
        while chain and chain[-1].name in above:
            chain.append(above[chain[-1].name])
        found.append(f"{tables.heading(some)}\n\n{tables.of_cases(chain, BESIDE_BASELINE)}")
    return "\n\n".join(found)


def ladder(cases: Mapping[str, Found]) -> str:
    """Lay out every step of the ladder by dry run, and how far the estimate by hand is from its peak."""
    entries: list[dict[str, str]] = []
    before = None
    for label, case in cases.items():
        peak = case["peak_bytes"]
        entry = {"switch": label, "fits a T4": _fits(case), "peak by dry run": human(peak), "this step": ""}
        if before is not None:
            entry["switch"] = f"+ `{label}`"
            sign = "-" if peak < before else "+"
            entry["this step"] = sign + human(abs(peak - before)) if peak != before else "0"
        entries.append(entry | {"by hand, off by": _by_hand(case)})
        before = peak
    return table(list(entries[0]), [list(entry.values()) for entry in entries])


def _fits(case: Found) -> str:
    return "yes" if case["fits"] else "no"


def _by_hand(case: Found) -> str:
    return off_by(case["estimated_bytes"], case["peak_bytes"])


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def long_rows(study: Found) -> str:
    """Lay out the peaks of one micro-batch by the tokens of its row, counted on a CPU and by hand."""
    columns = {
        "tokens of the row": lambda entry: f"{int(entry[0]):,}",
        "peak": lambda entry: _mib(entry[1]["peak_bytes"]),
        "by hand": lambda entry: _mib(entry[1]["estimated_bytes"]),
        "off by": lambda entry: _by_hand(entry[1]),
    }
    return of(study["cases"].items(), columns)


def without_checkpointing(study: Found) -> str:
    """Lay out peaks without checkpointing by dry run; each label ends with the tokens of the row."""
    columns = {
        "adapters and blocks by": lambda entry: entry[0].partition(": ")[0],
        "tokens of the row": lambda entry: f"{int(entry[0].partition(': ')[2]):,}",
        "peak by dry run": lambda entry: human(entry[1]["peak_bytes"]),
        "fits a T4": lambda entry: _fits(entry[1]),
        "by hand, off by": lambda entry: _by_hand(entry[1]),
    }
    return of(study["cases"].items(), columns)


SHARED = ("none", "context")
"""The strategies whose processes share a row, or that have one process."""


def per_process(cases: Iterable[Found], settings: str) -> str:
    """Lay out the peaks of several processes, by strategy; of those that share a row, in the next table."""
    found: dict[str, dict[int, str]] = {}
    for case in cases:
        if case["settings"] == settings and case["strategy"] not in SHARED:
            name = f"{case['strategy']}, {case['reduce']}" if case["reduce"] else case["strategy"]
            found.setdefault(name, {})[case["processes"]] = _peak(case)
    columns: dict[str, Callable[[Any], str]] = {
        "strategy": lambda entry: entry[0],
        "two processes": lambda entry: entry[1].get(2, ""),
        "four processes": lambda entry: entry[1].get(4, ""),
    }
    return of(found.items(), columns)


def shared_rows(cases: Iterable[Found]) -> str:
    """Lay out the peaks of processes that share a row, by its tokens."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for case in cases:
        if case["strategy"] in SHARED:
            found.setdefault((case["settings"], case["tokens"]), {})[case["processes"]] = _peak(case)
    columns: dict[str, Callable[[Any], str]] = {
        "settings": lambda entry: entry[0][0],
        "tokens of the row": lambda entry: f"{entry[0][1]:,}",
        "one process": lambda entry: entry[1].get(1, ""),
        "two": lambda entry: entry[1].get(2, ""),
        "four": lambda entry: entry[1].get(4, ""),
    }
    return of(found.items(), columns)


def _peak(case: Found) -> str:
    """Write the peak of a case, and how far the bill is off."""
    return f"{_mib(case['peak_bytes'])} ({off_by(case['billed_bytes'], case['peak_bytes'], digits=1)})"


def links(study: Found) -> str:
    """Lay out the seconds of a step of two processes, by the links' model and measured."""
    columns = {
        "strategy": lambda case: case["strategy"],
        "trains": lambda case: case["settings"],
        "computes": lambda case: f"{case['compute_seconds']:.2f}",
        "communicates": lambda case: f"{case['communication_seconds']:.2f}",
        "predicted": lambda case: f"{case['predicted_seconds']:.2f}",
        "measured": lambda case: f"{case['measured_seconds']:.2f}",
        "off by": lambda case: f"{case['error']:+.0%}",
    }
    return of(study["cases"], columns)


def toggles(found: Sequence[Pair]) -> str:
    """Lay out the ratios of bytes and time for each switch of the capstone: alone, and with all the others."""
    series = list(dict.fromkeys(pair.series for pair in found))
    by_name = {(pair.label, pair.series): pair for pair in found}
    rows = []
    for label in dict.fromkeys(pair.label for pair in found):
        cells = [f"`{label}`"]
        for name in series:
            pair = by_name.get((label, name))
            for measure in (PEAK, TOKEN):
                cells.append(times(pair.on, pair.off, measure) if pair else "")
        rows.append(cells)
    columns = ["switch"]
    for name in series:
        columns += [f"{name}: bytes", f"{name}: time"]
    return table(columns, rows)


FOUR = ("neither", "first", "second", "both")
"""The four cases of a pair of tricks."""


def interactions(cases: Iterable[Case]) -> str:
    """Lay out pairs of tricks: a step with neither, one or both, and what both would give if they were independent."""
    rows = []
    for device, some in by_device(case for case in cases if case.bench == "interactions").items():
        found: dict[str, dict[str, Case]] = {}
        for case in some:
            pair, _, which = case.name.rpartition("-")
            found.setdefault(pair, {})[which] = case
        for pair, four in found.items():
            name = pair.replace("_", " ")
            peaks = [human(size) if size is not None else "" for size in _of_four(four, PEAK)]
            seconds = [f"{value:.3g} s" if value is not None else "" for value in _of_four(four, STEP)]
            rows.append((name, "peak", *peaks, device))
            rows.append((name, "seconds", *seconds, device))
    return table(("pair", "", *FOUR, "if independent", "device"), rows)


def _of_four(four: Mapping[str, Case], measure: Measure) -> list[float | None]:
    """Return a measure of the four cases, and the value that both tricks would give if they were independent."""
    values = [measure(four[which]) if which in four else None for which in FOUR]
    neither, first, second, _ = values
    if not neither or not first or not second:
        return [*values, None]
    if measure is PEAK:  # what the tricks save adds up
        return [*values, first + second - neither]
    return [*values, first * second / neither]  # each trick multiplies the time by its own factor


def trajectories(study: Found) -> str:
    """Lay out how far the losses of a run with a switch are from those of the run without it."""
    columns = {
        "switch": lambda entry: f"`{entry[0]}`",
        "largest difference of a loss": lambda entry: f"{entry[1]['largest']:.1e}",
        "mean": lambda entry: f"{entry[1]['mean']:.1e}",
        "its claim": lambda entry: entry[1]["claim"],
    }
    return of(study["cases"].items(), columns)


def growth(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Lay out the exponents of all growth figures."""
    rows = []
    for what, some in curves.items():
        for curve in some:
            if len(curve.xs) > 1:  # one point has no slope
                rows.append((what, curve.label, _sizes(curve.xs[0], curve.xs[-1]), f"{curve.exponent:.2f}"))
    return table(("what grows with what", "recipe", "from, to", "exponent"), rows)


def _sizes(low: float, high: float) -> str:
    """Write two sizes with the unit of the larger one; those under a million have none."""
    for unit, one in (("billion", 1e9), ("million", 1e6)):
        if high >= one:
            return f"{low / one:.3g} to {high / one:.3g} {unit}"
    return f"{low:g} to {high:g}"


def published(entries: Iterable[Mapping[str, str]]) -> str:
    """Lay out published figures of others, each with its source and why it cannot be compared with ours."""
    columns = {
        "what": lambda entry: entry["what"],
        "figure": lambda entry: entry["figure"],
        "on": lambda entry: entry["card"],
        "source": lambda entry: entry["source"],
        "date": lambda entry: entry["date"],
        "not comparable, because": lambda entry: entry["why"],
    }
    return of(entries, columns)


def frontier(study: Found) -> str:
    """Lay out every point of the frontier; beside TRL's points, how our ``fast`` and ``small`` compare with them."""
    points = study["points"]

    def peak(point: Found) -> str:
        if "bytes_of" in point:
            return f"{human(points[point['bytes_of']]['peak_bytes'])} (as the line {point['bytes_of']})"
        return human(point["peak_bytes"]) if "peak_bytes" in point else ""

    def speed(point: Found) -> str:
        speeds = list(point["speeds"].values())
        return _with_range(statistics.median(speeds), min(speeds), max(speeds), 1) if speeds else ""

    def faster(point: Found) -> str:
        found = over(points.get("fast"), point)
        return _with_range(found["speed"], found["slowest"], found["fastest"], 2) if "speed" in found else ""

    def smaller(point: Found) -> str:
        found = over(points.get("small"), point)
        return f"{found['bytes']:.2f}" if "bytes" in found else ""

    columns = {
        "": lambda entry: entry[0],
        "trained tokens/s": lambda entry: speed(entry[1]),
        "peak": lambda entry: peak(entry[1]),
        "speed of ours `fast` over it": lambda entry: faster(entry[1]),
        "bytes of ours `small` over it": lambda entry: smaller(entry[1]),
    }
    return of(points.items(), columns)


def _with_range(middle: float, low: float, high: float, digits: int) -> str:
    """Write a median with its range; a single value has none."""
    if low == high:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def over(ours: Found | None, theirs: Found) -> dict[str, float]:
    """Return the ratios of a point of ours to one of TRL's: of their speeds, run by run, and of their bytes."""
    found: dict[str, float] = {}
    if not ours or theirs["way"] != "trl":
        return found
    speeds = theirs["speeds"]
    ratios = [speed / speeds[run] for run, speed in ours["speeds"].items() if run in speeds]
    if ratios:
        found = {"speed": statistics.median(ratios), "slowest": min(ratios), "fastest": max(ratios)}
    if "peak_bytes" in ours and "peak_bytes" in theirs:
        found["bytes"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return found


def step_profile(study: Found) -> str:
    """Lay out the share that each group of operations has in the time of a micro-batch."""
    ways = study["ways"]
    rows = []
    for group in next(iter(ways.values()))["seconds"]:
        cells = []
        for way in ways.values():
            share = way["seconds"][group] / sum(way["seconds"].values())
            cells.append(f"{share:.1%} in {way['calls'][group]:,} calls")
        rows.append((group, *cells))
    rows.append(("a micro-batch", *(f"{way['wall_seconds']:.2f} s" for way in ways.values())))
    return table(("own time of", *ways), rows)


def public_runs(study: Found) -> str:
    """Lay out the seconds of public runs beside what is predicted for them."""

    def fitted(run: Found) -> str:
        if run["left_out"]:
            return "left out here"
        return "for launches" if run["waits"] else "never"

    columns = {
        "run": lambda run: run["id"],
        "card": lambda run: run["card"],
        "seconds of a step": lambda run: f"{run['measured']:.2f}",
        "predicted": lambda run: f"{run['low']:.2f} to {run['high']:.2f}",
        "share of the peaks": lambda run: f"{run['share']:.2f}",
        "in the fit of its card": fitted,
        "inside": lambda run: "yes" if run["inside"] else "no",
    }
    return of(study["predictions"], columns)


def seconds_error(study: Found) -> str:
    """Lay out predicted and measured seconds of a step on a calibrated machine."""
    columns = {
        "set": lambda run: f"`{run['set'] or 'everything off'}`",
        "tokens": lambda run: str(run["tokens"]),
        "predicted": lambda run: f"{run['predicted']:.2f}",
        "range": lambda run: f"{run['low']:.2f} to {run['high']:.2f}",
        "measured": lambda run: f"{run['measured']:.2f}",
        "error": lambda run: f"{run['error']:+.0%}",
    }
    return of(study["runs"], columns)
