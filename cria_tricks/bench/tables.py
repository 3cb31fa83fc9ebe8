"""Lay out results as Markdown tables: what a case cost, beside its baseline and beside what was predicted."""

import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cria_tricks.bench.measured_card import MeasuredCard, PartName
from cria_tricks.bench.results import Case, by_device, plain_name
from cria_tricks.common.markdown_table import cell, table
from cria_tricks.common.units import duration, human, off_by

Measure = Callable[[Case], float | None]

PEAK: Measure = operator.attrgetter("peak_allocated_bytes")
"""Read the peak of a case (bytes)."""
TOKEN: Measure = operator.attrgetter("seconds_per_token")
"""Read a case's time for each trained token (seconds)."""


def against(cases: Iterable[Case]) -> Iterator[tuple[Case, Case]]:
    """Yield each case with its baseline, if both have run."""
    cases = [case for case in cases if case.status == "ok"]
    found = {(case.device, case.bench, case.name): case for case in cases}
    for case in cases:
        baseline = found.get((case.device, case.bench, case.against))
        if baseline:
            yield case, baseline


def estimate_error(case: Case) -> float | None:
    """Compute how far a case's estimated peak is above the measured one (per cent); ``None`` if either is missing."""
    if not case.estimated_bytes or not case.peak_allocated_bytes:
        return None
    return 100 * (case.estimated_bytes / case.peak_allocated_bytes - 1)


def tricks(cases: Iterable[Case]) -> str:
    """Lay out every case of every technique, refusals included, in one table for each device."""
    found = []
    for some in by_device(cases).values():
        baselines_first = sorted(some, key=lambda case: (case.bench, bool(case.against)))
        found.append(f"{heading(some)}\n\n{of_cases(baselines_first, BESIDE_BASELINE)}")
    return "\n\n".join(found)


def heading(cases: Sequence[Case]) -> str:
    """Say on what device cases ran, when, and with which versions."""
    days = sorted(case.date[:10] for case in cases)
    when = " to ".join(sorted({days[0], days[-1]}))
    versions = cases[0].versions
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    models = ", ".join(dict.fromkeys(case.model.removeprefix("random:") for case in cases))
    return f"**{cases[0].device}** ({when}; {models}, random weights; {libraries})"


def of_cases(cases: Sequence[Case], columns: Sequence[str]) -> str:
    """Lay out cases, one line each.

    Args:
        cases: the cases, with the baselines that they are held against.
        columns: headings of :data:`COLUMNS`; :data:`BESIDE_BASELINE` or :data:`BESIDE_PREDICTION`.
    """
    baselines = {(case.bench, case.name): baseline for case, baseline in against(cases)}
    rows = []
    for case in cases:
        baseline = baselines.get((case.bench, case.name))
        rows.append([COLUMNS[column](case, baseline) for column in columns])
    return table(columns, rows)


def _peak(case: Case) -> str:
    if case.status != "ok":
        return f"{case.status}: {cell(case.why)}"
    return _bytes(case.peak_allocated_bytes)


def _switched_on(case: Case) -> str:
    """Name a case of a measured card by what it switches on."""
    if case.name.startswith("set-"):
        return f"`{' '.join(setting.removeprefix('tricks.') for setting in case.settings)}`"
    for beginning in ("ladder_", "alone_"):
        if case.name.startswith(beginning):
            return f"+ `{case.name.removeprefix(beginning)}`"
    return case.name.replace("_", " ")


def _speed(case: Case) -> str:
    speed = case.trained_tokens_per_second or case.tokens_per_second
    return f"{speed:,.0f}" if speed else ""


def _error(case: Case) -> str:
    error = estimate_error(case)
    return "" if error is None else off_by(100 + error, 100)


def _predicted_time(case: Case) -> str:
    return "; ".join(f"{_seconds(one.low)} to {_seconds(one.high)} ({one.by})" for one in case.predicted)


def times(case: Case, baseline: Case | None, measure: Measure) -> str:
    """Write a case's value as a multiple of its baseline's; empty if one of them is missing."""
    mine = measure(case)
    its = measure(baseline) if baseline else None
    if not mine or not its:
        return ""
    return f"{mine / its:.2f}"


def _seconds(seconds: float | None) -> str:
    """Write the time of a step, a short one in milliseconds."""
    if not seconds:
        return ""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s"


def _bytes(count: int | None) -> str:
    return human(count) if count else ""


