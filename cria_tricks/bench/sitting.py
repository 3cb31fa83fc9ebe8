"""Measure a card part by part, and keep what was measured: a sitting that was stopped goes on where it was."""

import dataclasses
import statistics
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cria_tricks.bench import capstone, cases, longest, measured_card, parts, provenance, sensors, tables
from cria_tricks.bench.accept import UNSTEADY
from cria_tricks.bench.case import Setup, bytes_by_dry_run, estimated, measure, prepared
from cria_tricks.bench.measured_card import (
    NAME,
    BenchSettings,
    Calibrated,
    CardCase,
    MeasuredCard,
    PartName,
    PartRecord,
)
from cria_tricks.bench.of_step import predicted
from cria_tricks.bench.results import Case
from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import duration, human
from cria_tricks.common.version import versions
from cria_tricks.common.waiting import doing
from cria_tricks.doctor import calibrate, machine
from cria_tricks.hardware import calibration, this_device
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.gpus import by_datasheet
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles

ATTEMPTS = 2
"""How often a case is measured whose times are unsteady."""
ZIP = "measured_card.zip"
"""What to hand on: the file of the card, with its tables."""
REPORT = "report.md"
"""The tables."""


class Sitting:
    """One device that is measured, and its file.

    Args:
        out: the folder of the file.
        settings: what is measured.
        command: as it was typed.
        say: gets a line of progress.

    Attributes:
        card: what is measured so far.
        file: where that is stored.

    Raises:
        BadInput: if the folder holds a measurement of another device, of other code or under other settings.
    """

    def __init__(self, out: Path, settings: BenchSettings, command: str, say: Callable[[str], None]):
        self.device = this_device()
        self.say = say
        self.file = out / NAME
        self.sensors = sensors.open_card()
        new = MeasuredCard(
            device=provenance.measured_device(self.device),
            versions=versions(),
            provenance=provenance.provenance(command),
            settings=settings,
        )
        self.card = new
        if self.file.exists():
            self.card = measured_card.read(self.file)
            _refuse_another(self.card, new, out)

    def run(self, wanted: Iterable[PartName]) -> None:
        """Measure these parts, but for what is in the file already; it is written again after each case."""
        chosen = list(wanted)
        self.say(f"{self.device.name}: {', '.join(chosen)}: {self.total(chosen)}")
        for part in chosen:
            self._part(part)

    def total(self, wanted: Iterable[PartName]) -> str:
        """Say how long these parts should take together, without those that are in the file."""
        left = [part for part in wanted if not self._done(part)]
        rates = self._best_rates()
        total = duration(60 * parts.minutes(left, self.card.settings, self.device, rates))
        if rates is None:
            return f"{total} for those that need no rates; the calibration tells the others"
        return f"about {total}"

    def foretold(self, part: PartName) -> str:
        """Say how long a part should take, or why it takes no time."""
        why = self._skipped(part)
        if why:
            return f"skipped, because {why}"
        if self._done(part):
            return f"is in {self.file} already"
        seconds = self._seconds(part)
        if seconds is None:
            return "some minutes, which are not known before"
        return f"about {duration(seconds)}"

    def pack(self) -> Path:
        """Write the tables, and a zip of all; return the zip."""
        report = self.file.with_name(REPORT)
        atomic_files.write_file(report, f"# {self.device.name}\n\n{tables.of_card(self.card)}\n")
        packed = self.file.with_name(ZIP)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(self.file, self.file.name)
            archive.write(report, report.name)
        return packed

    def _skipped(self, part: PartName) -> str:
        return parts.skipped(part, self.card.settings, self.device)

    def _done(self, part: PartName) -> bool:
        return part in self.card.parts and self.card.parts[part].status == "done"

    def _seconds(self, part: PartName) -> float | None:
        return parts.seconds_of(part, self.card.settings, self.device, self._best_rates())

    def _part(self, part: PartName) -> None:
        """Measure one part."""
        why = self._skipped(part)
        if why:
            self._record(part, PartRecord(status="skipped", why=why))
        self.say(f"{part}: {self.foretold(part)}")
        if why or self._done(part):
            return
        seconds = self._seconds(part)
        before = self.card.parts.get(part)
        so_far = before.seconds if before else 0.0
        began = time.perf_counter()
        record = PartRecord(status="open", predicted_seconds=seconds, seconds=so_far)
        self._record(part, record)
        try:
            with doing(f"measuring {part}"):
                self._steps()[part]()
        except BaseException:
            self._record(part, record.model_copy(update={"seconds": so_far + time.perf_counter() - began}))
            raise
        spent = so_far + time.perf_counter() - began
        self._record(part, record.model_copy(update={"status": "done", "seconds": spent}))
        self.say(f"{part}: took {duration(spent)}")

    def _steps(self) -> dict[PartName, Callable[[], None]]:
        """Return how each part is measured."""
        return {
            "machine": self._machine,
            "calibrate": self._calibrate,
            "ladder": lambda: self._planned("ladder"),
            "alone": lambda: self._planned("alone"),
            "capstone": self._capstone,
            "longest": self._longest,
            "errors": lambda: self._planned("errors"),
        }

    def _machine(self) -> None:
        found = machine.examine()
        self._keep(toggles=tuple(found["toggles"]), attention=found["attention"])

    def _calibrate(self) -> None:
        seconds = parts.CALIBRATED[self.card.settings.short]
        found = calibrate.measure(lambda name: self.say(f"  {name}"), seconds=seconds)
        values = {name: value for name, value in dataclasses.asdict(found).items() if name in Calibrated.model_fields}
        self._keep(calibration=Calibrated(**values))

    def _planned(self, part: PartName) -> None:
        """Measure the cases of a part that are not in the file."""
        planned = parts.planned(part, self.card.settings, self.device)
        for number, one in enumerate(planned, 1):
            if self._has(one.bench, one.case.name):
                continue
            with doing(f"measuring {one.bench}.{one.case.name}, {number} of {len(planned)}"):
                self._add(self._measured(part, one))

    def _measured(self, part: PartName, one: parts.Planned) -> CardCase:
        """Measure one case; if its times are unsteady, once more."""
        lengths = self._lengths(one)
        tried: list[tuple[Case, sensors.Watch]] = []
        while not tried or (unsteadiness(tried[-1][0]) > UNSTEADY and len(tried) < ATTEMPTS):
            with sensors.Watch(self.sensors) as watch:
                case = measure(one.bench, one.case.name, one.case.words, one.setup, one.case.against, lengths)
            tried.append((case, watch))
        case, watch = min(tried, key=lambda one: unsteadiness(one[0]))
        extra: dict[str, Any] = {"attempts": len(tried)}
        if case.status != "refused":
            job = prepared(one.case.words, one.setup, lengths)
            extra["estimated_reserved_bytes"] = estimated(*job).reserved_bytes
            if one.dry:
                extra["dry_run_bytes"] = bytes_by_dry_run(*job)
        return self._card_case(part, case, watch, extra)

    def _lengths(self, one: parts.Planned) -> list[int]:
        try:
            return parts.lengths_of(one)
        except BadInput:
            return []  # the case itself will be refused, with the reason

    def _card_case(self, part: PartName, case: Case, watch: sensors.Watch, extra: dict[str, Any]) -> CardCase:
        """Add to a case what was predicted and what the sensors said."""
        if case.seconds:
            extra["predicted"] = tuple(predicted(case, card) for card in self._rates())
        values = case.model_dump(exclude=set(Case.model_computed_fields))
        return CardCase(**values, **extra, part=part, sensors=watch.found())

    def _capstone(self) -> None:
        if self._has("capstone", capstone.NAME):
            return
        settings = self.card.settings
        longest_row = parts.capstone_tokens(settings, self.device)
        steps = parts.CAPSTONE_STEPS[settings.short]
        with sensors.Watch(self.sensors) as watch:
            case = capstone.measure(settings.shape, longest_row, steps)
        extra: dict[str, Any] = {}
        if case.status != "refused":
            job = capstone.prepared(settings.shape, longest_row, steps)
            extra = {
                "estimated_reserved_bytes": estimated(*job).reserved_bytes,
                "dry_run_bytes": bytes_by_dry_run(*job),
            }
        self._add(self._card_case("capstone", case, watch, extra))

    def _longest(self) -> None:
        """Search the longest row; lengths that were tried already are not tried again."""
        settings = self.card.settings
        recipe = parts.longest_recipe(settings, self.device)
        said = toggles.longest(toggles.Target(find_shape(recipe.model), self.device), recipe)
        words = cases.words(recipe, toggles.switched_on(recipe))

        def runs(tokens: int) -> bool:
            name = f"tokens-{tokens}"
            known = [case for case in self.card.cases if (case.bench, case.name) == ("longest", name)]
            if known:
                return known[0].status == "ok"
            with doing(f"training rows of {tokens:,} tokens"), sensors.Watch(self.sensors) as watch:
                case = measure("longest", name, words, Setup(settings.shape, tokens, 0))
            self._add(self._card_case("longest", case, watch, {}))
            return case.status == "ok"

        low, high = longest.search(said, runs)
        self.say(f"  {low:,} tokens ran, {high:,} did not; the bill by hand says {said:,}")

    def _rates(self) -> list[Card]:
        """Return the rates of the device: what was known before, and what this sitting has calibrated."""
        found = []
        known = by_datasheet(self.device)
        if known:
            found.append(known)
        if self.card.calibration:
            about = {"device": self.device.name, "kind": self.device.kind, "threads": calibration.threads()}
            values = {**self.card.calibration.model_dump(), **about, "versions": calibration.versions()}
            found.append(calibration.card_by(calibration.Calibration(**values), self.device))
        return found

    def _best_rates(self) -> Card | None:
        """Return the calibrated rates, else those that were known before; ``None`` if there are none."""
        found = self._rates()
        return found[-1] if found else calibration.card_of(self.device)

    def _has(self, bench: str, name: str) -> bool:
        return any((case.bench, case.name) == (bench, name) for case in self.card.cases)

    def _add(self, case: CardCase) -> None:
        """Keep a case, and say how it went."""
        self._keep(cases=(*self.card.cases, case))
        self.say(f"  {line(case)}")

    def _record(self, part: PartName, record: PartRecord) -> None:
        self._keep(parts={**self.card.parts, part: record})

    def _keep(self, **changed: Any) -> None:
        """Change the card, and write its file."""
        about = self.card.provenance.model_copy(update={"ended": provenance.now()})
        self.card = self.card.model_copy(update={**changed, "provenance": about})
        measured_card.write(self.card, self.file)
        interrupts.now_saved(
            f"{len(self.card.cases)} cases are in {self.file}; the same command goes on and measures none of them again"
        )


