"""Accept the file of a measured card, or refuse it with one line: ``cria bench --check FILE``.

A file is accepted if it keeps the schema, if its figures can be true, and if it says where they come from. What is
accepted may enter ``benchmarks/results/`` and the rates that plans count with, so a wrong file must not pass. No check
compares with other files: a card that is slower than ours is no wrong card.
"""

import datetime
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from cria_tricks.bench import measured_card
from cria_tricks.bench.measured_card import OF_CASES, CardCase, MeasuredCard, PartName
from cria_tricks.bench.of_step import device_of, recipe_of, step_flops, work_of
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import trust
from cria_tricks.hardware.gpus import by_datasheet
from cria_tricks.hardware.reached import SPREAD

FILE = re.compile(r"measured_card(-[a-z0-9]+)*\.json")
"""The name of a file; a second file of the same card has a word more."""
NEEDED: tuple[PartName, ...] = ("machine", "calibrate", "ladder")
"""The parts without which a file says too little."""
BYTES = {"cpu": 0.01, "cuda": trust.MARGIN}
"""How far a measured peak may be from its own dry run, as a share of it.

On a CPU both count the same storages, and a test holds them within one per cent of each other. CUDA's allocator rounds
each tensor up, and kernels take memory of their own. "It fits" keeps a margin free. If a dry run is off by more
than this margin, "it fits" can be wrong, so a person must look at such a file.
"""
LEAST_REPEATS = 3
"""Timed steps of a case."""
UNSTEADY = SPREAD
"""How many times its fastest step the median of a case may take.

A median beyond that says more about what else ran than about the card: the range around a prediction is as wide.
"""
BOOST = 1.1
"""How far a card may be above its datasheet: an H100's clock goes to 1,980 MHz, and its rates are of 1,830 MHz."""
NOISE = 2.0
"""How far a step may be above the fastest rate that was calibrated, without a datasheet: other programs come and go."""
IDLE = 0.25
"""The share of its highest clock below which a card does not work: a T4 idles at 0.19 of it, its base clock is 0.37."""
HELD_DOWN = ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake")
"""Reasons of throttling that make times useless. A power cap is none: a T4 is at its 70 W in every training step."""
CLOCKS = datetime.timedelta(days=1)
"""How far the clocks of two machines may be apart."""

Problem = tuple[str, str]
"""Where something is wrong, and what."""


def accept(file: Path) -> MeasuredCard:
    """Read a file, and accept it.

    Raises:
        BadInput: if it is not accepted: one line that names the file, the place in it and what is wrong there.
    """
    card = measured_card.read(file)
    for where, what in problems(card, file):
        raise BadInput(f"{file}: {where}: {what}")
    return card


def problems(card: MeasuredCard, file: Path) -> Iterator[Problem]:
    """Yield all that speaks against a file which keeps the schema."""
    yield from _named(card, file)
    yield from _provenance(card)
    yield from _device(card)
    yield from _parts(card)
    yield from _calibration(card)
    for case in card.cases:
        where = f"cases.{case.bench}.{case.name}"
        for place, what in _case(case, card):
            yield f"{where}{place}", what


def _named(card: MeasuredCard, file: Path) -> Iterator[Problem]:
    """Check the file's name, and among the results its folder."""
    if not FILE.fullmatch(file.name):
        yield "its name", f"must be {measured_card.NAME}, or measured_card-WORD.json for a second file of a card"
    folder = file.resolve().parent
    if folder.parent.name == "results" and folder.name != card.folder:
        yield "its folder", f"must be {card.folder}, because {card.device.name} was measured"


