"""Lay out results as Markdown tables: what a case cost, beside the same step without the trick."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cria_tricks.bench import growth as growing
from cria_tricks.bench.figures import APART, PEAK, STEP, TOKEN, Pair, against, capstone_pairs, estimate_error
from cria_tricks.bench.growth import Curve
from cria_tricks.bench.results import Case, by_device, plain_name
from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.common.units import human, off_by

TITLES = {
    "tricks": "Every trick against the step without it",
    "ladder_steps": "The capstone's switches, one after the other",
    "together": "The capstone's switches, alone and beside all others",
    "interactions": "Two at a time",
    "peers": "Beside others, in the same run",
    "growth": "Growth",
}
"""Each table's name -> its heading."""

Measure = Callable[[Case], float | None]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table as text."""
    return "\n".join(markdown_table(columns, rows))


def tricks(cases: Iterable[Case]) -> str:
    """Lay out every case of every trick, refusals included, in one table for each device."""
    return "\n\n".join(f"{heading(some)}\n\n{_cases(some)}" for some in by_device(cases).values())


def of_cases(cases: Iterable[Case], counted: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return the tables that can show a reader's own cases, by name.

    Args:
        cases: cases of any devices.
        counted: results of the dry runs of growth, by label (see ``growth.counted`` in ``bench/growth.py``).
    """
    cases = list(cases)
    curves = {}
    for kind, what in growing.AXES.items():
        curves[f"bytes with {what}"] = growing.counted(counted, kind) + growing.measured(cases, kind, PEAK)
        curves[f"seconds with {what}"] = growing.measured(cases, kind, STEP)
    return {
        "tricks": tricks(case for case in cases if case.bench not in APART),
        "ladder_steps": ladder_steps(cases),
        "together": toggles(capstone_pairs(cases)),
        "interactions": interactions(cases),
        "peers": tricks(case for case in cases if case.bench == "peers"),
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
        found.append(f"{heading(some)}\n\n{_cases(chain)}")
    return "\n\n".join(found)


def heading(cases: Sequence[Case]) -> str:
    """Say on what device cases ran, when, and with which versions."""
    days = sorted(case.date[:10] for case in cases)
    when = " to ".join(sorted({days[0], days[-1]}))
    versions = cases[0].versions
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    models = ", ".join(dict.fromkeys(case.model.removeprefix("random:") for case in cases))
    return f"**{cases[0].device}** ({when}; {models}, random weights; {libraries})"


def _cases(cases: Sequence[Case]) -> str:
    """Lay out cases, those without a baseline first, the others with their ratios to theirs."""
    baselines = {(case.bench, case.name): baseline for case, baseline in against(cases)}
    rows = []
    for case in sorted(cases, key=lambda case: (case.bench, bool(case.against))):
        baseline = baselines.get((case.bench, case.name))
        name = f"`{case.bench}` {plain_name(case.bench, case.name)}"
        if case.status != "ok":
            rows.append((name, f"{case.status}: {case.why}", "", "", "", _bytes(case.estimated_bytes), "", ""))
            continue
        rows.append(
            (
                name,
                _bytes(case.peak_allocated_bytes),
                plain_name(baseline.bench, baseline.name) if baseline else "",
                _times(case, baseline, PEAK),
                _error(case),
                _bytes(case.estimated_bytes),
                _speed(case),
                _times(case, baseline, TOKEN),
            )
        )
    columns = (
        "case",
        "peak",
        "compared with",
        "peak / that",
        "estimate off by",
        "estimated",
        "tokens/s",
        "time / that",
    )
    return table(columns, rows)


def ladder(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out every step of the ladder by dry run, and how far the estimate by hand is from its peak."""
    rows = []
    before = None
    for label, dry_run in counted.items():
        peak = dry_run["peak_bytes"]
        name = label
        step = ""
        if before is not None:
            name = f"+ `{label}`"
            sign = "-" if peak < before else "+"
            step = sign + human(abs(peak - before)) if peak != before else "0"
        fits = "yes" if dry_run["fits"] else "no"
        rows.append((name, fits, human(peak), step, off_by(dry_run["estimated_bytes"], peak)))
        before = peak
    return table(("switch", "fits a T4", "peak by dry run", "this step", "by hand, off by"), rows)


def long_rows(found: Mapping[str, Any]) -> str:
    """Lay out the peaks of one micro-batch by the tokens of its row, counted on a CPU and by hand."""
    rows = []
    for tokens, case in found["cases"].items():
        peak, by_hand = case["peak_bytes"], case["estimated_bytes"]
        sizes = (f"{peak / 2**20:,.1f} MiB", f"{by_hand / 2**20:,.1f} MiB")
        rows.append((f"{int(tokens):,}", *sizes, off_by(by_hand, peak)))
    return table(("tokens of the row", "peak", "by hand", "off by"), rows)


def per_process(cases: Iterable[Mapping[str, Any]], settings: str) -> str:
    """Lay out the peaks of several processes, by strategy; of those that share a row, in the next table."""
    found: dict[str, dict[int, str]] = {}
    for case in cases:
        if case["settings"] == settings and case["strategy"] not in ("none", "context"):
            name = f"{case['strategy']}, {case['reduce']}" if case["reduce"] else case["strategy"]
            found.setdefault(name, {})[case["processes"]] = _peak(case)
    rows = ((name, peaks.get(2, ""), peaks.get(4, "")) for name, peaks in found.items())
    return table(("strategy", "two processes", "four processes"), rows)


def shared_rows(cases: Iterable[Mapping[str, Any]]) -> str:
    """Lay out the peaks of processes that share a row, by its tokens."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for case in cases:
        if case["strategy"] in ("none", "context"):
            found.setdefault((case["settings"], case["tokens"]), {})[case["processes"]] = _peak(case)
    rows = ((name, f"{tokens:,}", *(peaks.get(n, "") for n in (1, 2, 4))) for (name, tokens), peaks in found.items())
    return table(("settings", "tokens of the row", "one process", "two", "four"), rows)


def links(cases: Iterable[Mapping[str, Any]]) -> str:
    """Lay out the seconds of a step of two processes, by the links' model and measured."""
    names = ("compute_seconds", "communication_seconds", "predicted_seconds", "measured_seconds")
    rows = (
        (case["strategy"], case["settings"], *(f"{case[name]:.2f}" for name in names), f"{case['error']:+.0%}")
        for case in cases
    )
    return table(("strategy", "trains", "computes", "communicates", "predicted", "measured", "off by"), rows)


def _peak(case: Mapping[str, Any]) -> str:
    """Write the peak of a case, and how far the bill is off."""
    off = off_by(case["billed_bytes"], case["peak_bytes"], digits=1)
    return f"{case['peak_bytes'] / 2**20:,.1f} MiB ({off})"


def without_checkpointing(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out peaks without checkpointing by dry run; each label ends with the tokens of the row."""
    rows = []
    for label, case in counted.items():
        name, _, tokens = label.partition(": ")
        fits = "yes" if case["fits"] else "no"
        off = off_by(case["estimated_bytes"], case["peak_bytes"])
        rows.append((name, f"{int(tokens):,}", human(case["peak_bytes"]), fits, off))
    return table(
        ("adapters and blocks by", "tokens of the row", "peak by dry run", "fits a T4", "by hand, off by"), rows
    )


def toggles(compared: Sequence[Pair]) -> str:
    """Lay out the ratios of bytes and time for each switch of the capstone: alone, and with all the others."""
    series = list(dict.fromkeys(pair.series for pair in compared))
    found = {(pair.label, pair.series): pair for pair in compared}
    rows = []
    for label in dict.fromkeys(pair.label for pair in compared):
        cells = [f"`{label}`"]
        for name in series:
            pair = found.get((label, name))
            if pair:
                cells += [_times(pair.on, pair.off, PEAK), _times(pair.on, pair.off, TOKEN)]
            else:
                cells += ["", ""]
        rows.append(cells)
    columns = ["switch"]
    for name in series:
        columns += [f"{name}: bytes", f"{name}: time"]
    return table(columns, rows)


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
            rows.append((name, "peak", *map(_bytes, _of_four(four, PEAK)), device))
            rows.append((name, "seconds", *map(_seconds, _of_four(four, STEP)), device))
    return table(("pair", "", *FOUR, "if independent", "device"), rows)


FOUR = ("neither", "first", "second", "both")
"""The four cases of a pair of tricks."""


def _of_four(four: Mapping[str, Case], measure: Measure) -> list[float | None]:
    """Return a measure of the four cases, and the value that both tricks would give if they were independent."""
    values = [measure(four[which]) if which in four else None for which in FOUR]
    neither, first, second, _ = values
    if not neither or not first or not second:
        return [*values, None]
    if measure is PEAK:  # what the tricks save adds up
        return [*values, first + second - neither]
    return [*values, first * second / neither]  # each trick multiplies the time by its own factor


def trajectories(found: Mapping[str, Any]) -> str:
    """Lay out how far the losses of a run with a switch are from those of the run without it."""
    rows = [(f"`{name}`", f"{c['largest']:.1e}", f"{c['mean']:.1e}", c["claim"]) for name, c in found["cases"].items()]
    return table(("switch", "largest difference of a loss", "mean", "its claim"), rows)


def quality(runs: Sequence[Mapping[str, Any]]) -> str:
    """Lay out held-out loss and peak of some settings, each compared with fp32 LoRA of the same seed."""
    plain = {run["seed"]: run["eval_loss_after"] for run in runs if run["case"] == "fp32"}
    rows = []
    for case in dict.fromkeys(run["case"] for run in runs):
        mine = [run for run in runs if run["case"] == case]
        losses = [run["eval_loss_after"] for run in mine]
        spread = apart = peak = ""
        if len(mine) > 1:
            spread = f"{max(losses) - min(losses):.4f}"
        if case != "fp32":
            differences = [run["eval_loss_after"] - plain[run["seed"]] for run in mine if run["seed"] in plain]
            apart = " to ".join(f"{end:+.4f}" for end in _ends(differences))
        peaks = [run["peak_bytes"] for run in mine if "peak_bytes" in run]
        if peaks:
            peak = human(max(peaks))
        loss = f"{statistics.mean(losses):.4f}"
        rows.append((f"`{case}`", str(len(mine)), loss, spread, apart, peak, f"{mine[0]['trainable']:,}"))
    return table(("case", "seeds", "loss", "spread", "against fp32", "peak", "trained weights"), rows)


def rates(runs: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the held-out loss at each learning rate, one line for each rank; rank 0 is full fine-tuning."""
    found = sorted({run["rate"] for run in runs})
    rows = []
    for rank in dict.fromkeys(run["rank"] for run in runs):
        losses = {run["rate"]: run["eval_loss_after"] for run in runs if run["rank"] == rank}
        best = min(losses, key=losses.__getitem__)
        cells = [f"{losses[rate]:.3f}" if rate in losses else "" for rate in found]
        cells[found.index(best)] = f"**{losses[best]:.3f}**"
        rows.append((f"LoRA, r = {rank}" if rank else "full fine-tuning", *cells))
    return table(("trained", *(f"{rate:g}" for rate in found)), rows)


def _ends(numbers: Sequence[float]) -> list[float]:
    """Return the smallest and the largest number, or the only one."""
    if not numbers:
        return []
    return sorted({min(numbers), max(numbers)})


def growth(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Lay out the exponents of all growth figures."""
    rows = []
    for what, some in curves.items():
        for curve in some:
            if len(curve.xs) > 1:  # one point has no slope
                sizes = _sizes(curve.xs[0], curve.xs[-1])
                rows.append((what, curve.label, sizes, f"{curve.exponent:.2f}"))
    return table(("what grows with what", "recipe", "from, to", "exponent"), rows)


def _sizes(low: float, high: float) -> str:
    """Write two sizes with the unit of the larger one; those under a million have none.

    Examples:
        >>> _sizes(32, 512), _sizes(134_515_008, 8_030_261_248)
        ('32 to 512', '0.135 to 8.03 billion')
    """
    for unit, one in (("billion", 1e9), ("million", 1e6)):
        if high >= one:
            return f"{low / one:.3g} to {high / one:.3g} {unit}"
    return f"{low:g} to {high:g}"


def published(entries: Iterable[Mapping[str, str]]) -> str:
    """Lay out published figures of others, each with its source and why it cannot be compared with ours."""
    columns = ("what", "figure", "on", "source", "date", "not comparable, because")
    keys = ("what", "figure", "card", "source", "date", "why")
    return table(columns, [tuple(entry[key] for key in keys) for entry in entries])


def _bytes(count: float | None) -> str:
    return human(count) if count is not None else ""


def _seconds(value: float | None) -> str:
    return f"{value:.3g} s" if value is not None else ""


def _times(case: Case, baseline: Case | None, measure: Measure) -> str:
    """Write a case's value as a multiple of its baseline's; empty if one of them is missing."""
    mine = measure(case)
    its = measure(baseline) if baseline else None
    if not mine or not its:
        return ""
    return f"{mine / its:.2f}"


def _speed(case: Case) -> str:
    speed = case.trained_tokens_per_second or case.tokens_per_second
    return f"{speed:,.0f}" if speed else ""


def _error(case: Case) -> str:
    error = estimate_error(case)
    if error is None:
        return ""
    return off_by(100 + error, 100)
