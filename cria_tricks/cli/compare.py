"""``cria compare``: put runs side by side.

The command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from cria_tricks.cli.app import ADAPTER, Json, app, screen
from cria_tricks.common.console import table


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria compare runs/smoke runs/smoke-2")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The folders of at least two runs.")],
    as_json: Json = False,
) -> None:
    """Compare runs: what differs in their recipes, losses, time, memory and scores."""
    from cria_tricks.report import compare

    found = compare.compare(compare.read_all(runs))
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    screen.wrapped(Text(found["verdict"], style="bold"), "")
    names = [escape(run["name"]) for run in found["runs"]]  # a folder's name may hold brackets
    shown = table("", *names)
    for line in compare.table_lines(found):
        shown.add_row(*map(Text, line))
    screen.wrapped(shown, "")
    if not found["recipe"]:
        screen.wrapped("The recipes are the same.")
    if not found["same_scored_rows"]:
        screen.wrapped("The runs answered different rows, so their scores do not compare.")