def line(case: Case) -> str:
    """Write a case in one line: its peak and its seconds beside what was predicted, its speed and its kernel."""
    name = f"{case.bench}.{case.name}"
    if case.status != "ok":
        return f"{name}: {case.status}: {case.why}"
    words = [_bytes(case.peak_allocated_bytes) or "bytes not counted"]
    if case.estimated_bytes:
        words.append(f"predicted {_bytes(case.estimated_bytes)}")
    if case.dry_run_bytes:
        words.append(f"dry run {_bytes(case.dry_run_bytes)}")
    if case.seconds:
        ranges = [f" ({one.low:.2f} to {one.high:.2f} predicted, {one.by})" for one in case.predicted]
        words.append(f"{case.median_seconds:.2f} s a step{''.join(ranges)}")
    if case.trained_tokens_per_second:
        words.append(f"{case.trained_tokens_per_second:,.0f} trained tokens/s")
    return "; ".join([f"{name}: {', '.join(words)}", *case.warnings])


COLUMNS: dict[str, Callable[[Any, Case | None], str]] = {
    "case": lambda case, _: f"`{case.bench}` {plain_name(case.bench, case.name)}",
    "switched on": lambda case, _: _switched_on(case),
    "model": lambda case, _: case.model.removeprefix("random:"),
    "tokens": lambda case, _: f"{case.tokens_per_row:,}",
    "peak": lambda case, _: _peak(case),
    "reserved": lambda case, _: _bytes(case.peak_reserved_bytes),
    "compared with": lambda _, baseline: plain_name(baseline.bench, baseline.name) if baseline else "",
    "peak / that": lambda case, baseline: times(case, baseline, PEAK),
    "estimate off by": lambda case, _: _error(case),
    "estimated": lambda case, _: _bytes(case.estimated_bytes),
    "dry run": lambda case, _: _bytes(case.dry_run_bytes),
    "tokens/s": lambda case, _: _speed(case),
    "time / that": lambda case, baseline: times(case, baseline, TOKEN),
    "time predicted": lambda case, _: _predicted_time(case),
    "time measured": lambda case, _: _seconds(case.median_seconds),
}
"""Each column of a table of cases -> what it says of a case and of its baseline."""
BESIDE_BASELINE = ("case", "peak", "compared with", "peak / that", "estimate off by", "estimated", "tokens/s",
                   "time / that")  # fmt: skip
BESIDE_PREDICTION = ("switched on", "model", "tokens", "estimated", "dry run", "peak", "reserved", "time predicted",
                     "time measured")  # fmt: skip

LEGEND = (
    "*Estimated* bytes are those of the bill. *Dry run*: the same step on tensors without data. *Peak*: the measured "
    "peak of tensors. *Reserved*: what PyTorch's allocator held, on a GPU only. Empty: not measured."
)
TITLES: dict[PartName, str] = {
    "ladder": "**The ladder**: each line adds one switch to the line above.",
    "alone": "**Each switch alone**, with the switches that it needs.",
    "capstone": "**The shape of the Kwanzaa run**, with random weights.",
    "longest": "**The longest row** that fits.",
    "errors": "**More sets of switches**, bytes only.",
}
"""What the tables of a measured card show, by part."""


def of_card(card: MeasuredCard) -> str:
    """Lay out a measured card: where it was measured, what became of each part, and the cases of each part."""
    device = card.device
    clock = f", clock up to {device.highest_clock_mhz:.0f} MHz" if device.highest_clock_mhz else ""
    driver = f", driver {device.driver}" if device.driver else ""
    about = card.provenance
    text = [
        f"Measured {about.began[:10]}, {human(device.memory_bytes)}{driver}{clock}.\n"
        + ", ".join(f"{name} {version}" for name, version in card.versions.items())
        + ".",
        _parts(card),
        LEGEND,
    ]
    if device.kind == "cpu":
        text += ["On a CPU `activation_offload` saves nothing, because the host's memory is what is measured."]
    for part, title in TITLES.items():
        if cases := card.of(part):
            text += [title, of_cases(cases, BESIDE_PREDICTION)]
    return "\n\n".join(text)


def _parts(card: MeasuredCard) -> str:
    rows = []
    for name, record in card.parts.items():
        took = duration(record.seconds) if record.status != "skipped" else ""
        rows.append((name, record.status, cell(record.why), took))
    return table(("part", "status", "why", "took"), rows)


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
        differences = [run["eval_loss_after"] - plain[run["seed"]] for run in mine if run["seed"] in plain]
        if case != "fp32" and differences:
            ends = sorted({min(differences), max(differences)})
            apart = " to ".join(f"{end:+.4f}" for end in ends)
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
