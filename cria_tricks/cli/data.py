"""``cria data``: look at a data set before training on it.

It imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cria_tricks.cli.app import PLAN, SHOWN, Json, Offline, app, aside, screen
from cria_tricks.common.console import doing, table
from cria_tricks.common.errors import BadInput

if TYPE_CHECKING:
    from cria_tricks.data.look import Leaks, Look
    from cria_tricks.data.look_problems import Problem

NO_NEAR = "near duplicates were not looked for: pip install 'cria_tricks[data]'"
KINDS = "rows of kind"
WIDEST = 200
"""Characters of an example's line where no terminal shows it."""


@app.command(rich_help_panel=PLAN, epilog="Example: cria data my.jsonl --eval held_out.jsonl --show 2")
def data(
    train: Annotated[str, typer.Argument(help="A data set's name, a .jsonl or .txt file, a folder, or a hub id.")],
    held_out: Annotated[
        str, typer.Option("--eval", help="The evaluation rows; of a named data set, its own when left out.")
    ] = "",
    model: Annotated[str, typer.Option(help="Whose tokenizer counts the lengths.")] = "smollm2",
    max_length: Annotated[int, typer.Option(min=8, help="The planned data.max_length, in tokens.")] = 2048,
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Show N examples of each kind.", rich_help_panel=SHOWN)
    ] = 0,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw lengths and kinds into a file.", rich_help_panel=SHOWN),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if there is a problem.")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Look at training rows: kinds, lengths, duplicates, leaks into the evaluation, repeated answers."""
    from cria_tricks import models
    from cria_tricks.data import look, look_problems, sources
    from cria_tricks.kwanzaa.scores import kind_and_answer

    models.refuse_unknown(model)
    if figure and figure.suffix.lower() != ".png":
        raise BadInput(f"--figure {figure}: must end with .png")
    if not held_out and train in (*sources.OURS, "kwanzaa", sources.CURATED):
        held_out = train
    parts = {"train": sources.find_named("", train, "train")}
    if held_out:
        parts["eval"] = sources.find_named("--eval ", held_out, "eval")
    tokenizer, notes = _tokenizer(model)
    looks = {}
    for part, source in parts.items():
        with doing(aside, f"looking at {len(source.rows):,} rows of {part}"):
            looks[part] = look.look(source, kind_and_answer, tokenizer, max_length)
    leaks = None
    if held_out:
        leaks = look.leaks(parts["train"].rows, parts["eval"].rows)
    found = look_problems.problems(looks, leaks)
    if looks["train"].near is None:
        notes.append(NO_NEAR)
    if figure:
        _draw(figure, looks)
    if as_json:
        print(json.dumps(_as_json(looks, leaks, found, notes, model), indent=2, allow_nan=False))
    else:
        _print(looks, leaks, found, notes, model)
        _print_examples(looks["train"], show)
        if figure:
            screen.print(f"\nfigure: {figure}", highlight=False, markup=False)
    if strict and found:
        raise typer.Exit(1)


def _tokenizer(model: str) -> tuple[Any, list[str]]:
    """Open the tokenizer; if it cannot be had, return ``None`` and a note, because all else can be looked at."""
    from cria_tricks.data import lengths

    try:
        with doing(aside, f"opening the tokenizer of {model}"):
            return lengths.open_tokenizer(model), []
    except BadInput as error:
        return None, [f"no lengths: {error}"]


def _draw(file: Path, looks: "Mapping[str, Look]") -> None:
    from cria_tricks.common import atomic_files
    from cria_tricks.data.look_figure import draw

    atomic_files.write_file(file, draw(looks))


def _as_json(
    looks: "Mapping[str, Look]", leaks: "Leaks | None", found: "Sequence[Problem]", notes: list[str], model: str
) -> dict[str, Any]:
    held_out = None
    if "eval" in looks:
        held_out = looks["eval"].to_dict()
    return {
        "model": model,
        "train": looks["train"].to_dict(),
        "eval": held_out,
        "leaks": dataclasses.asdict(leaks) if leaks else None,
        "problems": [dataclasses.asdict(problem) for problem in found],
        "notes": notes,
    }


def _print(
    looks: "Mapping[str, Look]", leaks: "Leaks | None", found: "Sequence[Problem]", notes: list[str], model: str
) -> None:
    """Print the verdict, the problems, and then the tables."""
    number = len(looks["train"].rows)
    verdict = "nothing to act on"
    if found:
        verdict = f"{len(found)} thing{'s' * (len(found) > 1)} to act on"
    screen.wrapped(Text(f"{number:,} training row{'s' * (number != 1)}: {verdict}", style="bold"))
    for part, look in looks.items():
        screen.wrapped(Text(f"{part}: {look.description.partition(', sha256')[0]}"))
    for problem in found:
        first = f" (first: {_short(problem.first)})" if problem.first else ""
        screen.wrapped("", Text.assemble("- ", problem.what, first, ": ", (problem.do, "bold")))
    parts = {part: look.to_dict() for part, look in looks.items()}
    kinds = table(KINDS, *_columns(looks), numbers=_columns(looks))
    names = dict.fromkeys(kind for part in parts.values() for kind in part["kinds"])
    for name in names:
        kinds.add_row(name, *_pairs(parts, name))
    screen.wrapped("", kinds, "")
    counts = table("what", *parts, numbers=parts)
    for name, *cells in _counts(parts, leaks):
        counts.add_row(name, *cells)
    screen.wrapped(counts)
    if parts["train"]["tokens"]:
        screen.wrapped("", Text(f"Tokens are those of {model}. Lengths are of whole rows, before any cut."))
    _print_commonest(looks["train"])
    for note in notes:
        screen.wrapped("", Text(f"note: {note}"))


def _columns(looks: "Mapping[str, Look]") -> list[str]:
    """Return the heads of the columns of the first table: for each part its rows and their share."""
    columns = []
    for part in looks:
        columns += [part, f"{part}, %"]
    return columns


def _pairs(parts: Mapping[str, Any], kind: str) -> list[str]:
    cells = []
    for part in parts.values():
        found = part["kinds"].get(kind, {"rows": 0, "share": 0})
        cells += [f"{found['rows']:,}", f"{100 * found['share']:.0f}"]
    return cells


def _counts(parts: Mapping[str, Any], leaks: "Leaks | None") -> list[list[str]]:
    """Return the lines of the second table: a name, and a cell for each part."""

    def line(name: str, get: Any) -> list[str]:
        return [name, *(_cell(get(part)) for part in parts.values())]

    lines = [line("rows", lambda part: part["rows"])]
    for form in ("chat", "completion", "text"):
        if any(form in part["forms"] for part in parts.values()):
            lines.append(line(f"of the form {form}", lambda part, form=form: part["forms"].get(form, 0)))
    if all(part["tokens"] for part in parts.values()):
        for name, key in LENGTHS.items():
            lines.append(line(name, lambda part, key=key: part["tokens"][key]))
        max_length = parts["train"]["tokens"]["max_length"]
        lines.append(line(f"rows longer than {max_length:,}", lambda part: part["tokens"]["rows_longer"]))
        lines.append(line("trained tokens, %", lambda part: round(100 * part["tokens"]["trained_share"])))
        if any(part["tokens"]["rows_of_texts"] for part in parts.values()):
            lines.append(line("rows the texts are cut into", lambda part: part["tokens"]["rows_of_texts"]))
    lines += [
        line("exact duplicates", lambda part: part["duplicates"]["exact"]),
        line("near duplicates", lambda part: part["duplicates"]["near"]),
        line("different answers", lambda part: part["answers"]["different"]),
        line("different system prompts", lambda part: part["system_prompts"]["different"]),
    ]
    if leaks:
        lines.append(["near a row of the other part", f"{leaks.rows:,}", f"{leaks.held_out:,}"])
    return lines


LENGTHS = {
    "tokens, shortest row": "min",
    "tokens, median": "median",
    "tokens, 95 % of rows at most": "p95",
    "tokens, longest row": "max",
    "tokens in all": "total",
}
"""The names of the lengths in the table, and their keys."""


def _cell(value: int | None) -> str:
    return "not looked" if value is None else f"{value:,}"


def _print_commonest(look: "Look") -> None:
    """Print the commonest answers and openings of answers, of those that occur more than once."""
    same = [f"{rows:,} rows have the same answer: {_one_line(text)}" for text, rows in look.commonest_answers()]
    alike = [f"{rows:,} answers begin: {_one_line(text)} ..." for text, rows in look.commonest_openings()]
    for lines in (same, alike):
        screen.wrapped(*[""] * bool(lines))
        for line in lines:
            screen.print(Text(_cut(line)), highlight=False)


def _print_examples(look: "Look", number: int) -> None:
    """Print the first rows of each kind: where they stand, what is asked, and the answer."""
    if not number:
        return
    for kind in look.kinds:
        shown = [row for row in look.rows if row.kind == kind][:number]
        screen.wrapped("", Text(f"{len(shown)} of {look.kinds[kind]:,} rows of kind {kind}", style="bold"))
        for row in shown:
            head = _short(row.where)
            if row.tokens is not None:
                head += f", {row.tokens:,} tokens"
            lines = [head]
            if row.question:
                lines.append(f"  asked:  {_asked(row.question)}")
            lines.append(f"  answer: {_one_line(row.answer)}")
            for line in lines:
                screen.print(Text(_cut(line)), highlight=False)


def _asked(turn: str) -> str:
    """Return the question that a turn marks, or else the whole turn, in one line."""
    from cria_tricks.data.rows import marked_question

    marked = marked_question(turn)
    if marked:
        turn = marked[1]
    return _one_line(turn)


def _short(where: str) -> str:
    """Leave out the folders of the files in a text."""
    return re.sub(r"(?<!\S)\S*/(?=[^/\s])", "", where)


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(empty)"


def _cut(line: str) -> str:
    """Cut a line to the terminal's width, or to :data:`WIDEST` characters where there is no terminal."""
    width = min(screen.width, WIDEST)
    if len(line) <= width:
        return line
    return f"{line[: width - 4]} ..."
