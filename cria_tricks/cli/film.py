"""``cria film``: an optimizer step as a film, every tensor with its birth and its death.

It imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import json
import sys
from typing import Annotated

import typer

from cria_tricks.cli.app import OUTPUT, PLAN, Json, Offline, Settings, app, aside, screen


@app.command(rich_help_panel=PLAN, epilog="Example: cria film kwanzaa --gpu t4 --out film.html")
def film(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")] = "smoke",
    model: Annotated[str | None, typer.Option(help="A short name, a hub id, a folder or a config.json.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A card (t4, rtx3060), its memory (8GiB), or here. Default: yours, or a t4.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page (.html) or a picture (.svg).", rich_help_panel=OUTPUT),
    ] = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Show the memory of a training step, moment by moment, and which tensors take it, without loading a weight."""
    from cria_tricks.run import api

    with contextlib.redirect_stdout(sys.stderr):
        if out is not None:
            from cria_tricks.report.film_answer import destination

            destination(out)  # a name that cannot be written is told before the step runs
        found = api.film(recipe, gpu=gpu, model=model, settings=settings or (), say=_say)
        if out is not None:
            found.write(out)
    if as_json:
        print(json.dumps(found.to_dict(), separators=(",", ":"), allow_nan=False))
        return
    found.show(screen)
    screen.wrapped("", f"written: {out}" if out else "[dim]more: --out FILE.html or FILE.svg, --json[/]")


def _say(part: str) -> None:
    """Tell on standard error what runs now."""
    aside.print(f"recording: {part}")
