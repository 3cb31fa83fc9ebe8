"""What the benchmarks share: rows of the real lengths, and result files that say where they come from."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import torch

from cria_tricks.data.tokens import IGNORED, TokenRows
from cria_tricks.hardware import this_device
from cria_tricks.recipe import Recipe
from cria_tricks.report import versions

HERE = Path(__file__).parent


def rows_of_the_real_lengths(part: str, vocabulary: int) -> TokenRows:
    """Random token ids, as many as the real rows have, the same share of them trained."""
    draw = torch.Generator().manual_seed(0)
    lengths = json.loads((HERE / "kwanzaa_lengths.json").read_text())[part]
    rows = []
    for length, trained in lengths:
        ids = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (length - trained) + ids[length - trained :]})
    return TokenRows(rows, cut=0, dropped=0)


def stamp(recipe: Recipe) -> dict[str, Any]:
    """When, on what, with which versions and settings."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": this_device().name,
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
    }


def path_of(case: str, results: Path | None = None) -> Path:
    """Name ``results/DEVICE/CASE.json``, where DEVICE is ``cpu`` or the card's name."""
    device = this_device()
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower().removeprefix("nvidia")).strip("-")
    return (results or HERE / "results") / ("cpu" if device.kind == "cpu" else name) / f"{case}.json"


def write(case: str, result: dict[str, Any], results: Path | None = None) -> Path:
    """Write a result file, and say where."""
    path = path_of(case, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
