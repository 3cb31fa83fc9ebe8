"""Measured cards that nobody measured: a T4 as the estimates see it, for what must hold whatever a card says."""

import statistics
from pathlib import Path
from typing import Any

from cria_tricks.bench import cases, measured_card
from cria_tricks.bench.accept import predicted, step_of
from cria_tricks.bench.case import prepared, settings_of
from cria_tricks.bench.measured_card import MeasuredCard, MeasuredDevice, PartRecord, Provenance
from cria_tricks.bench.results import Case, Sensors
from cria_tricks.bill import step_time
from cria_tricks.hardware.calibration import Calibration
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device, pretend
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.switches.folds import estimate

DAY = "2026-11-20T12:00:00+00:00"
VERSIONS = {"torch": "2.11.0", "transformers": "5.16.1", "peft": "0.20.0", "bitsandbytes": "0.50.2",
            "cria_tricks": "0.4.0"}  # fmt: skip
PAUSES = (1.0, 1.04, 1.02)
"""What the steps of a case take, in units of the first."""


def made_up(name: str = "t4", times: float = 1.0) -> MeasuredCard:
    """Make up a card whose bytes are those of the bill, and whose steps take ``times`` the predicted seconds."""
    card = GPUS[name].card
    device = card.device
    settings = cases.settings_for(device, short=True)
    with pretend(device):
        made = [_case(one, card, times) for one in cases.planned("ladder", settings, device)]
    rates = {"flops products fp16": 0.3 * card.half_flops, "flops products fp32": 0.3 * card.full_flops}
    done = PartRecord(status="done", seconds=70)
    return MeasuredCard(
        device=_device(device),
        versions=VERSIONS,
        provenance=Provenance(
            commit="0123456789" * 4, changed=False, command="cria bench --short", began=DAY, ended=DAY,
        ),
        settings=settings,
        parts=dict.fromkeys(("calibrate", "ladder"), done),
        calibration=Calibration(device.name, device.kind, 2, VERSIONS, DAY[:10], "llama-3.2-1b", 17e-6, 6e9, rates),
        cases=tuple(made),
    )  # fmt: skip


def _device(device: Device) -> MeasuredDevice:
    return MeasuredDevice(
        kind=device.kind, name=device.name, capability=device.capability, real_bf16=device.real_bf16,
        memory_bytes=device.memory_bytes, host_memory_bytes=2**34, threads=2, driver="580.65.06", cuda="12.8",
        highest_clock_mhz=1590,
    )  # fmt: skip


def _case(one: cases.Planned, card: Card, times: float) -> Case:
    device = card.device
    recipe, _, _ = prepared(one.case.words, one.setup)
    bill = estimate(recipe, cases.find_shape(recipe.model), device)
    case = Case(
        part="ladder", bench=one.bench, name=one.case.name, against=one.case.against, status="ok",
        settings=tuple(settings_of(one.case.words, device)), model=recipe.model, rows=1,
        tokens_per_row=one.setup.tokens, tokens=one.setup.tokens, trained_tokens=one.setup.tokens * 3 // 4,
        seconds=PAUSES, peak_allocated_bytes=bill.allocated_bytes + 2**20, peak_reserved_bytes=bill.reserved_bytes,
        estimated_bytes=bill.allocated_bytes, dry_run_bytes=bill.allocated_bytes, date=DAY, device=device.name,
        kind=device.kind, versions=VERSIONS,
        sensors=Sensors(median_clock_mhz=900, highest_celsius=70, throttled=("power cap",)),
    )  # fmt: skip
    step = step_time.time_of(step_of(case, device), card).seconds * times / statistics.median(PAUSES)
    case = case.model_copy(update={"seconds": tuple(step * pause for pause in PAUSES)})
    return case.model_copy(update={"predicted": (predicted(case, card),)})


def changed(card: MeasuredCard, place: str, value: Any) -> dict[str, Any]:
    """Return the JSON of a card with one value changed, or taken out if it is ``...``.

    Args:
        card: the card.
        place: the path to the value; a number is a place in a list.
        value: the new value.
    """
    found: Any = card.model_dump(mode="json")
    *path, last = [int(word) if word.lstrip("-").isdigit() else word for word in place.split("/")]
    inner = found
    for word in path:
        inner = inner[word]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return found


def written(card: MeasuredCard, folder: Path, name: str = measured_card.NAME) -> Path:
    """Write a card's file into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    measured_card.write(card, folder / name)
    return folder / name
