"""Define the result of one case, for ``pytest --benchmark-only`` and ``cria bench`` alike; read and write its files."""

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"
"""The project's own results, ``DEVICE/BENCH.NAME.json``: in a checkout its folder, else the copy in the package."""
if not COMMITTED.is_dir():
    COMMITTED = Path(__file__).parents[1] / "committed"

CASE_FILE = re.compile(r"[a-z0-9_]+\.[a-z0-9_+-]+\.json")
"""Names of files that hold one case. Other JSON files are studies, which sum up several runs."""

IN_BENCHMARK_JSON = "cria_tricks"
"""The key of the cases in the file of ``pytest --benchmark-json``; it also has the cases that were not timed."""


class Strict(BaseModel):
    """What all parts of a result share: no unknown fields, no NaN, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Predicted(Strict):
    """The predicted time of an optimizer step."""

    by: str = Field(description="what backs it, as in cria plan")
    seconds: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)


class Sensors(Strict):
    """What a card's sensors said while a case ran."""

    median_clock_mhz: float | None = Field(None, description="of the multiprocessors")
    highest_celsius: float | None = None
    throttled: tuple[str, ...] = Field((), description="why the clock was held down, in NVML's words")


class Case(Strict):
    """The result of one setting of one benchmark on one machine.

    A round is one optimizer step; for a technique of inference it is one generated token.
    """

    bench: str = Field(pattern=r"^[a-z0-9_]+$", description="the technique, or what else is compared")
    name: str = Field(pattern=r"^[a-z0-9_+-]+$", description="of the setting")
    against: str = Field("", description="the case of the same bench to hold it against; a baseline has none")
    part: str = Field("", description="of cria bench that measured it; none by pytest --benchmark-only")
    status: Literal["ok", "oom", "refused"]
    why: str = Field("", description="what was refused or ran out of memory")
    warnings: tuple[str, ...] = Field((), description="settings that have no effect on this machine")
    settings: tuple[str, ...] = Field(description="all that differs from a plain recipe, as --set takes it")
    model: str
    rows: int = Field(ge=1, description="of an optimizer step, before they are packed")
    tokens_per_row: int = Field(ge=1, description="of the longest")
    tokens: int | None = Field(None, description="of a round, without padding")
    trained_tokens: int | None = Field(None, description="of a round")
    seconds: tuple[float, ...] = Field((), description="of each round, after the warm-up")
    peak_allocated_bytes: int | None = Field(None, description="of a round; on a CPU all live storages")
    peak_reserved_bytes: int | None = Field(None, description="by CUDA's allocator")
    estimated_bytes: int | None = Field(None, description="the bill by hand of the same peak")
    estimated_reserved_bytes: int | None = Field(None, description="what the allocator should reserve, at most")
    dry_run_bytes: int | None = Field(None, description="the same peak, counted on tensors without data")
    predicted: tuple[Predicted, ...] = Field((), description="of a round; none without rates of the device")
    sensors: Sensors | None = Field(None, description="none on a CPU, and none but by cria bench")
    attention_kernel: str = Field("", description="the one that ran")
    date: str
    device: str
    kind: Literal["cpu", "cuda"]
    versions: dict[str, str]

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_computed(cls, values: Any) -> Any:
        """Leave out the computed fields, which a case is written with; they follow from the others."""
        if not isinstance(values, dict):
            return values
        return {field: value for field, value in values.items() if field not in cls.model_computed_fields}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def median_seconds(self) -> float | None:
        """Median time of a round (seconds)."""
        if not self.seconds:
            return None
        return statistics.median(self.seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float | None:
        """Speed in tokens, without padding."""
        return self._per_second(self.tokens)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def trained_tokens_per_second(self) -> float | None:
        """Speed in trained tokens, that is, tokens with a loss."""
        return self._per_second(self.trained_tokens)

    def _per_second(self, tokens: int | None) -> float | None:
        if not tokens or not self.median_seconds:
            return None
        return tokens / self.median_seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Time for each trained token (seconds); for each generated token if nothing is trained."""
        tokens = self.trained_tokens or self.tokens
        if not tokens or not self.median_seconds:
            return None
        return self.median_seconds / tokens

    @property
    def folder(self) -> str:
        """Name of the device's folder among the results."""
        return folder_of(self.kind, self.device)


def folder_of(kind: str, device: str) -> str:
    """Return the folder name of a device: ``h200-as-t4`` for ``NVIDIA H200 as T4``, and ``cpu`` for every CPU."""
    if kind == "cpu":
        return "cpu"
    name = device.lower().removeprefix("nvidia")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def write(case: Case, results: Path) -> Path:
    """Write a case as ``RESULTS/DEVICE/BENCH.NAME.json``, and return the path."""
    path = results / case.folder / f"{case.bench}.{case.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_file(path, json.dumps(case.model_dump(mode="json"), indent=1) + "\n")
    return path


def read(results: Path) -> list[Case]:
    """Read all cases of all devices, in the order of their names.

    Raises:
        BadInput: naming the file and the field that is wrong.
    """
    files = sorted(path for path in results.glob("*/*.json") if CASE_FILE.fullmatch(path.name))
    return [_case(read_json(path), str(path)) for path in files]


def study(name: str, results: Path = COMMITTED) -> dict[str, Any] | None:
    """Read a study, a result file that is no case, of the first device that has it; ``None`` if there is none."""
    for path in sorted(results.glob(f"*/{name}.json")):
        return read_json(path)
    return None


def read_cases(path: Path) -> list[Case]:
    """Read the cases of a file by ``cria bench`` or by ``pytest --benchmark-only --benchmark-json FILE``.

    Raises:
        BadInput: if it is no such file, or a case has a wrong field.
    """
    found = read_json(path)
    cases = None
    if isinstance(found, dict):
        cases = found.get(IN_BENCHMARK_JSON) or found.get("cases")
    if not isinstance(cases, list) or not cases:
        raise BadInput(
            f"{path}: holds no cases of ours; make it with cria bench, or in a checkout with: pytest "
            "--benchmark-only --benchmark-json FILE"
        )
    return [_case(case, f"{path}: case {number}") for number, case in enumerate(cases, 1)]


def by_device(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Group cases by the device that they ran on."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.device, []).append(case)
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file that a reader named.

    Raises:
        BadInput: if it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path}: is not valid JSON") from None


def _case(values: Any, where: str) -> Case:
    try:
        return Case.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_wrong(error)}") from None


