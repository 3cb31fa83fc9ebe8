"""Read a card's sensors before, during and after a case: its clock, its temperature, and why its clock is held down."""

import contextlib
import statistics
import threading
from collections.abc import Iterator
from typing import Any

import pynvml
import torch

from cria_tricks.bench.measured_card import Reading, Sensors
from cria_tricks.measure.monitor import PATIENCE, ask, open_cards

SECONDS = 0.5
"""The time between two readings while a case runs [s]."""
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


def read(card: Any) -> Reading:
    """Take one reading; a sensor that the card lacks is left out."""
    found: dict[str, Any] = {name: value for name, value in ask(card).items() if name in Reading.model_fields}
    with contextlib.suppress(pynvml.NVMLError):
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
        found["throttled"] = tuple(reason for reason, name in REASONS.items() if bits & getattr(pynvml, name))
    return Reading(**found)


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
        self._during: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def __enter__(self) -> "Watch":
        if self.card:
            self.before = read(self.card)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self.card:
            self.after = read(self.card)
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(SECONDS):
            self._during.append(read(self.card))

    def found(self) -> Sensors | None:
        """Sum up the readings; ``None`` if there is no card."""
        if not self.card:
            return None
        seen = [self.before, *self._during, self.after]
        clocks = [one.clock_mhz for one in self._during if one.clock_mhz is not None]
        return Sensors(
            before=self.before,
            after=self.after,
            samples=len(self._during),
            median_clock_mhz=statistics.median(clocks) if clocks else None,
            highest_celsius=max((one.celsius for one in self._during if one.celsius is not None), default=None),
            throttled=tuple(dict.fromkeys(_reasons(seen))),
        )


def _reasons(readings: list[Reading]) -> Iterator[str]:
    for one in readings:
        yield from one.throttled
