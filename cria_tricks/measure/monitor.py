"""Sample the cards and this process during a run, in a background thread.

The trainer's own peaks (``measure/memory.py``) are bytes of tensors. These samples show what the operating system and
the driver see: the resident memory of the process, the memory of each card that all processes use together, and the
card's utilisation, temperature and power. Reading them needs no synchronisation with the card, so the run does not wait
for it.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch
from transformers import TrainerCallback

from cria_tricks.common.units import human

READINGS: dict[str, Callable[[Any], float]] = {
    "memory_bytes": lambda card: pynvml.nvmlDeviceGetMemoryInfo(card, pynvml.nvmlMemory_v2).used,
    "utilisation": lambda card: pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
    "watts": lambda card: pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
    "celsius": lambda card: pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
    "clock_mhz": lambda card: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
}
"""Name of a reading -> how to get it from NVML, NVIDIA's library for monitoring its cards.

``utilisation`` is the share of time in which any kernel ran. ``memory_bytes`` is the memory of all processes, with
their CUDA contexts, as nvidia-smi counts it; version 2 of the call leaves out the memory that the driver reserves.
"""
PATIENCE = 5.0
"""How long the end of a run waits for the last sample [seconds]."""
SHORTEST = 0.1
"""The shortest time since the last sample after which the end of a run takes one more [seconds].

For a shorter time the share of CPU time would say nothing, because the system counts CPU time in ticks of 10 ms.
"""


def open_cards(devices: Sequence[Any]) -> list[Any]:
    """Open the NVML handles of the cards that torch uses.

    NVML is asked by UUID, because CUDA numbers the cards differently as soon as ``CUDA_VISIBLE_DEVICES`` is set.

    Args:
        devices: ``torch.cuda.get_device_properties`` of each card.

    Returns:
        One handle for each card; ``None`` for a card that NVML does not find, and for all cards if there is no NVML.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [None] * len(devices)
    return [_open(device) for device in devices]


def _open(device: Any) -> Any:
    """Open the NVML handle of one card; ``None`` if NVML does not find it."""
    for kind in ("GPU", "MIG"):  # MIG (multi-instance GPU): a part of a card, which has a UUID of its own
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{device.uuid}")
    return None


def ask(card: Any) -> dict[str, float]:
    """Take all :data:`READINGS` that a card supports.

    A reading that fails is left out. A card that was lost gives none, and a part of a card (MIG) gives no utilisation.

    Args:
        card: a handle from :func:`open_cards`, or ``None``.
    """
    found: dict[str, float] = {}
    if not card:
        return found
    for name, reading in READINGS.items():
        with contextlib.suppress(pynvml.NVMLError):
            found[name] = reading(card)
    return found


class Monitor(TrainerCallback):
    """Take a sample every few seconds, inside ``with monitor:``, and append it to a file as one line of JSON.

    A sample holds ``time`` (seconds since 1970), ``step`` (optimizer steps done), ``seconds`` since the sample before,
    ``rss_bytes`` (resident memory of this process), ``cpu_cores`` (how many cores it kept busy since the sample before)
    and ``cards``: for each card its readings, and the bytes that torch's allocator has allocated and reserved there.
    An error in the monitor does not end the run.

    Args:
        path: the file; a resumed run appends its samples to those of its earlier parts.
        seconds: the time between two samples; 0 switches sampling off.
        cuda: whether to sample the cards that torch uses.
        say: gets a sentence for the user if sampling fails.

    Attributes:
        newest: the last sample; empty before the first.
    """

    def __init__(
        self,
        path: Path,
        seconds: float,
        *,
        cuda: bool = False,
        say: Callable[[str], None] = lambda sentence: None,
    ):
        self.path = path
        self.seconds = seconds
        self.cuda = cuda
        self.say = say
        self.step = 0
        self.newest: dict[str, Any] = {}
        self.cards: list[Any] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        if self.seconds:
            self._process = psutil.Process()
            self._last = time.perf_counter()
            self._cpu_seconds = self._busy()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def on_step_end(self, args, state, control, **kwargs):
        """Remember how many optimizer steps are done."""
        self.step = state.global_step

    def summary(self) -> dict[str, Any] | None:
        """Summarise the samples of the whole run; ``None`` if nothing was sampled."""
        if not self.seconds:
            return None
        return summarise(read(self.path))

    def _run(self) -> None:
        # A broken driver, a full disk or a container without /proc must not stop the training.
        try:
            if self.cuda:
                numbers = range(torch.cuda.device_count())
                self.cards = open_cards([torch.cuda.get_device_properties(number) for number in numbers])
            with _appending(self.path) as write:
                while not self._stop.wait(self.seconds):
                    write(self.sample())
                # One last sample, so that the end of the run is covered, and even the shortest run has a sample.
                if not self.newest or time.perf_counter() - self._last > SHORTEST:
                    write(self.sample())
        except Exception as error:
            self.say(f"warning: train.monitor_seconds: {type(error).__name__}: {error}; the run goes on unwatched")

    def sample(self) -> dict[str, Any]:
        """Take one sample."""
        now = time.perf_counter()
        cpu_seconds = self._busy()
        seconds = now - self._last
        cores = (cpu_seconds - self._cpu_seconds) / seconds
        self._last = now
        self._cpu_seconds = cpu_seconds
        self.newest = {
            "time": round(time.time(), 3),
            "step": self.step,
            "seconds": round(seconds, 3),
            "rss_bytes": self._process.memory_info().rss,
            "cpu_cores": round(cores, 3),
            "cards": [
                {
                    **ask(card),
                    "allocated_bytes": torch.cuda.memory_allocated(number),
                    "reserved_bytes": torch.cuda.memory_reserved(number),
                }
                for number, card in enumerate(self.cards)
            ],
        }
        return self.newest

    def _busy(self) -> float:
        """Return the CPU time that this process has used so far, over all its threads [seconds]."""
        times = self._process.cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Give a function that appends samples to a file; if its last line is incomplete, they begin on a new line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # A process that was killed may have written only a part of its last line.
        torn = file.tell() and not path.read_bytes().endswith(b"\n")
        if torn:
            file.write("\n")

        def write(sample: Mapping[str, Any]) -> None:
            file.write(json.dumps(sample) + "\n")
            file.flush()

        yield write


