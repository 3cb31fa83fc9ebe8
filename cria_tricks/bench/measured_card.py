"""The schema of a card that was measured in one sitting by ``cria bench``, and its file.

A file holds one device under one set of settings. It is written again after each case, so a sitting that was stopped
goes on where it was. ``docs/assets/measured_card.schema.json`` is this schema for other programs.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cria_tricks.bench.results import Case, folder_of, read_json
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput

NAME = "measured_card.json"
"""The file in the folder of a sitting."""
FORMAT = "cria_tricks measured card 1"
"""The value of ``format``. The number grows when a field changes its meaning."""

PartName = Literal["machine", "calibrate", "ladder", "alone", "capstone", "longest", "errors"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""The parts of a sitting, in their order."""
OF_CASES: tuple[PartName, ...] = ("ladder", "alone", "capstone", "longest", "errors")
"""The parts that consist of cases."""


class _Strict(BaseModel):
    """What all parts of the schema share: no unknown fields, no NaN, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MeasuredDevice(_Strict):
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


class Provenance(_Strict):
    """Where the code and the figures come from."""

    commit: str = Field(pattern=r"^([0-9a-f]{40})?$", description="of the checkout; empty for an installed package")
    changed: bool = Field(description="whether files of the package differ from that commit")
    code: str = Field(pattern=r"^[0-9a-f]{64}$", description="sha256 over the package's Python files")
    place: Literal["colab", "kaggle", "a runner of GitHub", "another machine"]
    command: str = Field(description="as it was typed")
    began: str = Field(description="ISO 8601, UTC")
    ended: str = Field(description="of the last case so far")


class BenchSettings(_Strict):
    """What was asked for, which must stay the same when a sitting goes on."""

    short: bool
    shape: str = Field(description="of the model, as random:SHAPE names it")
    alone_shape: str = Field(description="of the model on which each switch is measured alone")
    tokens: int = Field(ge=8, description="of a row")
    rounds: int = Field(ge=3, description="timed steps of a case, at most")
    profile: Literal["", "t4"] = Field("", description="what the card was held to")


class Reading(_Strict):
    """What a card's sensors said at one moment; a sensor that it lacks is left out."""

    celsius: float | None = Field(None, ge=-50, le=150)
    clock_mhz: float | None = Field(None, ge=0, description="of the multiprocessors")
    watts: float | None = Field(None, ge=0)
    throttled: tuple[str, ...] = Field((), description="why the clock is held down, in NVML's words")


class Sensors(_Strict):
    """A card's sensors around one case."""

    before: Reading
    after: Reading
    samples: int = Field(ge=0, description="readings while the case ran")
    median_clock_mhz: float | None = Field(None, ge=0, description="of those")
    highest_celsius: float | None = Field(None, ge=-50, le=150, description="of those")
    throttled: tuple[str, ...] = Field((), description="all reasons that were seen")


class Predicted(_Strict):
    """The predicted time of an optimizer step."""

    by: str = Field(description="what backs it, as in cria plan")
    seconds: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)


class CardCase(Case):
    """A case of a sitting: what a benchmark's case has, and what was predicted for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    part: PartName
    dry_run_bytes: int | None = Field(None, gt=0, description="the same peak, counted on tensors without data")
    estimated_reserved_bytes: int | None = Field(None, gt=0, description="what the allocator should reserve, at most")
    predicted: tuple[Predicted, ...] = Field((), description="of its step; none without rates of the device")
    attempts: int = Field(1, ge=1, description="measurements; the steadiest is kept")
    sensors: Sensors | None = Field(None, description="none on a CPU")

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_computed(cls, values: Any) -> Any:
        """Take the computed fields out of a case that was read, and compare them with what they follow from."""
        if not isinstance(values, dict):
            return values
        given = {field: values[field] for field in cls.model_computed_fields if field in values}
        if not given:
            return values
        rest = {field: value for field, value in values.items() if field not in given}
        made = cls.model_validate(rest)
        for field, value in given.items():
            if value != getattr(made, field):
                raise ValueError(f"{field} = {value} does not follow from seconds and tokens")
        return rest


class PartRecord(_Strict):
    """What became of a part."""

    status: Literal["open", "done", "skipped"]
    why: str = Field("", description="it was skipped")
    predicted_seconds: float | None = Field(None, ge=0, description="said before it began")
    seconds: float = Field(0.0, ge=0, description="it took, all sittings together")


class Calibrated(_Strict):
    """What ``cria doctor --calibrate`` measured."""

    date: str
    model: str = Field(description="whose shapes were measured")
    launch: float = Field(gt=0, description="time of an operation beside its work [s]")
    link_rate: float = Field(gt=0, description="copies between card and host [bytes/s]")
    rates: dict[str, float] = Field(description="flops PART PRECISION or bytes PART PRECISION -> work a second")


class MeasuredCard(_Strict):
    """One device, measured in one sitting.

    Peaks and times are those of ``cases``. A case is in the part that it was measured for; a step of the ladder is in
    ``ladder`` also where the part ``alone`` compares with it.
    """

    format: Literal["cria_tricks measured card 1"] = FORMAT  # type: ignore[assignment]
    device: MeasuredDevice
    versions: dict[str, str]
    provenance: Provenance
    settings: BenchSettings
    parts: dict[PartName, PartRecord] = {}
    toggles: tuple[dict[str, str], ...] = Field((), description="of cria doctor: which work here, and why not")
    attention: dict[str, str] = Field({}, description="of cria doctor: the kernels that ran")
    calibration: Calibrated | None = None
    cases: tuple[CardCase, ...] = ()

    def of(self, *parts: PartName) -> list[CardCase]:
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
    return from_json(read_json(file), str(file))


def from_json(values: Any, where: str) -> MeasuredCard:
    """Make a card of what its file holds.

    Args:
        values: what the JSON says.
        where: what a refusal begins with.

    Raises:
        BadInput: if it breaks the schema.
    """
    if not is_one(values):
        raise BadInput(f"{where}: format: is not {FORMAT!r}, so this is no file of cria bench")
    try:
        return MeasuredCard.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"{where}: {_place(first['loc'], values)}: {message}") from None


def is_one(values: Any) -> bool:
    """Return whether JSON says of itself that it is a measured card."""
    return isinstance(values, dict) and values.get("format") == FORMAT


def _place(path: Iterable[Any], values: Any) -> str:
    """Name a field; a case goes by its name and not by its number."""
    words = [str(part) for part in path]
    if words[:1] == ["cases"] and len(words) > 1:
        case = values["cases"][int(words[1])]
        if isinstance(case, dict):
            words[1] = f"{case.get('bench')}.{case.get('name')}"
    return ".".join(words) or "the file"


def schema() -> str:
    """Return the JSON Schema of a file, as it is published."""
    found = MeasuredCard.model_json_schema(mode="serialization")
    return json.dumps(found | {"$schema": "https://json-schema.org/draft/2020-12/schema"}, indent=1) + "\n"
