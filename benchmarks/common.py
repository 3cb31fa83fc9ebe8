"""What the benchmarks share: rows of the real lengths, and result files that say where they come from."""

import json
from pathlib import Path
from typing import Any

import torch

from cria_tricks.bench.case import Rows
from cria_tricks.bench.results import folder_of
from cria_tricks.data.lengths import row_lengths
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import this_device

HERE = Path(__file__).parent

GROWTH = {
    "kept": "peft=lora precision=best attention=best",
    "checkpointed": "peft=lora precision=best attention=best gradient_checkpointing=true",
    "lean": "peft=lora precision=best attention=best gradient_checkpointing=true chunked_loss=true quantization=nf4 "
    "double_quantization=true lean_preparation=true optimizer=adamw_8bit",
}
"""Switches whose growth is counted and measured: everything kept, blocks computed again, and nearly all."""


def real_lengths(rows: int, tokens: int) -> list[int]:
    """Lengths of the first real rows, which have at most 2,048 tokens, brought to ``tokens``."""
    return [max(2, length * tokens // 2048) for length, _ in row_lengths("train")[:rows]]


def real_rows(vocabulary: int) -> Rows:
    """Draw random tokens for rows of the real lengths, with the same share of them trained.

    Args:
        vocabulary: the number of different tokens.
    """
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length, trained in row_lengths("train"):
        ids = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * (length - trained) + ids[length - trained :]})
    return rows


def path_of(case: str, results: Path | None = None) -> Path:
    """Name ``results/DEVICE/CASE.json``, where DEVICE is ``cpu`` or the card's name."""
    device = this_device()
    return (results or HERE / "results") / folder_of(device.kind, device.name) / f"{case}.json"


def write(case: str, result: dict[str, Any], results: Path | None = None) -> Path:
    """Write a result file, and say where."""
    path = path_of(case, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
