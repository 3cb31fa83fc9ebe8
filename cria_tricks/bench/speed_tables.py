"""Lay out studies of speed as tables: our points beside TRL's, and where the time of a micro-batch goes."""

import statistics
from collections.abc import Mapping
from typing import Any

from cria_tricks.bench.tables import table
from cria_tricks.common.units import human


def frontier(result: Mapping[str, Any]) -> str:
    """Lay out every point of the frontier; beside TRL's points, how our ``fast`` and ``small`` compare with them."""
    points = result["points"]
    rows = []
    for name, entry in points.items():
        speeds = list(entry["speeds"].values())
        speed = ""
        if speeds:
            speed = _with_range(statistics.median(speeds), min(speeds), max(speeds), 1)
        peak = ""
        if "peak_bytes" in entry:
            peak = human(entry["peak_bytes"])
        if "bytes_of" in entry:
            peak = f"{human(points[entry['bytes_of']]['peak_bytes'])} (as the line {entry['bytes_of']})"
        faster = smaller = ""
        if entry["way"] == "trl":
            faster = _faster(points.get("fast"), entry)
            smaller = _smaller(points.get("small"), entry)
        rows.append((name, speed, peak, faster, smaller))
    columns = ("", "trained tokens/s", "peak", "speed of ours `fast` over it", "bytes of ours `small` over it")
    return table(columns, rows)


def _faster(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any]) -> str:
    found = over(ours, theirs) if ours else {}
    if "speed" not in found:
        return ""
    return _with_range(found["speed"], found["slowest"], found["fastest"], 2)


def _with_range(middle: float, low: float, high: float, digits: int) -> str:
    """Write a median with its range; a single value has none."""
    if low == high:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _smaller(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any]) -> str:
    found = over(ours, theirs) if ours else {}
    if "bytes" not in found:
        return ""
    return f"{found['bytes']:.2f}"


def step_profile(result: Mapping[str, Any]) -> str:
    """Lay out the share that each group of operations has in the time of a micro-batch."""
    ways = result["ways"]
    rows = []
    for group in next(iter(ways.values()))["seconds"]:
        cells = []
        for way in ways.values():
            share = way["seconds"][group] / sum(way["seconds"].values())
            cells.append(f"{share:.1%} in {way['calls'][group]:,} calls")
        rows.append((group, *cells))
    rows.append(("a micro-batch", *(f"{way['wall_seconds']:.2f} s" for way in ways.values())))
    return table(("own time of", *ways), rows)


def over(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of two points of the frontier: of their speeds, run by run, and of their bytes."""
    found = {}
    speeds = theirs["speeds"]
    ratios = [speed / speeds[run] for run, speed in ours["speeds"].items() if run in speeds]
    if ratios:
        found = {"speed": statistics.median(ratios), "slowest": min(ratios), "fastest": max(ratios)}
    if "peak_bytes" in ours and "peak_bytes" in theirs:
        found["bytes"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return found


def public_runs(found: Mapping[str, Any]) -> str:
    """Lay out the seconds of public runs beside what is predicted for them."""
    columns = (
        "run",
        "card",
        "seconds of a step",
        "predicted",
        "share of the peaks",
        "in the fit of its card",
        "inside",
    )
    rows = []
    for run in found["predictions"]:
        fit = "left out here" if run["left_out"] else "for launches" if run["waits"] else "never"
        span = f"{run['low']:.2f} to {run['high']:.2f}"
        inside = "yes" if run["inside"] else "no"
        rows.append((run["id"], run["card"], f"{run['measured']:.2f}", span, f"{run['share']:.2f}", fit, inside))
    return table(columns, rows)


def seconds_error(found: Mapping[str, Any]) -> str:
    """Lay out predicted and measured seconds of a step on a calibrated machine."""
    columns = ("set", "tokens", "predicted", "range", "measured", "error")
    rows = []
    for run in found["runs"]:
        span = f"{run['low']:.2f} to {run['high']:.2f}"
        numbers = (f"{run['predicted']:.2f}", span, f"{run['measured']:.2f}", f"{run['error']:+.0%}")
        rows.append((f"`{run['set'] or 'everything off'}`", str(run["tokens"]), *numbers))
    return table(columns, rows)