def _provenance(card: MeasuredCard) -> Iterator[Problem]:
    """Check that the code can be found again, and that the dates can be true."""
    about = card.provenance
    if about.changed:
        yield "provenance.changed", "files of the package differed from the commit, so nobody can measure this again"
    if not about.commit and "unknown" in card.versions.get("cria_tricks", "unknown"):
        yield "provenance.commit", "must name the commit, because versions.cria_tricks names no release"
    for library in ("torch", "transformers", "peft", "bitsandbytes"):
        if library not in card.versions:
            yield f"versions.{library}", "is missing"
    times = {}
    for name in ("began", "ended"):
        times[name] = _time(getattr(about, name))
        if times[name] is None:
            yield f"provenance.{name}", "must be a date and a time of day with its time zone, in ISO 8601"
    began, ended = times["began"], times["ended"]
    if began and ended and began > ended:
        yield "provenance.ended", "is before provenance.began"
    if ended and ended > datetime.datetime.now(datetime.UTC) + CLOCKS:
        yield "provenance.ended", f"{about.ended} has not come yet"
    for case in card.cases:
        measured = _time(case.date)
        if measured is None or (began and measured < began) or (ended and measured > ended):
            yield f"cases.{case.bench}.{case.name}.date", "must be between provenance.began and provenance.ended"


def _time(text: str) -> datetime.datetime | None:
    """Read a date with its time zone; ``None`` if it is none."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else None


def _device(card: MeasuredCard) -> Iterator[Problem]:
    """Check the device against what is known of it, and each case against the device."""
    device = card.device
    known = by_datasheet(device_of(device))
    if known and abs(device.memory_bytes / known.device.memory_bytes - 1) > trust.MARGIN:
        yield "device.memory_bytes", f"{device.name} has {human(known.device.memory_bytes)}"
    if known and device.capability != known.device.capability:
        yield "device.capability", f"{device.name} has {'.'.join(map(str, known.device.capability))}"
    if device.kind == "cuda" and not device.driver:
        yield "device.driver", "is missing; pip install nvidia-ml-py, and measure again"
    for case in card.cases:
        where = f"cases.{case.bench}.{case.name}"
        if (case.device, case.kind) != (device.name, device.kind):
            yield f"{where}.device", f"is {case.device}, and the file is of {device.name}"
        if case.versions != card.versions:
            yield f"{where}.versions", "differ from those of the file"


def _parts(card: MeasuredCard) -> Iterator[Problem]:
    """Check that the parts are whole, and that nothing failed in them."""
    for part in NEEDED:
        status = card.parts[part].status if part in card.parts else "missing"
        if status != "done":
            yield f"parts.{part}", f"is {status}; run cria bench again with the same --out, and it goes on"
    for part, record in card.parts.items():
        if record.status == "done" and part in OF_CASES and not card.of(part):
            yield f"parts.{part}", "is done, and has no case"
        if record.status == "skipped" and not record.why:
            yield f"parts.{part}.why", "must say why it was skipped"
    names = [(case.bench, case.name) for case in card.cases]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"cases.{'.'.join(name)}", "is there twice"


def _calibration(card: MeasuredCard) -> Iterator[Problem]:
    """Check the calibrated rates against the datasheet, where there is one."""
    found = card.calibration
    if found is None:
        yield "calibration", "is missing"
        return
    if not any(name.startswith("flops products ") for name in found.rates):
        yield "calibration.rates", "has no rate of products"
    known = by_datasheet(device_of(card.device))
    for name, rate in found.rates.items():
        unit, _, rest = name.partition(" ")
        precision = rest.rpartition(" ")[2]
        if rate <= 0:
            yield f"calibration.rates.{name}", "must be above 0"
        # Traffic is not compared: small tensors stay in a card's cache, which is faster than its memory.
        if known and unit == "flops" and rate > BOOST * known.flops(precision):
            yield f"calibration.rates.{name}", _above(rate, known.flops(precision))
    if known and found.link_rate > BOOST * known.link_rate:
        yield "calibration.link_rate", f"{found.link_rate:.3g} bytes/s; its link carries {known.link_rate:.3g}"


def _above(rate: float, peak: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s is impossible: the card's datasheet says {peak / 1e12:.3g}"


def _case(case: CardCase, card: MeasuredCard) -> Iterator[Problem]:
    """Check one case; a place begins with a dot, or is empty for the whole case."""
    try:
        recipe_of(case)
    except BadInput as wrong:
        yield ".settings", str(wrong)
        return
    if case.status != "ok":
        if not case.why:
            yield ".why", f"must say why it was {case.status}"
        return
    yield from _bytes(case, card)
    if case.seconds:
        yield from _seconds(case, card)
    elif case.part not in ("longest", "errors"):
        yield ".seconds", "is empty"
    yield from _sensors(case, card)


def _bytes(case: CardCase, card: MeasuredCard) -> Iterator[Problem]:
    """Check the measured bytes against the dry run and against the device's memory."""
    allocated = case.peak_allocated_bytes
    if allocated is None:
        yield ".peak_allocated_bytes", "is missing"
        return
    if case.dry_run_bytes is None and case.part == "ladder":
        yield ".dry_run_bytes", "is missing"
    if case.dry_run_bytes:
        off = allocated / case.dry_run_bytes - 1
        bound = BYTES[card.device.kind]
        # A few steps of the capstone may not have the longest row, for which the dry run is.
        if off > bound or (off < -bound and case.part != "capstone"):
            said = f"{human(allocated)} is {off:+.1%} off its dry run of {human(case.dry_run_bytes)}"
            yield ".peak_allocated_bytes", f"{said}; at most {bound:.0%} can be explained"
    if card.device.kind == "cuda":
        reserved = case.peak_reserved_bytes or 0
        if reserved < allocated:
            yield ".peak_reserved_bytes", f"{human(reserved)} is less than the {human(allocated)} that were allocated"
        if reserved > card.device.memory_bytes:
            yield ".peak_reserved_bytes", f"{human(reserved)} is more than the card has"


