"""Accept the file of a measured card, or refuse it with one line: ``cria bench --check FILE``.

What is accepted may enter ``benchmarks/results/`` and the rates that plans count with. So a file must be whole, must
say which code it measured, and must hold figures that can be true. A case that something else disturbed is refused; a
card that is slower than ours is not.
"""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from cria_tricks.bench import measured_card
from cria_tricks.bench.measured_card import MeasuredCard, MeasuredDevice, PartName
from cria_tricks.bench.results import Case, Predicted
from cria_tricks.bill import step_time
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.hardware.gpus import by_datasheet
from cria_tricks.hardware.reached import SPREAD
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds

FILE = re.compile(r"measured_card(-[a-z0-9]+)*\.json")
"""The name of a file; a second file of the same card has a word more."""
NEEDED: tuple[PartName, ...] = ("calibrate", "ladder")
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
HELD_DOWN = ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake")
"""Reasons of throttling that make times useless. A power cap is none: a T4 is at its 70 W in every training step."""

Problem = tuple[str, str]
"""Where something is wrong, and what."""


def device_of(measured: MeasuredDevice) -> Device:
    """Return the facts about a measured device that estimates need."""
    return Device(measured.kind, measured.name, measured.capability, measured.real_bf16, measured.memory_bytes)


def step_of(case: Case, device: Device) -> Step:
    """Describe a case's optimizer step.

    Raises:
        BadInput: if its settings are none of ours.
    """
    assert case.tokens
    fixed = [f"model={case.model}", f"data.max_length={case.tokens_per_row}"]
    recipe = with_settings(Recipe(), [*fixed, *case.settings])
    mean_tokens = round(case.tokens / recipe.rows_per_step)  # of the rows, or of the packed sequences
    trained_share = (case.trained_tokens or 0) / case.tokens
    return folds.step_of(recipe, find_shape(case.model), device, mean_tokens, trained_share=trained_share)


def predicted(case: Case, card: Card) -> Predicted:
    """Predict the time of a case's step by the rates of a card."""
    step = step_of(case, card.device)
    time = step_time.time_of(step, card)
    return Predicted(by=card.basis(step.precision), seconds=time.seconds, low=time.low, high=time.high)


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
    if not FILE.fullmatch(file.name):
        yield "its name", f"must be {measured_card.NAME}, or measured_card-WORD.json for a second file of a card"
    folder = file.resolve().parent
    if folder.parent.name == "results" and folder.name != card.folder:
        yield "its folder", f"must be {card.folder}, because {card.device.name} was measured"
    if card.provenance.changed:
        yield "provenance.changed", "files of the package differed from the commit, so nobody can measure this again"
    if not card.provenance.commit and "unknown" in card.versions.get("cria_tricks", "unknown"):
        yield "provenance.commit", "must name the commit, because versions.cria_tricks names no release"
    for part in NEEDED:
        status = card.parts[part].status if part in card.parts else "missing"
        if status != "done":
            yield f"parts.{part}", f"is {status}; run cria bench again with the same --out, and it goes on"
    for case in card.cases:
        for place, what in _case(case, card):
            yield f"cases.{case.bench}.{case.name}{place}", what


def _case(case: Case, card: MeasuredCard) -> Iterator[Problem]:
    """Check one case; a place begins with a dot. What was refused, or ran out of memory, is a result as it is."""
    if case.status != "ok":
        return
    yield from _bytes(case, card)
    if case.seconds:
        yield from _seconds(case, card)
    elif case.part not in ("longest", "errors"):
        yield ".seconds", "is empty"
    seen = [reason for reason in case.sensors.throttled if reason in HELD_DOWN] if case.sensors else []
    if seen:
        yield ".sensors.throttled", f"the card was held down while it ran: {', '.join(seen)}"


def _bytes(case: Case, card: MeasuredCard) -> Iterator[Problem]:
    """Check the measured bytes against the dry run and against the device's memory."""
    allocated = case.peak_allocated_bytes
    if allocated is None:
        yield ".peak_allocated_bytes", "is missing"
        return
    bound = BYTES[card.device.kind]
    if case.dry_run_bytes and abs(off := allocated / case.dry_run_bytes - 1) > bound:
        said = f"{human(allocated)} is {off:+.1%} off its dry run of {human(case.dry_run_bytes)}"
        yield ".peak_allocated_bytes", f"{said}; at most {bound:.0%} can be explained"
    if (case.peak_reserved_bytes or 0) > card.device.memory_bytes:
        yield ".peak_reserved_bytes", f"{human(case.peak_reserved_bytes or 0)} is more than the card has"


def _seconds(case: Case, card: MeasuredCard) -> Iterator[Problem]:
    """Check the times: enough of them, steady, and possible."""
    fastest, median = min(case.seconds), statistics.median(case.seconds)
    if fastest <= 0 or not case.tokens or not case.trained_tokens:
        yield ".seconds", "must be above 0, and tokens and trained_tokens, too"
        return
    if len(case.seconds) < LEAST_REPEATS:
        yield ".seconds", f"has {len(case.seconds)} steps; {LEAST_REPEATS} are needed"
    if median > UNSTEADY * fastest:
        yield ".seconds", f"the median is {median / fastest:.1f} times the fastest: something else ran"
    try:
        step = step_of(case, device_of(card.device))
    except BadInput as wrong:
        yield ".settings", str(wrong)
        return
    known = by_datasheet(device_of(card.device))
    rate = sum(part.flops for part in step_time.counts(step)) / median
    if known and rate > BOOST * known.flops(step.precision):
        says = f"{known.flops(step.precision) / 1e12:.3g}"
        yield ".seconds", f"{rate / 1e12:.3g} TFLOP/s is impossible: the card's datasheet says {says}"
