"""``cria tricks``, ``explain``, ``doctor`` and ``report``: the techniques, this machine, benchmarks.

Each command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cria_tricks.cli.app import Json, app, aside, screen
from cria_tricks.common.errors import BadInput
from cria_tricks.common.startup import importing
from cria_tricks.common.units import human


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="What pytest --benchmark-only --benchmark-json FILE wrote.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("cria-report"),
    as_json: Json = False,
) -> None:
    """Draw a benchmark run of yours beside the committed ones: the same figures and tables, one device more."""
    from cria_tricks.bench import compare

    cases = compare.report(file, out)
    if as_json:
        print(json.dumps([case.model_dump(mode="json") for case in cases], indent=2, allow_nan=False))
        return
    screen.print(f"{len(cases)} cases of {cases[0].device}: {out / 'report.md'}", highlight=False, markup=False)


@app.command()
def tricks(as_json: Json = False) -> None:
    """List the techniques: what each saves, costs and claims, where it is taught, and whether it works here."""
    from cria_tricks.doctor import explain, machine
    from cria_tricks.hardware import this_device

    device = this_device()
    toggles = machine.toggles(device)
    rows = explain.table()
    for row in rows:
        here = [_status(toggle) for toggle in toggles if toggle["trick"] == row["name"]]
        row["here"] = "\n".join(here) or "works"
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"Techniques, and whether they work on {device.name}", show_lines=True)
    for column in ("set", "here", *explain.COLUMNS[1:]):
        table.add_column(column, no_wrap=column in ("set", "here"))
    for row in rows:
        table.add_row(row["set"].replace(", ", "\n"), row["here"], *(row[column] for column in explain.COLUMNS[1:]))
    screen.print(table)


@app.command()
def explain(
    trick: Annotated[str, typer.Argument(help="The name of a technique, e.g. nf4.")], as_json: Json = False
) -> None:
    """Show a technique's card, the reference lines that matter, and the plain Hugging Face code it stands for."""
    from rich.syntax import Syntax

    from cria_tricks.doctor.explain import explain as look_up

    about = look_up(trick)
    if as_json:
        print(json.dumps(dataclasses.asdict(about), indent=2))
        return
    screen.print(f"[bold]{about.title}[/bold]\n", highlight=False)
    card = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for line, text in about.card.items():
        card.add_row(line, text)
    screen.print(card)
    sets = "  ".join(f"--set {about.group}.{setting}" for setting in about.settings) or about.command
    for title, code in (
        (f"From scratch, in cria_tricks/{about.group}/{about.name}.py", about.reference),
        (f"In plain code of the libraries; here: {sets}", about.plain),
    ):
        screen.print(f"\n[bold]{title}[/bold]\n", highlight=False)
        screen.print(Syntax(code, "python", theme="ansi_dark", background_color="default"))


@app.command()
def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Look for seven failures of the libraries that raise nothing.")
    ] = False,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Measure what passes between processes, or cards, and how fast.")
    ] = False,
    nproc: Annotated[int | None, typer.Option(help="Processes to measure; one a card, or two.")] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine is and which toggles work on it. With --selftest exit code 1 if a check fails."""
    if selftest:
        _selftest(as_json)
        return
    if collectives:
        _collectives(nproc, as_json)
        return
    if nproc is not None:
        raise BadInput(f"--nproc {nproc}: belongs to --collectives")
    from cria_tricks.doctor import machine

    found = machine.examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    about = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    about.add_column(no_wrap=True)
    for name, text in _about_the_machine(found):
        about.add_row(name, text)
    screen.print(about, highlight=False)
    table = Table()
    for column in ("set", "here", "why"):
        table.add_column(column, no_wrap=column == "set", overflow="fold")
    for entry in found["toggles"]:
        table.add_row(entry["set"], _status(entry), entry["why"])
    screen.print(table)


def _about_the_machine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Write what was found out about the machine: the name of a line, and its text."""
    device = found["device"]
    kind = device["kind"]
    if kind == "cuda":
        kind += f", compute capability {'.'.join(map(str, device['capability']))}"
    yield "device", f"{device['name']} ({kind})"
    yield "memory", f"{device['memory']}, of which {device['free']} are free"
    bf16 = "runs in hardware" if found["bf16"]["runs"] == "real" else "is emulated, slowly"
    if found["bf16"]["torch_says"] is not None:
        bf16 += f" (torch.cuda.is_bf16_supported() says {found['bf16']['torch_says']})"
    yield "bf16", bf16
    yield "attention", "\n".join(f"{row}: {kernel}" for row, kernel in found["attention"].items())
    library = "no library"
    if found["bitsandbytes"]["library"]:
        library = f"{found['bitsandbytes']['library']} ({found['bitsandbytes']['backend']})"
    yield "bitsandbytes", library
    works = "works" if found["paging"]["works"] else "no"
    yield "paging", f"{works}: {found['paging']['why']}"
    yield "Google Colab", found["colab"] or "no"
    versions = [f"python {found['python']}", f"CUDA {found['cuda'] or 'missing'}"]
    versions += [f"{name} {version or 'missing'}" for name, version in found["versions"].items()]
    yield "versions", ", ".join(versions)


def _selftest(as_json: bool) -> None:
    aside.print("looking for failures that raise nothing; it takes some ten seconds")
    with importing():
        from cria_tricks.doctor import selftest

    with contextlib.redirect_stdout(sys.stderr):
        found = selftest.examine()
    failing = [check for check in found["checks"] if not check["holds"]]

    def say(*lines: str) -> None:
        screen.print(*lines, sep="\n", highlight=False, markup=False)

    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        for check in found["checks"]:
            verdict = "holds" if check["holds"] else "fails"
            say(f"{verdict}  {check['name']:<27}{check['found']}")
        for check in failing:
            say("", f"{check['name']}: {check['asks']}", f"  cause: {check['cause']}", f"  cure: {check['cure']}")
    if failing:
        raise typer.Exit(1)


def _collectives(nproc: int | None, as_json: bool) -> None:
    from cria_tricks.doctor import collectives

    with contextlib.redirect_stdout(sys.stderr):
        found = collectives.examine(nproc)
    if found is None:  # rank 0 prints the answer
        return
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    table = Table(title=f"{found['processes']} processes, {found['backend']}", title_justify="left")
    for column in ("collective", "tensor", "median", "algorithm", "bus"):
        table.add_column(column, justify="left" if column == "collective" else "right", no_wrap=True)
    for entry in found["collectives"]:
        rates = (f"{entry[name] / 1e9:.3f} GB/s" for name in ("algorithm_rate", "bus_rate"))
        table.add_row(entry["kind"], human(entry["bytes"]), f"{1000 * entry['seconds']:.3f} ms", *rates)
    screen.print(table)
    for kind, line in found["lines"].items():
        said = f"{kind}: {1000 * line['latency']:.3f} ms + sent bytes / {line['rate'] / 1e9:.3f} GB/s"
        screen.print(f"{said}, off by {line['error']:.0%} at most", highlight=False)
    for note in found["notes"]:
        screen.print(f"note: {note}", highlight=False, markup=False)


def _status(entry: dict[str, Any]) -> str:
    colour = {"works": "green", "warning": "yellow", "refused": "red"}[entry["status"]]
    return f"[{colour}]{entry['status']}[/]"
