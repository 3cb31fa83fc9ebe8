"""``cria data``: look at a data set before training on it.

It imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cria_tricks.cli.app import PLAN, SHOWN, Json, Offline, app, aside, screen
from cria_tricks.common.console import doing, table
from cria_tricks.common.errors import BadInput

if TYPE_CHECKING:
    from cria_tricks.data.look import Leaks, Look, Problem

NO_NEAR = "near duplicates were not looked for: pip install 'cria_tricks[data]'"
WIDEST = 200
"""Characters of an example's line where no terminal shows it."""


@app.command(rich_help_panel=PLAN, epilog="Example: cria data my.jsonl --eval held_out.jsonl --show 2")
def data(
    train: Annotated[str, typer.Argument(help="A data set's name, a file of rows or texts, a folder, or a hub id.")],
    held_out: Annotated[
        str, typer.Option("--eval", help="The evaluation rows; of a named data set, its own when left out.")
    ] = "",
    model: Annotated[str, typer.Option(help="Whose tokenizer counts the lengths.")] = "smollm2",
    max_length: Annotated[int, typer.Option(min=8, help="The planned data.max_length, in tokens.")] = 2048,
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Show N examples of each kind.", rich_help_panel=SHOWN)
    ] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if there is a problem.")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Look at training rows: kinds, lengths, duplicates, leaks into the evaluation, repeated answers."""
    from cria_tricks import models
    from cria_tricks.data import look, sources
    from cria_tricks.kwanzaa.scores import kind_and_answer
    from cria_tricks.settings import NAMED_SETS

    models.refuse_unknown(model)
    if not held_out and train in NAMED_SETS:
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
    found = look.problems(looks, leaks)
    if looks["train"].near is None:
        notes.append(NO_NEAR)
    counts = _counts(looks, leaks)
    if as_json:
        answer = {
            "model": model,
            **{part: {"description": each.description, **counts[part]} for part, each in looks.items()},
            "leaks": dataclasses.asdict(leaks) if leaks else None,
            "problems": [dataclasses.asdict(problem) for problem in found],
            "notes": notes,
        }
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        _print(looks, counts, found, notes, model)
        _print_examples(looks["train"], show)
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


def _counts(looks: "Mapping[str, Look]", leaks: "Leaks | None") -> dict[str, dict[str, int | None]]:
    """Return the numbers of each part by name: rows of each kind, lengths, duplicates, leaks."""
    kinds = dict.fromkeys(kind for look in looks.values() for kind in look.kinds)
    counts: dict[str, dict[str, int | None]] = {}
    for part, look in looks.items():
        counts[part] = {"rows": len(look.rows)}
        counts[part] |= {f"rows of kind {kind}": look.kinds[kind] for kind in kinds} | look.counts()
    if leaks:
        counts["train"]["near a row of the other part"] = leaks.rows
        counts["eval"]["near a row of the other part"] = leaks.held_out
    return counts


def _print(
    looks: "Mapping[str, Look]",
    counts: Mapping[str, Mapping[str, int | None]],
    found: "Sequence[Problem]",
    notes: Sequence[str],
    model: str,
) -> None:
    """Print the verdict, the problems, and then the table."""
    verdict = "nothing to act on"
    if found:
        verdict = f"{len(found)} thing{'s' * (len(found) > 1)} to act on"
    number = len(looks["train"].rows)
    screen.wrapped(Text(f"{number:,} training row{'s' * (number != 1)}: {verdict}", style="bold"))
    for part, look in looks.items():
        screen.wrapped(Text(f"{part}: {look.description.partition(', sha256')[0]}"))
    for problem in found:
        first = f" (first: {_short(problem.first)})" if problem.first else ""
        screen.wrapped("", Text.assemble(f"- {problem.what}: {problem.rows:,}{first}; ", (problem.do, "bold")))
    shown = table("what", *looks, numbers=looks)
    for name in counts["train"]:
        shown.add_row(name, *(_cell(part.get(name)) for part in counts.values()))
    screen.wrapped("", shown)
    if "tokens" in counts["train"]:
        screen.wrapped("", Text(f"Tokens are those of {model}. Lengths are of whole rows, before any cut."))
    for note in notes:
        screen.wrapped("", Text(f"note: {note}"))


def _cell(value: int | None) -> str:
    return "not looked" if value is None else f"{value:,}"


def _print_examples(look: "Look", number: int) -> None:
    """Print the first rows of each kind: where they stand, what is asked, and the answer."""
    from cria_tricks.data.rows import marked_question
    from cria_tricks.data.samples import answer_line, one_line

    if not number:
        return
    width = min(screen.width, WIDEST) - len("  answer: ")
    for kind in look.kinds:
        shown = [row for row in look.rows if row.kind == kind][:number]
        screen.wrapped("", Text(f"{len(shown)} of {look.kinds[kind]:,} rows of kind {kind}", style="bold"))
        for row in shown:
            head = _short(row.where)
            if row.tokens is not None:
                head += f", {row.tokens:,} tokens"
            lines = [one_line(head, width)]
            if row.question:
                # Of a turn with documents in it only the question.
                marked = marked_question(row.question)
                lines.append(f"  asked:  {one_line(marked[1] if marked else row.question, width)}")
            lines.append(f"  answer: {answer_line(row.answer, width)}")
            for line in lines:
                screen.print(Text(line), highlight=False)


def _short(where: str) -> str:
    """Leave out the folders of the files in a text."""
    return re.sub(r"(?<!\S)\S*/(?=[^/\s])", "", where)
