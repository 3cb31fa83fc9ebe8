"""``cria plan``: the memory, time and price of a run, on one machine or on all.

It imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from cria_tricks.cli.app import PLAN, SHOWN, FitAim, Json, MayChange, Offline, Settings, app, screen
from cria_tricks.common.errors import BadInput

MORE = "[dim]more: --gpu all, --fit AIM, --switches, --front, --longest, --rows N, --json[/]"
"""The last line of the answer of ``cria plan``."""


@app.command(rich_help_panel=PLAN, epilog="Example: cria plan kwanzaa --gpu t4 --rows 107")
def plan(
    recipe: Annotated[str, typer.Argument(help="A named recipe, a TOML file, or a model for QLoRA.")] = "smoke",
    model: Annotated[str | None, typer.Option(help="A short name, a hub id, a folder or a config.json.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A card (t4, rtx3060; t4@kaggle), its memory (8GiB), here or all. Default: yours, or a t4."),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the real step on tensors without data.")] = False,
    toggles: Annotated[
        bool, typer.Option("--switches", help="Show each switch alone, and without each.", rich_help_panel=SHOWN)
    ] = False,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Show the switches added one after the other.", rich_help_panel=SHOWN)
    ] = False,
    front: Annotated[
        bool,
        typer.Option(
            "--front",
            help="Try all sets of switches, and show the best in memory and time.",
            rich_help_panel=SHOWN,
        ),
    ] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest row that fits.", rich_help_panel=SHOWN)
    ] = False,
    fit: FitAim = "",
    may_change: MayChange = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Plan the recipe's own switches, also with another model.")
    ] = False,
    rows: Annotated[int | None, typer.Option(help="Training rows; minutes and price need them.")] = None,
    rows_full: Annotated[
        bool, typer.Option("--rows-full", help="Take every row as data.max_length tokens; else the data's are read.")
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, help="Processes, of one card each; ddp, or parallel.strategy.")] = 1,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say what a recipe needs on a card, or on all, without loading a weight. Exit code 3 if it does not fit."""
    from cria_tricks.hardware import T4
    from cria_tricks.run import api
    from cria_tricks.run.asked import named

    if gpu is not None and gpu.strip().lower() == api.ALL:
        of_one = {"--dry-run": dry_run, "--switches": toggles, "--ladder": ladder, "--front": front}
        for option, given in (of_one | {"--longest": longest, "--nproc": nproc > 1}).items():
            if given:
                raise BadInput(f"{option} with --gpu all: it is about one machine; name it, such as --gpu t4")
        start, changes = named(recipe, model, settings or ())
        api.find_wanted(start, changes, T4)  # a wrong name is told before torch is imported, which takes seconds
        fitting = {"fit": fit, "may_change": may_change or (), "as_is": as_is}
        _compare(recipe, as_json, model=model, settings=settings or (), rows=rows, rows_full=rows_full, **fitting)
        return
    with contextlib.redirect_stdout(sys.stderr):  # it writes nothing
        found = api.plan(
            recipe,
            gpu=gpu,
            model=model,
            settings=settings or (),
            rows=rows,
            nproc=nproc,
            dry_run=dry_run,
            advise=front,
            longest=longest,
            rows_full=rows_full,
            fit=fit,
            may_change=may_change or (),
            as_is=as_is,
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        found.show(screen, toggles=toggles, ladder=ladder)
        if found.fit and found.fits:
            screen.wrapped("", Text(f"train it: {_train(recipe, model, settings or (), found.fit.aim)}"))
        screen.wrapped("", MORE)
    if not found.fits:
        raise typer.Exit(3)


def _train(recipe: str, model: str | None, settings: Sequence[str], aim: str) -> str:
    """Write the command that trains what was planned, with a search on the machine where it runs."""
    from cria_tricks.run.asked import named

    start, changes = named(recipe, model, settings)
    sets = [word for change in changes for word in ("--set", change)]
    return shlex.join(["cria", "train", str(start), *sets, "--fit", aim])


def _compare(recipe: str, as_json: bool, **asked: Any) -> None:
    """Print what the recipe needs, how long it takes and what it costs on every machine."""
    from cria_tricks.run import machines

    with contextlib.redirect_stdout(sys.stderr):  # it writes nothing
        offers = machines.compare(recipe, **asked)
    if as_json:
        print(json.dumps({"machines": [dataclasses.asdict(offer) for offer in offers]}, indent=2, allow_nan=False))
    else:
        machines.show(offers, screen)
    if not any(offer.fits for offer in offers):
        raise typer.Exit(3)
