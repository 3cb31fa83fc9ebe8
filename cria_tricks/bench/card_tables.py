"""Lay out measured cards as Markdown: one line for each, and for one card what was predicted and what was measured."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from cria_tricks.bench import measured_card
from cria_tricks.bench.measured_card import CardCase, MeasuredCard, PartName, Predicted
from cria_tricks.bench.results import COMMITTED
from cria_tricks.common.markdown_table import cell, markdown_table
from cria_tricks.common.units import duration, human

LEGEND = (
    "*Predicted* bytes are those of the bill. *Dry run*: the same step on tensors without data. *Allocated*: the "
    "measured peak of tensors. *Reserved*: what PyTorch's allocator held, on a GPU only. Empty: not measured."
)
TITLES: dict[PartName, str] = {
    "ladder": "**The ladder**: each line adds one switch to the line above.",
    "alone": "**Each switch alone**, with the switches that it needs.",
    "capstone": "**The shape of the Kwanzaa run**, with random weights.",
    "longest": "**The longest row** that fits.",
    "errors": "**More sets of switches**, bytes only.",
}
"""What the tables of a card show, by part."""


def committed(results: Path = COMMITTED) -> list[MeasuredCard]:
    """Read the measured cards among the project's own results, in the order of their names."""
    return [measured_card.read(file) for file in sorted(results.glob("*/measured_card*.json"))]


def summary(cards: Iterable[MeasuredCard]) -> str:
    """Lay out one line for each card: how far the predictions are from what was measured."""
    columns = ("device", "date", "version", "cases", "error of the bill", "error of the dry run",
               "times inside their range", "times, measured / predicted", "throttled by")  # fmt: skip
    return "\n".join(markdown_table(columns, [_summary(card) for card in cards]))


def _summary(card: MeasuredCard) -> tuple[str, ...]:
    timed = [(case, case.predicted[0]) for case in card.cases if case.median_seconds and case.predicted]
    inside = sum(_inside(case, one) for case, one in timed)
    ratios = [(case.median_seconds or 0.0) / one.seconds for case, one in timed]
    short = "short" if card.settings.short else "full"
    throttled = [reason for case in card.cases if case.sensors for reason in case.sensors.throttled]
    return (
        card.device.name,
        card.provenance.began[:10],
        f"{short}, {card.settings.shape}",
        str(len(card.cases)),
        _errors([(case.estimated_bytes, case.peak_allocated_bytes) for case in card.cases]),
        _errors([(case.dry_run_bytes, case.peak_allocated_bytes) for case in card.cases]),
        f"{inside} of {len(timed)}" if timed else "no rates",
        f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}" if ratios else "",
        ", ".join(dict.fromkeys(throttled)),
    )


def _inside(case: CardCase, one: Predicted) -> bool:
    return one.low <= (case.median_seconds or 0.0) <= one.high


def _errors(pairs: Sequence[tuple[int | None, int | None]]) -> str:
    """Write the range of errors of predicted bytes."""
    errors = [100 * (predicted / measured - 1) for predicted, measured in pairs if predicted and measured]
    if not errors:
        return ""
    return f"{_percent(min(errors))} to {_percent(max(errors))}"


def _percent(error: float) -> str:
    return f"{round(error, 2) + 0.0:+.2f} %"  # adding zero turns -0.0 into 0.0


def page(card: MeasuredCard) -> str:
    """Lay out one card: its ladder, its capstone, its longest row, and all errors."""
    device = card.device
    clock = f", clock up to {device.highest_clock_mhz:.0f} MHz" if device.highest_clock_mhz else ""
    driver = f", driver {device.driver}" if device.driver else ""
    libraries = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    about = card.provenance
    lines = [
        f"Measured {about.began[:10]} ({about.place}), {human(device.memory_bytes)}{driver}{clock}.",
        f"{libraries}.",
        "",
        *_parts(card),
    ]
    lines += ["", LEGEND]
    if device.kind == "cpu":
        lines += ["On a CPU `activation_offload` saves nothing, because the host's memory is what is measured."]
    for part, title in TITLES.items():
        if cases := card.of(part):
            lines += ["", title, "", *cases_table(cases)]
    return "\n".join(lines)


def _parts(card: MeasuredCard) -> list[str]:
    """Lay out what became of each part."""
    rows = []
    for name, record in card.parts.items():
        told = duration(record.predicted_seconds) if record.predicted_seconds is not None else ""
        took = duration(record.seconds) if record.status != "skipped" else ""
        rows.append((name, record.status, cell(record.why), told, took))
    return markdown_table(("part", "status", "why", "predicted to take", "took"), rows)


def cases_table(cases: Iterable[CardCase]) -> list[str]:
    """Lay out cases: predicted, by dry run, allocated and reserved bytes, and predicted and measured seconds."""
    columns = ("case", "model", "tokens", "predicted", "dry run", "allocated", "reserved", "time predicted",
               "time measured")  # fmt: skip
    rows = []
    for case in cases:
        measured = [_bytes(case.peak_allocated_bytes), _bytes(case.peak_reserved_bytes)]
        if case.status != "ok":
            measured = [f"{case.status}: {cell(case.why)}", ""]
        seconds = _seconds(case.median_seconds) if case.median_seconds else ""
        rows.append(
            (
                case_label(case),
                case.model.removeprefix("random:"),
                f"{case.tokens_per_row:,}",
                _bytes(case.estimated_bytes),
                _bytes(case.dry_run_bytes),
                *measured,
                "; ".join(f"{_seconds(one.low)} to {_seconds(one.high)} ({one.by})" for one in case.predicted),
                seconds,
            )
        )
    return markdown_table(columns, rows)


def case_label(case: CardCase) -> str:
    """Name a case by what it switches on."""
    if case.name.startswith("set-"):
        return f"`{' '.join(setting.removeprefix('tricks.') for setting in case.settings)}`"
    for beginning in ("ladder_", "alone_"):
        if case.name.startswith(beginning):
            return f"+ `{case.name.removeprefix(beginning)}`"
    return case.name.replace("_", " ")


def _seconds(seconds: float) -> str:
    """Write the time of a step, a short one in milliseconds."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s"


def _bytes(count: int | None) -> str:
    return human(count) if count else ""
