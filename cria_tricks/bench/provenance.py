"""Say where a measurement comes from: the commit and the content of the code, the machine's kind, and its parts."""

import datetime
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Literal

import psutil
import torch

from cria_tricks.bench import sensors
from cria_tricks.bench.measured_card import MeasuredDevice, Provenance
from cria_tricks.doctor.machine import colab
from cria_tricks.hardware import Device
from cria_tricks.hardware.calibration import threads

PACKAGE = Path(__file__).parents[1]

Place = Literal["colab", "kaggle", "a runner of GitHub", "another machine"]


def now() -> str:
    """Return the time, as the cases have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def provenance(command: str) -> Provenance:
    """Describe the code that runs, and where it runs."""
    commit = _git("rev-parse", "HEAD")
    return Provenance(
        commit=commit,
        changed=bool(commit and _git("status", "--porcelain", "--", str(PACKAGE))),
        code=code(),
        place=_place(),
        command=command,
        began=now(),
        ended=now(),
    )


def code() -> str:
    """Return a hash of the package's Python files: two measurements with the same one ran the same code."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def measured_device(device: Device) -> MeasuredDevice:
    """Describe the device and its driver."""
    card = sensors.open_card()
    return MeasuredDevice(
        kind=device.kind,
        name=device.name,
        capability=device.capability,
        real_bf16=device.real_bf16,
        memory_bytes=device.memory_bytes,
        host_memory_bytes=psutil.virtual_memory().total,
        threads=threads(),
        driver=sensors.driver() if card else "",
        cuda=torch.version.cuda or "",
        highest_clock_mhz=sensors.highest_clock(card) if card else None,
    )


def _git(*words: str) -> str:
    """Ask git about the checkout that the package is in; empty for an installed package, or without git."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _place() -> Place:
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "kaggle"
    if colab():
        return "colab"
    if os.environ.get("GITHUB_ACTIONS"):
        return "a runner of GitHub"
    return "another machine"
