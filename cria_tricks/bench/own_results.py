"""Read a reader's own result of any kind: a benchmark run, a measured card, or the report of a training run."""

import datetime
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from cria_tricks.bench import measured_card, results
from cria_tricks.bench.measured_card import MeasuredCard
from cria_tricks.bench.results import Case
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe

WARM_UP = 2
"""Steps of a run that are not timed where it has more than four: counting their bytes makes them slower."""


class Own(NamedTuple):
    """What one file holds.

    Attributes:
        file: the file.
        cases: its cases.
        card: the whole measured card, if it is one.
    """

    file: Path
    cases: Sequence[Case]
    card: MeasuredCard | None = None


def read(file: Path) -> Own:
    """Read a file, whatever it is of the three.

    Raises:
        BadInput: if it is none of them, or has a wrong field.
    """
    found = results.read_json(file)
    if measured_card.is_one(found):
        card = measured_card.from_json(found, f"report {file}")
        return Own(file, card.cases, card)
    if isinstance(found, dict) and {"recipe", "history", "plan"} <= found.keys():
        return Own(file, [case_of_run(found, file)])
    return Own(file, results.read_benchmark_json(file))


def case_of_run(report: Mapping[str, Any], file: Path) -> Case:
    """Make a case of the report that ``cria train`` wrote.

    Its rows have different lengths, so its seconds differ, too. A report names no day, so the day of its file stands.

    Raises:
        BadInput: if a figure is missing.
    """
    try:
        recipe = Recipe.model_validate(report["recipe"])
        steps = [entry for entry in report["history"] if "step_seconds" in entry and not entry.get("skipped")]
        timed = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
        changed = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
        return Case(
            bench="run",
            name=re.sub(r"[^a-z0-9_+-]+", "-", recipe.name.lower()),
            status="ok",
            settings=tuple(settings_of(recipe)),
            model=recipe.model,
            rows=recipe.rows_per_step,
            tokens_per_row=recipe.data.max_length,
            tokens=round(statistics.mean(entry["tokens"] for entry in timed)),
            trained_tokens=round(statistics.mean(entry["trained_tokens"] for entry in timed)),
            seconds=tuple(entry["step_seconds"] for entry in timed),
            peak_allocated_bytes=max((entry["peak_bytes"] for entry in steps if "peak_bytes" in entry), default=None),
            peak_reserved_bytes=report["memory"]["train"].get("reserved_bytes"),
            estimated_bytes=report["estimated_peak_bytes"],
            attention_kernel=report["attention_kernel"],
            date=changed.isoformat(timespec="seconds"),
            device=report["device"],
            kind=report["plan"]["device"]["kind"],
            versions=report["versions"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"report {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (KeyError, TypeError, AttributeError, statistics.StatisticsError) as error:
        raise BadInput(f"report {file}: is no whole report of cria train: {error}") from None


def settings_of(recipe: Recipe) -> list[str]:
    """List the switches that a recipe changes, as ``--set`` takes them."""
    plain = Recipe().tricks.model_dump()
    changed = {field: value for field, value in recipe.tricks.model_dump().items() if value != plain[field]}
    return [f"tricks.{field}={str(value).lower()}" for field, value in changed.items()]


def labels(files: Sequence[Path]) -> list[str]:
    """Name what each file adds to a device's name: one file is yours, and of several each has its own name."""
    if len(files) == 1:
        return ["yours"]
    names = [file.stem for file in files]
    if len(set(names)) < len(names):  # every run's report is a report.json
        names = [f"{file.parent.name}/{file.stem}" for file in files]
    return [f"yours, {name}" for name in names]
