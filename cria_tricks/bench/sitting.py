"""Measure a card part by part, and keep what was measured: a sitting that was stopped goes on where it was.

While a case runs, the card's sensors are read: its clock, its temperature, and why its clock is held down.
"""

import contextlib
import datetime
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

from cria_tricks.adapter.provenance import commit
from cria_tricks.bench import cases, measured_card, tables
from cria_tricks.bench.accept import UNSTEADY, predicted
from cria_tricks.bench.case import Setup, bytes_by_dry_run, estimated, measure, prepared
from cria_tricks.bench.measured_card import (
    NAME,
    BenchSettings,
    MeasuredCard,
    MeasuredDevice,
    PartName,
    PartRecord,
    Provenance,
)
from cria_tricks.bench.results import Case, Sensors
from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.console import Aside, doing
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import duration
from cria_tricks.common.version import versions
from cria_tricks.doctor import calibrate
from cria_tricks.hardware import Device, calibration, this_device
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.gpus import by_datasheet
from cria_tricks.measure.monitor import PATIENCE, ask, open_cards
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles

ATTEMPTS = 2
"""How often a case is measured whose times are unsteady."""
REPORT = "report.md"
"""The tables."""
STRIDE = 1.1
"""How far apart the first lengths are that a search of the longest row tries [ratio]."""
CLOSE = 1.03
"""How close the longest row that ran and the shortest that did not must be for the search to end [ratio]."""


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
        self.sensors = open_card()
        self.card = MeasuredCard(
            device=_measured_device(self.device, self.sensors),
            versions=versions(),
            provenance=_provenance(command),
            settings=settings,
        )
        if self.file.exists():
            stored = measured_card.read(self.file)
            _refuse_another(stored, self.card, out)
            self.card = stored

    def run(self, wanted: Sequence[PartName]) -> None:
        """Measure these parts, but for what is in the file already; it is written again after each case."""
        for part in wanted:
            why = cases.skipped(part, self.card.settings, self.device)
            if why:
                self.say(f"{part}: skipped, because {why}")
                self._record(part, PartRecord(status="skipped", why=why))
            elif part in self.card.parts and self.card.parts[part].status == "done":
                self.say(f"{part}: is in {self.file} already")
            else:
                self._part(part)

    def report(self) -> Path:
        """Write the tables, and return their file."""
        report = self.file.with_name(REPORT)
        atomic_files.write_file(report, f"# {self.device.name}\n\n{tables.of_card(self.card)}\n")
        return report

    def _part(self, part: PartName) -> None:
        """Measure one part."""
        before = self.card.parts.get(part)
        so_far = before.seconds if before else 0.0
        record = PartRecord(status="open", seconds=so_far)
        self._record(part, record)
        began = time.perf_counter()
        status = "open"
        try:
            if part == "calibrate":
                self._calibrate()
            elif part == "longest":
                self._longest()
            else:
                self._planned(part)
            status = "done"
        finally:
            spent = so_far + time.perf_counter() - began
            self._record(part, record.model_copy(update={"status": status, "seconds": spent}))
        self.say(f"{part}: took {duration(spent)}")

    def _calibrate(self) -> None:
        seconds = cases.CALIBRATED[self.card.settings.short]
        self._keep(calibration=calibrate.measure(lambda name: self.say(f"  {name}"), seconds=seconds))

    def _planned(self, part: PartName) -> None:
        """Measure the cases of a part that are not in the file."""
        planned = cases.planned(part, self.card.settings, self.device)
        for number, one in enumerate(planned, 1):
            if self._known(one.bench, one.case.name):
                continue
            with doing(Aside(), f"measuring {one.bench}.{one.case.name}, {number} of {len(planned)}"):
                self._add(self._measured(part, one))

    def _measured(self, part: PartName, one: cases.Planned) -> Case:
        """Measure one case; if its times are unsteady, once more, and keep the steadier measurement."""
        lengths = cases.lengths_of(one, self.device)
        tried: list[Case] = []
        while not tried or (unsteadiness(tried[-1]) > UNSTEADY and len(tried) < ATTEMPTS):
            with Watch(self.sensors) as watch:
                case = measure(one.bench, one.case.name, one.case.words, one.setup, one.case.against, lengths)
            tried.append(case.model_copy(update={"sensors": watch.found()}))
        case = min(tried, key=unsteadiness)
        if case.status == "refused":
            return self._card_case(part, case)
        job = prepared(one.case.words, one.setup, lengths)
        counted = bytes_by_dry_run(*job) if one.dry else None
        return self._card_case(
            part, case, estimated_reserved_bytes=estimated(*job).reserved_bytes, dry_run_bytes=counted
        )

    def _card_case(self, part: PartName, case: Case, **extra: Any) -> Case:
        """Add to a case its part and what was predicted for it."""
        if case.seconds:
            extra["predicted"] = tuple(predicted(case, card) for card in self._rates())
        return Case.model_validate({**case.model_dump(), **extra, "part": part})

    def _longest(self) -> None:
        """Search the longest row; lengths that were tried already are not tried again."""
        settings = self.card.settings
        recipe = cases.longest_recipe(settings, self.device)
        said = toggles.longest(toggles.Target(find_shape(recipe.model), self.device), recipe)
        words = cases.words(recipe, toggles.switched_on(recipe))

        def runs(tokens: int) -> bool:
            name = f"tokens-{tokens}"
            known = self._known("longest", name)
            if known is None:
                with doing(Aside(), f"training rows of {tokens:,} tokens"):
                    case = measure("longest", name, words, Setup(settings.shape, tokens, 0))
                known = self._card_case("longest", case)
                self._add(known)
            return known.status == "ok"

        low, high = search_longest(said, runs)
        self.say(f"  {low:,} tokens ran, {high:,} did not; the bill by hand says {said:,}")

    def _rates(self) -> list[Card]:
        """Return the rates of the device: what was known before, and what this sitting has calibrated."""
        found = []
        known = by_datasheet(self.device)
        if known:
            found.append(known)
        if self.card.calibration:
            found.append(calibration.card_by(self.card.calibration, self.device))
        return found

    def _known(self, bench: str, name: str) -> Case | None:
        """Find a case in the file."""
        return next((case for case in self.card.cases if (case.bench, case.name) == (bench, name)), None)

    def _add(self, case: Case) -> None:
        """Keep a case, and say how it went."""
        self._keep(cases=(*self.card.cases, case))
        self.say(f"  {tables.line(case)}")

    def _record(self, part: PartName, record: PartRecord) -> None:
        self._keep(parts={**self.card.parts, part: record})

    def _keep(self, **changed: Any) -> None:
        """Change the card, and write its file."""
        about = self.card.provenance.model_copy(update={"ended": _now()})
        self.card = self.card.model_copy(update={**changed, "provenance": about})
        measured_card.write(self.card, self.file)
        interrupts.now_saved(
            f"{len(self.card.cases)} cases are in {self.file}; the same command goes on and measures none of them again"
        )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _provenance(command: str) -> Provenance:
    """Describe the code that runs."""
    code = commit()
    return Provenance(
        commit=code["commit"] or "", changed=bool(code["changed"]), command=command, began=_now(), ended=_now()
    )