def _refuse_another(stored: MeasuredCard, new: MeasuredCard, out: Path) -> None:
    """Refuse to go on with a measurement of something else."""
    differs = [name for name in ("device", "versions", "settings") if getattr(stored, name) != getattr(new, name)]
    if stored.provenance.code != new.provenance.code:
        differs.append("code of cria_tricks")
    if differs:
        raise BadInput(f"--out {out}: holds a measurement with another {' and '.join(differs)}; name a new folder")


def unsteadiness(case: Case) -> float:
    """Return how many times the fastest step of a case its median takes; 1 without times."""
    if not case.seconds:
        return 1.0
    return statistics.median(case.seconds) / min(case.seconds)


def line(case: CardCase) -> str:
    """Write a case in one line."""
    name = f"{case.bench}.{case.name}"
    if case.status != "ok":
        return f"{name}: {case.status}: {case.why}"
    peak = human(case.peak_allocated_bytes or 0)
    counted = f", dry run {human(case.dry_run_bytes)}" if case.dry_run_bytes else ""
    found = f"{name}: {peak}, predicted {human(case.estimated_bytes or 0)}{counted}"
    if case.seconds:
        found += f", {case.median_seconds:.2f} s a step"
    for one in case.predicted:
        found += f" ({one.low:.2f} to {one.high:.2f} predicted, {one.by})"
    return found