def first_wrong(error: ValidationError) -> str:
    """Name the first field that breaks a schema, and say why."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the file"
    return f"{place}: {first['msg']}"


NAMES = {
    ("flash_decoding", "eager"): "eager attention",
    ("flash_decoding", "off"): "sdpa",
    ("flash_decoding", "on"): "sdpa in pieces",
    ("gradient_accumulation", "off"): "1 micro-batch of 4 rows",
    ("gradient_accumulation", "half"): "2 micro-batches of 2 rows",
    ("gradient_accumulation", "on"): "4 micro-batches of 1 row",
    ("peers", "small"): "ours, small",
    ("peers", "fast"): "ours, fast, compiled",
    ("peers", "bare_as_small"): "a plain PyTorch loop, as small",
    ("peers", "trl_as_small"): "TRL, as small",
    ("peers", "trl_smallest"): "TRL, as small, with its offload",
    ("peers", "trl_as_fast"): "TRL, as fast",
    ("peers", "trl_fastest"): "TRL, as fast, compiled",
}
"""Bench and case -> what a table calls the case, where its own name says too little."""


def plain_name(bench: str, name: str) -> str:
    """Return what a table calls a case: a step of the ladder by the switch that it adds, others by :data:`NAMES`.

    Examples:
        >>> plain_name("together", "ladder_peft"), plain_name("nf4", "double")
        ('+ peft', 'double')
    """
    if name.startswith("ladder_"):
        return f"+ {name.removeprefix('ladder_')}"
    return NAMES.get((bench, name), name)
