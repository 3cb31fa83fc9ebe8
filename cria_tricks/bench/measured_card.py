"""Define the file that ``cria bench`` writes: one device, measured in one sitting under one set of settings.

It is written again after each case, so a sitting that was stopped goes on where it was.
"""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from cria_tricks.bench.results import Case, Strict, first_wrong, folder_of, read_json
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.calibration import Calibration

NAME = "measured_card.json"
"""The file in the folder of a sitting."""
FORMAT = "cria_tricks measured card 1"
"""The value of ``format``. The number grows when a field changes its meaning."""

PartName = Literal["calibrate", "ladder", "alone", "capstone", "longest", "errors"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""The parts of a sitting, in their order."""


class MeasuredDevice(Strict):
    """The card or the CPU, and its driver."""

    kind: Literal["cpu", "cuda"]
    name: str = Field(min_length=1, description="as torch names it")
    capability: tuple[int, int] = Field(description="CUDA compute capability; 0, 0 on a CPU")
    real_bf16: bool = Field(description="whether bf16 runs in hardware")
    memory_bytes: int = Field(gt=0, description="of the card; of the machine on a CPU")
    host_memory_bytes: int = Field(gt=0, description="of the machine")
    threads: int = Field(ge=1, description="that torch computes with")
    driver: str = Field("", description="NVIDIA's; empty on a CPU")
    cuda: str = Field("", description="the CUDA version of torch; empty in a CPU build")
    highest_clock_mhz: float | None = Field(None, gt=0, description="that the multiprocessors may have; none on a CPU")


class Provenance(Strict):
    """Where the code and the figures come from."""

    commit: str = Field(description="of the checkout or the installed package; empty if it is not known")
    changed: bool = Field(description="whether files of the package differ from that commit")
    command: str = Field(description="as it was typed")
    began: str = Field(description="ISO 8601, UTC")
    ended: str = Field(description="of the last case so far")


class BenchSettings(Strict):
    """What was asked for, which must stay the same when a sitting goes on."""

    short: bool
    shape: str = Field(description="of the model, as random:SHAPE names it")
    alone_shape: str = Field(description="of the model on which each switch is measured alone")
    tokens: int = Field(ge=8, description="of a row")
    rounds: int = Field(ge=3, description="timed steps of a case, at most")
    profile: Literal["", "t4"] = Field("", description="what the card was held to")


class PartRecord(Strict):
    """What became of a part."""

    status: Literal["open", "done", "skipped"]
    why: str = Field("", description="it was skipped")
    seconds: float = Field(0.0, ge=0, description="it took, all sittings together")


class MeasuredCard(Strict):
    """One device, measured in one sitting.

    A case is in the part that it was measured for; a step of the ladder is in ``ladder`` also where the part ``alone``
    compares with it.
    """

    format: Literal["cria_tricks measured card 1"] = FORMAT  # type: ignore[assignment]
    device: MeasuredDevice
    versions: dict[str, str]
    provenance: Provenance
    settings: BenchSettings
    parts: dict[PartName, PartRecord] = Field({})
    calibration: Calibration | None = None
    cases: tuple[Case, ...] = ()

    def of(self, *parts: PartName) -> list[Case]:
        """Return the cases of these parts, in the order in which they were measured."""
        return [case for case in self.cases if case.part in parts]

    @property
    def folder(self) -> str:
        """Name of the device's folder among the results."""
        return folder_of(self.device.kind, self.device.name)


def write(card: MeasuredCard, file: Path) -> None:
    """Write a card's file, in place of an older state of it.

    Raises:
        Unwritten: if it cannot be written.
    """
    atomic_files.write_file(file, json.dumps(card.model_dump(mode="json"), indent=1, allow_nan=False) + "\n")


def read(file: Path) -> MeasuredCard:
    """Read a card's file.

    Raises:
        BadInput: if it cannot be read, or breaks the schema; the sentence names the file and the first wrong field.
    """
    values: Any = read_json(file)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BadInput(f"{file}: format: is not {FORMAT!r}, so this is no file of cria bench")
    try:
        return MeasuredCard.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{file}: {first_wrong(error)}") from None
