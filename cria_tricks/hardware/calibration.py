"""Store and read what ``cria doctor --calibrate`` measured on this machine, so that plans for it can use its own rates.

The measurement is a file in the cache folder. It holds for one device, one number of threads and one set of library
versions. If any of these changes, it is stale: plans say so, and ignore it.
"""

import functools
import importlib.metadata
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cria_tricks.common import atomic_files
from cria_tricks.common.cache import cache_folder
from cria_tricks.common.version import ARITHMETIC
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.hardware.reached import SPREAD, Reached

AGAIN = "run cria doctor --calibrate again"
"""What helps against a stale measurement."""


@dataclass(frozen=True)
class Calibration:
    """The measured rates of a machine.

    Attributes:
        device: the product's name.
        kind: ``"cpu"`` or ``"cuda"``.
        threads: the number of threads that torch used.
        versions: the versions of the libraries that compute a step.
        date: the day of the measurement.
        model: the model whose shapes were measured.
        launch: the time that an operation takes beside its work [s].
        link_rate: the rate of copies between card and host [bytes/s].
        rates: the other rates, as in :attr:`Card.measured`.
    """

    device: str
    kind: str
    threads: int
    versions: dict[str, str]
    date: str
    model: str
    launch: float
    link_rate: float
    rates: dict[str, float]


def path() -> Path:
    """Return the file of the measurement: ``$CRIA_CALIBRATION``, else one in the cache folder."""
    return Path(os.environ.get("CRIA_CALIBRATION") or cache_folder() / "calibration.json")


def store(found: Calibration) -> Path:
    """Write a measurement, in place of an older one, and return its file.

    Raises:
        BadInput: if the file cannot be written.
    """
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_file(file, json.dumps(asdict(found), indent=2) + "\n")
    return file


def read() -> Calibration | None:
    """Read the stored measurement; ``None`` if there is none, or if it is damaged."""
    file = path()
    try:
        return _read(str(file), file.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(4)  # a plan asks for it hundreds of times
def _read(file: str, changed: int) -> Calibration | None:
    """Read a file; ``changed`` is the time of its last change, so that a new measurement is read anew."""
    try:
        found = Calibration(**json.loads(Path(file).read_text(encoding="utf-8")))
        numbers = [found.launch, found.link_rate, *found.rates.values()]
        return found if min(numbers) > 0 else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def threads() -> int:
    """Return the number of threads that torch takes on this machine, without importing it."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else os.cpu_count() or 1


@functools.cache
def versions() -> dict[str, str]:
    """Look up the versions of the libraries that compute a step."""
    return {name: importlib.metadata.version(name) for name in ARITHMETIC}


def stale(device: Device) -> str:
    """Say in a sentence why the stored measurement is not used for this machine; an empty text if it is, or is none."""
    found = read()
    if found is None:
        return ""
    changed = [f"{name} {found.versions.get(name)}, now {now}" for name, now in versions().items()
               if found.versions.get(name) != now]  # fmt: skip
    if (found.device, found.kind) != (device.name, device.kind):
        changed.append(f"{found.device}, now {device.name}")
    if found.kind == "cpu" and found.threads != threads():
        changed.append(f"{found.threads} threads, now {threads()}")
    if not changed:
        return ""
    return f"the calibration of {found.date} is ignored, because it measured {'; '.join(changed)}: {AGAIN}"


def card_of(device: Device) -> Card | None:
    """Return a device with its measured rates; ``None`` if it was not measured, or the measurement is stale."""
    found = read()
    if found is None or stale(device):
        return None
    return card_by(found, device)


def card_by(found: Calibration, device: Device) -> Card:
    """Return a device with the rates of a measurement."""
    reached = Reached(1, 1, 1, found.launch, SPREAD, f"measured on this machine, {found.date}", link=1)
    half = found.rates.get(f"flops products {device.half_precision}", found.rates["flops products fp32"])
    return Card(
        device=device,
        half_flops=found.rates.get("flops products fp16", half),
        full_flops=found.rates["flops products fp32"],
        memory_rate=found.rates["bytes between products fp32"],
        link_rate=found.link_rate,
        source=reached.source,
        reached=reached,
        measured=tuple(sorted(found.rates.items())),
    )