def _seconds(case: CardCase, card: MeasuredCard) -> Iterator[Problem]:
    """Check the times: enough of them, steady, and possible."""
    if min(case.seconds) <= 0:
        yield ".seconds", "must be above 0"
        return
    if not case.tokens or not case.trained_tokens or case.trained_tokens > case.tokens:
        yield ".tokens", "must be there, and trained_tokens at most as many"
        return
    if len(case.seconds) < LEAST_REPEATS and case.part != "capstone":
        yield ".seconds", f"has {len(case.seconds)} steps; {LEAST_REPEATS} are needed"
    median = statistics.median(case.seconds)
    # Each step of the capstone trains other rows, so its times differ with their lengths.
    if median > UNSTEADY * min(case.seconds) and case.part != "capstone":
        yield ".seconds", f"the median is {median / min(case.seconds):.1f} times the fastest: something else ran"
    work = work_of(case, device_of(card.device))
    rate = step_flops(work) / median
    known = by_datasheet(device_of(card.device))
    if known:
        peak = known.flops(work.precision)
        if rate > BOOST * peak:
            yield ".seconds", _above(rate, peak)
    elif card.calibration:
        peak = max(rate for name, rate in card.calibration.rates.items() if name.startswith("flops "))
        if rate > NOISE * peak:
            said = f"{rate / 1e9:.3g} GFLOP/s is impossible"
            yield ".seconds", f"{said}: the fastest product that was calibrated reached {peak / 1e9:.3g}"


def _sensors(case: CardCase, card: MeasuredCard) -> Iterator[Problem]:
    """Check that the card ran at a clock that it may have, and was not held down."""
    if card.device.kind == "cpu":
        return
    if case.sensors is None:
        yield ".sensors", "is missing, so nobody can tell whether the card was throttled"
        return
    seen = [reason for reason in case.sensors.throttled if reason in HELD_DOWN]
    if seen:
        yield ".sensors.throttled", f"the card was held down while it ran: {', '.join(seen)}"
    clock = case.sensors.median_clock_mhz
    highest = card.device.highest_clock_mhz
    if clock is None or highest is None or not case.seconds:
        return
    if clock > highest:
        yield ".sensors.median_clock_mhz", f"{clock:.0f} MHz is above the card's highest, {highest:.0f}"
    if clock < IDLE * highest:
        yield ".sensors.median_clock_mhz", f"{clock:.0f} MHz of {highest:.0f}: the card idled, or was held down"