def read(path: Path) -> list[dict[str, Any]]:
    """Read the samples of a file, and skip incomplete lines; a missing file has no samples."""
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def summarise(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Summarise samples: the peak of each reading, and its mean weighted by time.

    Args:
        samples: from :func:`read`.

    Returns:
        ``samples`` (how many) and ``seconds`` (how long); ``mean`` and ``peak`` of ``rss_bytes``, of ``cpu_cores`` and,
        in ``cards``, of each card's readings. ``None`` if there are no samples.
    """
    if not samples:
        return None

    seconds = [sample["seconds"] for sample in samples]
    cards = []
    for number in range(max(len(sample["cards"]) for sample in samples)):
        # An earlier part of the run may have had fewer cards.
        readings = [sample["cards"][number] if number < len(sample["cards"]) else {} for sample in samples]
        names = dict.fromkeys(itertools.chain.from_iterable(readings))  # each name once, in order
        cards.append({name: _over_time(name, readings, seconds) for name in names})
    return {
        "samples": len(samples),
        "seconds": sum(seconds),
        "rss_bytes": _over_time("rss_bytes", samples, seconds),
        "cpu_cores": _over_time("cpu_cores", samples, seconds),
        "cards": cards,
    }


def _over_time(name: str, readings: Sequence[Mapping[str, Any]], seconds: Sequence[float]) -> dict[str, float]:
    """Compute the mean of a reading, weighted by time, and its peak, over the samples that have it."""
    known = [(found[name], weight) for found, weight in zip(readings, seconds, strict=True) if name in found]
    total = sum(weight for _, weight in known)
    return {
        "mean": sum(value * weight for value, weight in known) / total,
        "peak": max(value for value, _ in known),
    }


WORDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "rss_bytes": ("process, resident memory", human),
    "cpu_cores": ("process, CPU cores busy", lambda cores: f"{cores:.2f}"),
    "memory_bytes": ("card, memory of all processes", human),
    "reserved_bytes": ("card, reserved by torch", human),
    "allocated_bytes": ("card, allocated to tensors", human),
    "utilisation": ("card, time with a kernel running", lambda share: f"{share:.0%}"),
    "watts": ("card, power", lambda watts: f"{watts:.0f} W"),
    "celsius": ("card, temperature", lambda celsius: f"{celsius:.0f} °C"),
    "clock_mhz": ("card, clock of the multiprocessors", lambda clock: f"{clock:.0f} MHz"),
}
"""Name of a reading -> its label in :func:`table`, and the function that formats its values."""


def table(processes: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, str, str]]:
    """Make one table line for each reading: its label, mean and peak, all as text.

    Args:
        processes: for each rank of the run what :func:`summarise` returned.
    """
    rows: list[tuple[str, str, str]] = []
    for rank, found in enumerate(processes):
        if not found:
            continue
        process = f" of process {rank}" if len(processes) > 1 else ""
        rows += _in_words(found, process)
        for number, readings in enumerate(found["cards"]):
            which = f" {number}" if len(found["cards"]) > 1 else ""
            rows += _in_words(readings, process, which)
    return rows


def _in_words(readings: Mapping[str, Any], process: str, card: str = "") -> list[tuple[str, str, str]]:
    """Make the table lines of one process or one card; ``process`` and ``card`` are added to the labels."""
    rows = []
    for name, (words, written) in WORDS.items():
        if name in readings:
            label = words.replace("card", f"card{card}", 1) + process
            rows.append((label, written(readings[name]["mean"]), written(readings[name]["peak"])))
    return rows
