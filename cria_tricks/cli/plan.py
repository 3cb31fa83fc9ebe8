"""``cria plan`` and ``cria hardware``: the memory, time and price of a run, and a machine for it.

Each command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from cria_tricks.cli.app import PLAN, SHOWN, FitAim, Json, MayChange, Offline, Settings, Toggles, app, screen
from cria_tricks.common import interrupts
from cria_tricks.common.console import table
from cria_tricks.common.startup import importing
from cria_tricks.common.units import human

if TYPE_CHECKING:
    from cria_tricks.predict.machines import Advice, Option


MORE = "[dim]more: --fit AIM, --switches, --ladder, --front, --longest, --rows N, --json[/]"
"""The last line of the answer of ``cria plan``."""


@app.command(rich_help_panel=PLAN, epilog="Example: cria plan kwanzaa --gpu t4 --rows 107")
def plan(
    recipe: Annotated[str, typer.Argument(help="A named recipe, a TOML file, or a model for QLoRA.")] = "smoke",
    model: Annotated[str | None, typer.Option(help="A short name, a hub id, a folder or a config.json.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A card (t4, rtx3060; t4@kaggle), its memory (8GiB), or here. Default: yours, or a t4."),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the real step on tensors without data.")] = False,
    toggles: Toggles = False,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Show the switches added one after the other.", rich_help_panel=SHOWN)
    ] = False,
    front: Annotated[
        bool,
        typer.Option(
            "--front",
            "--advise",
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
    """Say what a recipe needs on a card, and why, without loading a weight. Exit code 3 if it does not fit."""
    from cria_tricks.run import api

    with contextlib.redirect_stdout(sys.stderr), interrupts.AtOnce():  # it writes nothing
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


@app.command(rich_help_panel=PLAN, epilog="Example: cria hardware --model llama-3.1-8b --budget 9")
def hardware(
    model: Annotated[str, typer.Option(help="A short name, a hub id, a folder or a config.json.")] = "llama-3.2-1b",
    tokens: Annotated[int | None, typer.Option(help="Of the whole run, every epoch counted.")] = None,
    budget: Annotated[float | None, typer.Option(help="USD for the run.")] = None,
    kind: Annotated[str, typer.Option(help="quick, development, production or research.")] = "development",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say which machine a model can be trained on, for how long and at what price; and what the usual guide says."""
    from cria_tricks.models.shape import find_shape
    from cria_tricks.predict.selection_guide import refuse_unknown

    refuse_unknown(tokens, budget, kind)
    shape = find_shape(model)
    with importing():  # this imports torch, which takes seconds; a wrong name was told before
        from cria_tricks.predict.machines import advise
        from cria_tricks.tricks.folds import estimate
    found = advise(shape, estimate, tokens, budget, kind)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False))
        return
    _print_advice(found)


def _print_advice(found: "Advice") -> None:
    from cria_tricks.predict.machines import METHODS
    from cria_tricks.predict.words import in_words, verdict

    lead = Table.grid(padding=(0, 2))
    lead.add_row("[bold]model[/]", f"{found.model}, {found.parameters / 1e9:.2f} billion parameters")
    lead.add_row("[bold]run[/]", f"{found.tokens:,} tokens, in rows of {found.tokens_per_row:,} ({found.kind})")
    for name, ways in verdict(found):
        lead.add_row(f"[bold]{name}[/]", ways)
    shown = table("machine", "memory", *METHODS.values())
    for flavor in dict.fromkeys(option.flavor for option in found.options):
        here = [option for option in found.options if option.flavor == flavor]
        shown.add_row(flavor, human(here[0].capacity_bytes), *map(_cell, here))
    screen.wrapped(lead, "", "[bold]What we estimate, on one machine each[/]", "", shown)
    for paragraph in in_words(found):
        screen.wrapped("", Text(paragraph))


def _cell(option: "Option") -> str:
    from cria_tricks.predict.words import in_figures

    if option.minutes is None:
        return f"[red]needs {human(option.least_bytes)}[/]"
    colour = "yellow" if option.within_budget is False or option.verdict == "tight" else "green"
    return f"[{colour}]{in_figures(option)}[/]"
