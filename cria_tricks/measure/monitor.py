"""Sample what the machine does during a run, in a thread: the cards and this process.

The trainer's own peaks (``measure/memory.py``) are bytes of tensors. These samples are what others see: the process's
resident memory, the card's memory with everything that is on it, and how busy, warm and hungry it was. Reading them
needs no synchronisation with the card, so the run does not wait for it.
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
"""What a card is asked for. ``utilisation`` is the share of time in which any kernel ran; ``memory_bytes`` is of all
processes, contexts included, as nvidia-smi counts it (the second version of the call leaves out the driver's own)."""
PATIENCE = 5.0
"""Seconds that the end of a run waits for a card's last answer."""
SHORTEST = 0.1
"""Seconds under which a share of CPU time says nothing: the system counts it in ticks of 10 ms."""


def open_cards(devices: Sequence[Any]) -> list[Any]:
    """Open NVML's handles of the cards that torch uses.

    By UUID: CUDA's numbers are not NVML's as soon as ``CUDA_VISIBLE_DEVICES`` is set.

    Args:
        devices: ``torch.cuda.get_device_properties`` of each.

    Returns:
        A handle each, ``None`` for a card that NVML does not find; of all of them when there is no NVML.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [None] * len(devices)
    return [_open(device) for device in devices]


def _open(device: Any) -> Any:
    for kind in ("GPU", "MIG"):  # MIG: a part of a card, which has a UUID of its own
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{device.uuid}")
    return None


def ask(card: Any) -> dict[str, float]:
    """Read all of :data:`READINGS` that a card answers; a lost one answers nothing, a part of one no utilisation."""
    found: dict[str, float] = {}
    if not card:
        return found
    for name, reading in READINGS.items():
        with contextlib.suppress(pynvml.NVMLError):
            found[name] = reading(card)
    return found


class Monitor(TrainerCallback):
    """Takes a sample every so many seconds, inside ``with monitor:``, and writes it as a line of JSON.

    A line holds ``time`` (seconds since 1970), ``step`` (optimizer steps done), ``seconds`` since the line before,
    ``rss_bytes`` (this process's resident memory), ``cpu_cores`` (how many it kept busy since the line before) and
    ``cards``: for each what it answered, and what torch's allocator has allocated and reserved on it. Nothing that
    goes wrong here ends a run.

    Args:
        path: the file; an earlier part of the run in it is gone on from.
        seconds: between two samples; 0 takes none.
        cuda: whether there are cards to ask.
        say: takes a sentence for the user.

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
        """Remember the number of the step."""
        self.step = state.global_step

    def summary(self) -> dict[str, Any] | None:
        """Summarise the samples of the whole run; ``None`` if nothing was sampled."""
        if not self.seconds:
            return None
        return summarise(read(self.path))

    def _run(self) -> None:
        # Whatever a driver, a full disk or a container without /proc comes up with, the training goes on.
        try:
            if self.cuda:
                numbers = range(torch.cuda.device_count())
                self.cards = open_cards([torch.cuda.get_device_properties(number) for number in numbers])
            with _appending(self.path) as write:
                while not self._stop.wait(self.seconds):
                    write(self.sample())
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
        times = self._process.cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Write lines at the end of a file; what a killed process left of its last line stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        torn = file.tell() and not path.read_bytes().endswith(b"\n")
        if torn:
            file.write("\n")

        def write(sample: Mapping[str, Any]) -> None:
            file.write(json.dumps(sample) + "\n")
            file.flush()

        yield write


def read(path: Path) -> list[dict[str, Any]]:
    """Read the samples of a file; torn lines are passed over, and a missing file has none."""
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def summarise(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Summarise samples by their peaks, and their means over time.

    Args:
        samples: from :func:`read`.

    Returns:
        ``samples`` and ``seconds``; ``rss_bytes`` and ``cpu_cores``, and in ``cards`` for each card every reading, with
        its ``mean`` and its ``peak``. ``None`` for no samples.
    """
    if not samples:
        return None

    seconds = [sample["seconds"] for sample in samples]
    cards = []
    for number in range(max(len(sample["cards"]) for sample in samples)):
        # An earlier part of the run may have had fewer cards.
        readings = [sample["cards"][number] if number < len(sample["cards"]) else {} for sample in samples]
        names = dict.fromkeys(itertools.chain.from_iterable(readings))  # each once, in their order
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
"""A reading in words, and how it is written."""


def table(processes: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, str, str]]:
    """Write what was sampled, its mean and its peak, in words: one line for each reading.

    Args:
        processes: what :func:`summarise` gave for each process of the run.
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
    rows = []
    for name, (words, written) in WORDS.items():
        if name in readings:
            label = words.replace("card", f"card{card}", 1) + process
            rows.append((label, written(readings[name]["mean"]), written(readings[name]["peak"])))
    return rows
