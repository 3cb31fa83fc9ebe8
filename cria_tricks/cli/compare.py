"""``cria compare``: put runs side by side.

The command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from cria_tricks.cli.app import ADAPTER, SHOWN, Json, app, screen
from cria_tricks.common.console import table
from cria_tricks.common.errors import BadInput

if TYPE_CHECKING:
    from cria_tricks.report.compare_tables import ComparedTable

SIDE_BY_SIDE = 4
"""The most runs in one table; more go into a second one, because a terminal has 80 columns."""
LONGEST = 400
"""The length at which an answer is cut on the terminal (characters)."""


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria compare runs/smoke runs/smoke-2 --rows 3")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The folders of at least two runs.")],
    rows: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10,
            metavar="N",
            help="Show the answers to N evaluation rows, at most 10. A page shows them all.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write one page that needs no other file.", rich_help_panel=SHOWN),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: what differs in their recipes, memory, losses, time, scores and answers."""
    from cria_tricks.kwanzaa import compare_scores
    from cria_tricks.kwanzaa.page import NAMES
    from cria_tricks.report import compare_tables
    from cria_tricks.report.compare import compare as side_by_side
    from cria_tricks.report.runs import EVALUATION, read_all

    if page and page.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--page {page}: must end with .html")
    read = read_all(runs)
    found = side_by_side(read)
    evaluations = [run.evaluation for run in read]
    found["evaluation"] = compare_scores.compare(evaluations, [run.folder / EVALUATION.parent for run in read])
    made = compare_tables.tables(found, NAMES)
    if page:
        # matplotlib starts slowly, and only the page has a figure.
        from cria_tricks.common import atomic_files
        from cria_tricks.report.compare_page import page as written

        atomic_files.write_file(page, written(found, made, read, rows))
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    screen.wrapped(Text(compare_tables.verdict(found), style="bold"))
    for each in made:
        _print_table(each)
    _print_answers(found, rows or 0)
    if page:
        screen.print(f"\npage: {page}", highlight=False, markup=False)


def _print_table(made: "ComparedTable") -> None:
    """Print a table, in several parts if there are many runs."""
    screen.wrapped("", Text(made.title, style="bold"))
    for first in range(1, len(made.head), SIDE_BY_SIDE):
        columns = slice(first, first + SIDE_BY_SIDE)
        shown = table(made.head[0], *map(escape, made.head[columns]))  # a folder's name may hold brackets
        for name, *cells in made.lines:
            shown.add_row(*map(Text, (name, *cells[first - 1 : first - 1 + SIDE_BY_SIDE])))
        screen.wrapped("", shown)
    if made.note:
        screen.wrapped("", Text(made.note))


def _print_answers(found: Mapping[str, Any], rows: int) -> None:
    """Print the answers of the runs, one below the other, or why there are none."""
    if not rows:
        return
    shown: Sequence[Mapping[str, Any]] = found["evaluation"]["answers"][:rows]
    if not shown:
        why = "two runs must be evaluated (cria eval), on the same rows"
        screen.wrapped("", Text(f"no answers to compare: {why}"))
    for example in shown:
        screen.wrapped("", Text(example["query"] or "(nothing is asked)", style="bold"))
        answers = {"the data's own answer": example["reference"]}
        for run, answer in zip(found["runs"], example["answers"], strict=True):
            answers[run["name"]] = answer["text"] if answer else None
        for name, text in answers.items():
            said = "not evaluated" if text is None else _shortened(text)
            screen.wrapped(Text.assemble((f"{name}: ", "dim"), said))


def _shortened(text: str) -> str:
    line = " ".join(text.split()) or "(no text)"
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
