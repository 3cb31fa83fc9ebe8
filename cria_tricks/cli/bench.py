"""``cria bench``: this card, measured in one sitting; and the check of a file that it made.

The parts of the package are imported when the command is called, so that ``cria --help`` is quick.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cria_tricks.cli.app import MACHINE, Json, app, aside, screen
from cria_tricks.common.atomic_files import only_writer
from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import hint, nearest

if TYPE_CHECKING:
    from cria_tricks.bench.measured_card import PartName


@app.command(rich_help_panel=MACHINE, epilog="Example: cria bench --short --out my-card")
def bench(
    short: Annotated[
        bool,
        typer.Option("--short", help="Fewer cases, shorter rows: predicted to take ten minutes on a T4, not an hour."),
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A part only, may be repeated: calibrate, ladder, alone, capstone, longest, errors.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write, and to go on in.")] = Path("cria-bench"),
    profile: Annotated[str, typer.Option(metavar="t4", help="Hold a CUDA card to what this one can do.")] = "",
    check: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Measure nothing: accept a measured_card.json, or refuse it in one line."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this card in one sitting: predicted bytes and seconds beside real ones. The same command goes on."""
    if check:
        _check(check)
        return
    wanted = _parts(part or [])
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    from cria_tricks.bench import cases, sitting
    from cria_tricks.hardware import profile as held_to
    from cria_tricks.hardware import this_device
    from cria_tricks.load.model import quiet_libraries

    _prepare()
    quiet_libraries()
    held = held_to(profile) if profile else contextlib.nullcontext()
    out.mkdir(parents=True, exist_ok=True)
    with only_writer(out), held, contextlib.redirect_stdout(sys.stderr):
        settings = cases.settings_for(this_device(), short=short, profile=profile)
        measuring = sitting.Sitting(out, settings, " ".join(["cria", *sys.argv[1:]]), _say)
        measuring.run(wanted)
        report = measuring.report()
    if as_json:
        print(measuring.card.model_dump_json(indent=1))
        return
    screen.print(f"{len(measuring.card.cases)} cases of {measuring.device.name}: {measuring.file}", highlight=False)
    screen.print(f"Its tables: {report}", highlight=False)


def _say(line: str) -> None:
    aside.print(line, highlight=False, markup=False)


def _parts(names: list[str]) -> list["PartName"]:
    """Return the parts of these names, or all, in their order."""
    from cria_tricks.bench.measured_card import PARTS

    there_are = f"there are {', '.join(PARTS)}"
    for name in names:
        if name not in PARTS:
            raise BadInput(f"--part {name}: {hint(nearest(name, PARTS), there_are)}")
    return [part for part in PARTS if part in names or not names]


def _prepare() -> None:
    """Set up CUDA's allocator and cuBLAS' workspaces, as a run and the bill have them, before CUDA starts."""
    from cria_tricks.bill.bill import WORKSPACE_CONFIG  # imported late, as all of the package here
    from cria_tricks.recipe import Recipe
    from cria_tricks.run.allocator import ask_for_expandable_segments

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE_CONFIG)
    ask_for_expandable_segments(Recipe())


def _check(files: list[Path]) -> None:
    """Accept files."""
    from cria_tricks.bench.accept import accept

    for file in files:
        card = accept(file)
        screen.print(f"accepted: {file}: {card.device.name}, {len(card.cases)} cases", highlight=False, markup=False)
