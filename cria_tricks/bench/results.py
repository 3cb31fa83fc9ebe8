"""Results of the benchmarks: a case, its JSON file, and the one schema of both."""

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput

_CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "results"
COMMITTED = _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parents[1] / "committed"
"""The project's own, ``DEVICE/BENCH.NAME.json``: those of the checkout, else those that came with the package."""

CASE_FILE = re.compile(r"[a-z0-9_]+\.[a-z0-9_+-]+\.json")
"""Other files are studies, of more than one run."""

IN_BENCHMARK_JSON = "cria_tricks"
"""The key under which ``pytest --benchmark-json`` holds the cases, those without a time included."""


class Case(BaseModel):
    """One setting of one benchmark on one machine.

    A round is one optimizer step of the shared trainer, or one new token where a technique is for answering.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bench: str = Field(pattern=r"^[a-z0-9_]+$", description="bench_BENCH.py")
    name: str = Field(pattern=r"^[a-z0-9_+-]+$", description="of the setting")
    against: str = Field("", description="the case of the same bench to hold it against; a baseline has none")
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
    attention_kernel: str = Field("", description="the one that ran")
    date: str
    device: str
    kind: Literal["cpu", "cuda"]
    versions: dict[str, str]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def median_seconds(self) -> float | None:
        """Of a round."""
        return statistics.median(self.seconds) if self.seconds else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float | None:
        """Computed tokens, without padding."""
        return self.tokens / self.median_seconds if self.tokens and self.median_seconds else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def trained_tokens_per_second(self) -> float | None:
        """Tokens that had a loss."""
        return self.trained_tokens / self.median_seconds if self.trained_tokens and self.median_seconds else None

    @property
    def seconds_per_token(self) -> float | None:
        """Of a trained one; of a new one, where nothing is trained."""
        tokens = self.trained_tokens or self.tokens
        return self.median_seconds / tokens if tokens and self.median_seconds else None

    @property
    def folder(self) -> str:
        """The device's, among the results."""
        return folder_of(self.kind, self.device)


def folder_of(kind: str, device: str) -> str:
    """Name a device's folder: ``NVIDIA H200 as T4`` has its results in ``h200-as-t4``, any CPU in ``cpu``."""
    return "cpu" if kind == "cpu" else re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia")).strip("-")


def write(case: Case, results: Path) -> Path:
    """Write ``RESULTS/DEVICE/BENCH.NAME.json``."""
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
    return [_case(_json(path), str(path)) for path in files]


def study(name: str, results: Path = COMMITTED) -> dict[str, Any] | None:
    """A result file that is no case, of the first device that has one; none if it is not there."""
    return next((_json(path) for path in sorted(results.glob(f"*/{name}.json"))), None)


def read_benchmark_json(path: Path) -> list[Case]:
    """Read the cases that ``pytest --benchmark-only --benchmark-json FILE`` left in FILE.

    Raises:
        BadInput: if it is no such file, or a case has a wrong field.
    """
    found = _json(path)
    cases = found.get(IN_BENCHMARK_JSON) if isinstance(found, dict) else None
    if not isinstance(cases, list) or not cases:
        raise BadInput(
            f"report {path}: holds no cases of ours; make it in a checkout with: pytest --benchmark-only "
            "--benchmark-json FILE"
        )
    return [_case(case, f"report {path}: case {number}") for number, case in enumerate(cases, 1)]


def by_device(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Sort cases into the devices that they ran on."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.device, []).append(case)
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"report {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadInput(f"report {path}: is not valid JSON") from None


def _case(values: Any, where: str) -> Case:
    computed = Case.model_computed_fields
    try:
        return Case.model_validate({k: v for k, v in values.items() if k not in computed})
    except (ValidationError, AttributeError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            reason = "not an object"
        raise BadInput(f"{where}: {reason}") from None
