"""Read a card's sensors while a case runs: its clock, its temperature, and why its clock is held down."""

import contextlib
import statistics
import threading
from typing import Any

import pynvml
import torch

from cria_tricks.bench.results import Sensors
from cria_tricks.measure.monitor import PATIENCE, ask, open_cards

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
