"""The answers of commands, kept as text: what a reader sees on a terminal of 80 columns, and of 120.

The machine is pretended to be one with a T4 and with made-up versions, so that the files hold anywhere.

Use:
    python -m tests.snapshots    (write all of them anew; then look at the diff)
"""

import contextlib
import io
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from cria_tricks.cli import app, main
from cria_tricks.doctor import machine
from cria_tricks.hardware import T4

FOLDER = Path(__file__).parent / "snapshots"
WIDTHS = (80, 120)
CASES = {
    "plan": "plan kwanzaa --gpu t4 --rows 107 --rows-full",
    "plan_tables": "plan kwanzaa --gpu t4 --rows-full --switches --ladder --front --longest",
    "plan_does_not_fit": "plan kwanzaa --gpu t4 --rows-full --model llama-3.1-70b",
    "plan_tight": "plan kwanzaa --gpu t4 --rows-full --set data.max_length=8192 --set train.batch_size=7 "
    "--set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true",
    "plan_two_cards": "plan kwanzaa --gpu t4 --rows-full --nproc 2",
    "tricks": "tricks",
    "plan_all": "plan kwanzaa --gpu all --rows 107 --rows-full",
    "data": "data nguzo_saba --max-length 400",
    "doctor": "doctor",
    "explain": "explain nf4",
}
"""The name of each file, and its command."""

_examine = machine.examine


def _pretended() -> dict[str, Any]:
    """What ``cria doctor`` finds on a made-up machine with a T4."""
    found = _examine()
    return found | {
        "device": asdict(T4) | {"free_bytes": round(14.6 * 2**30)},
        "bf16": {"runs": "emulated", "torch_says": True},
        "python": "3.12.0",
        "cuda": "12.8",
        "versions": {name: None if name == "flash-attn" else "1.2.3" for name in found["versions"]},
        "colab": None,
        "bitsandbytes": {"backend": "cuda", "library": "libbitsandbytes_cuda128.so"},
        "paging": machine._paging(T4, "cuda"),
        "attention": {"masked": "memory-efficient", "maskless": "math", "maskless, expand_kv": "memory-efficient"},
        "toggles": machine.toggles(T4),
    }


def answer(command: str, width: int | None) -> str:
    """What a command prints on a terminal of this width, or into a pipe, without spaces at the ends of lines."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if width:
        environment["COLUMNS"] = str(width)
    page = io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", ["cria", *command.split()]),
        mock.patch.object(app.screen, "_width", None),
        mock.patch("cria_tricks.hardware.this_device", return_value=T4),
        mock.patch.object(machine, "examine", _pretended),
        contextlib.redirect_stdout(page),
        contextlib.suppress(SystemExit),
    ):
        main.main()
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def path(name: str, width: int) -> Path:
    """The file of a case."""
    return FOLDER / f"{name}.{width}.txt"


def write() -> None:
    """Write all files anew, and remove those that belong to no case."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {path(name, width): answer(command, width) for name, command in CASES.items() for width in WIDTHS}
    for there in FOLDER.iterdir():
        if there not in wanted:
            there.unlink()
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