def _measured_device(device: Device, card: Any) -> MeasuredDevice:
    """Describe the device and its driver."""
    return MeasuredDevice(
        kind=device.kind,
        name=device.name,
        capability=device.capability,
        real_bf16=device.real_bf16,
        memory_bytes=device.memory_bytes,
        host_memory_bytes=psutil.virtual_memory().total,
        threads=calibration.threads(),
        driver=driver() if card else "",
        cuda=torch.version.cuda or "",
        highest_clock_mhz=highest_clock(card) if card else None,
    )


def _refuse_another(stored: MeasuredCard, new: MeasuredCard, out: Path) -> None:
    """Refuse to go on with a measurement of something else."""
    differs = [name for name in ("device", "versions", "settings") if getattr(stored, name) != getattr(new, name)]
    if stored.provenance.commit != new.provenance.commit:
        differs.append("commit of cria_tricks")
    if differs:
        raise BadInput(f"--out {out}: holds a measurement with another {' and '.join(differs)}; name a new folder")


def search_longest(said: int, runs: Callable[[int], bool]) -> tuple[int, int]:
    """Search the longest row that trains on a card: begin with what the bill by hand says, then search around it.

    The bill takes 400 MB for the CUDA context, which a hardware profile's limit of the allocator does not, so there a
    little more may run than it says.

    Args:
        said: the length to begin with [tokens].
        runs: trains rows of a length, and returns whether that worked.

    Returns:
        The longest length that ran, and the shortest that did not [tokens].
    """
    low = high = said
    if runs(said):
        while runs(high := int(high * STRIDE)):
            low = high
    else:
        while not runs(low := int(low / STRIDE)):
            high = low
    while high > low * CLOSE:
        middle = (low + high) // 2
        if runs(middle):
            low = middle
        else:
            high = middle
    return low, high


def unsteadiness(case: Case) -> float:
    """Return how many times the fastest step of a case its median takes; 1 without times."""
    if not case.seconds:
        return 1.0
    return statistics.median(case.seconds) / min(case.seconds)


SECONDS = 0.5
"""The time between two readings [s]."""
REASONS = {
    "power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "thermal slowdown": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware thermal slowdown": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "fixed by its owner": "nvmlClocksThrottleReasonApplicationsClocksSetting",
}
"""Our name of a reason -> the name of its bit in NVML. An idle card has a reason, too, which says nothing."""


def open_card() -> Any:
    """Open the sensors of the card that is measured; ``None`` on a CPU, or without NVML."""
    if not torch.cuda.is_available():
        return None
    return open_cards([torch.cuda.get_device_properties(0)])[0]


def driver() -> str:
    """Return the version of NVIDIA's driver; empty without NVML."""
    with contextlib.suppress(pynvml.NVMLError):
        return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


def highest_clock(card: Any) -> float | None:
    """Return the highest clock that the multiprocessors may have [MHz]; ``None`` if NVML does not say."""
    with contextlib.suppress(pynvml.NVMLError):
        return float(pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM))
    return None


class Watch:
    """Read the sensors in a background thread, inside ``with watch:``.

    Args:
        card: from :func:`open_card`; with ``None`` nothing is read.
    """

    def __init__(self, card: Any):
        self.card = card
        self._readings: list[dict[str, float]] = []
        self._throttled: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def __enter__(self) -> "Watch":
        if self.card:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self.card:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(SECONDS):
            self._readings.append(ask(self.card))
            with contextlib.suppress(pynvml.NVMLError):
                bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.card)
                self._throttled += [reason for reason, name in REASONS.items() if bits & getattr(pynvml, name)]

    def found(self) -> Sensors | None:
        """Sum up the readings; ``None`` if there is no card."""
        if not self.card:
            return None
        clocks = [reading["clock_mhz"] for reading in self._readings if "clock_mhz" in reading]
        degrees = [reading["celsius"] for reading in self._readings if "celsius" in reading]
        return Sensors(
            median_clock_mhz=statistics.median(clocks) if clocks else None,
            highest_celsius=max(degrees, default=None),
            throttled=tuple(dict.fromkeys(self._throttled)),
        )
