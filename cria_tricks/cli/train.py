"""``cria train`` and ``cria launch``: start a run.

Each command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from cria_tricks.cli.app import (
    HF_JOBS,
    TRAIN,
    FitAim,
    Json,
    MayChange,
    Nodes,
    Offline,
    OtherBase,
    Settings,
    app,
    aside,
    screen,
)
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.processes import numbers


@app.command(rich_help_panel=TRAIN, epilog="Example: cria train smoke --set train.max_steps=5")
def train(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")] = "smoke",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; runs/NAME when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    fit: FitAim = "",
    may_change: MayChange = None,
    other_base: OtherBase = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Train a recipe: smoke, kwanzaa, kwanzaa_curated (each kwanzaa also as _small), baseline, or a file."""
    from cria_tricks.run import train as run

    with contextlib.redirect_stdout(sys.stderr):  # libraries that print must not spoil the document
        report = run.train(
            recipe,
            out,
            settings=settings or (),
            resume=resume,
            other_base=other_base,
            fit=fit,
            may_change=may_change or (),
            console=aside,
        )
    if numbers.rank():  # the main process speaks for all
        return
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
        return
    if report["eval_loss_before"] is not None:
        screen.print(
            f"evaluation loss {report['eval_loss_before']:.4f} -> {report['eval_loss_after']:.4f}",
            highlight=False,
        )
    screen.print(
        f"{report['steps']} steps in {report['seconds']:.0f} s, {report['tokens_per_second']:,.0f} tokens/s, "
        f"peak {human(report['peak_bytes'])}",
        highlight=False,
    )
    folder = Path(report["adapter"]).parent
    lines = [f"adapter: {report['adapter']}", f"report:  {folder / 'report.md'}"]
    if report["best"]:
        kept = report["best"]
        lines.insert(1, f"best:    {folder / 'best'}, loss {kept['eval_loss']:.4f} after step {kept['step']}")
    screen.print(*lines, sep="\n", markup=False)


@app.command(rich_help_panel=TRAIN, epilog="Example: cria launch kwanzaa --on torchrun --nproc 2")
def launch(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")],
    on: Annotated[str, typer.Option(help="The launcher: torchrun, or hf-jobs for a rented machine.")],
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; one a card when left out, else two.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; runs/NAME when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often lost processes start again.", rich_help_panel="For --on torchrun")
    ] = 0,
    nodes: Nodes = "",
    endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="--nodes: where they meet.", rich_help_panel="For --on torchrun")
    ] = "",
    only_print: Annotated[bool, typer.Option("--print", help="Only print what would be run, or sent.")] = False,
    repo: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="Where the result goes, private.", rich_help_panel=HF_JOBS)
    ] = "",
    flavor: Annotated[str, typer.Option(help="The machine, t4-small when left out.", rich_help_panel=HF_JOBS)] = "",
    timeout: Annotated[str, typer.Option(help="When it is ended; 1h when left out.", rich_help_panel=HF_JOBS)] = "",
    fit: FitAim = "",
    may_change: MayChange = None,
    other_base: OtherBase = False,
    offline: Offline = False,
) -> None:
    """Train a recipe in several processes, or as a job on a rented machine: print what is run or sent, and do it."""
    about = {name: value for name, value in (("flavor", flavor), ("timeout", timeout)) if value}
    if on == "hf-jobs":
        if nproc or resume or max_restarts or nodes or endpoint or other_base or fit or may_change:
            options = "--nproc, --resume, --max-restarts, --nodes, --endpoint, --other-base, --fit and --may-change"
            raise BadInput(f"--on hf-jobs: {options} are for --on torchrun; leave them out")
        # It imports the estimates, which torchrun does not need.
        from cria_tricks.launch import job

        job.launch(recipe, repo, settings or [], out, only_print, **about)
        return
    if on != "torchrun":
        raise BadInput(f"--on {on}: there are torchrun, hf-jobs")
    if repo or about:
        raise BadInput(f"--on {on}: --repo, --flavor and --timeout are for --on hf-jobs; leave them out")
    from cria_tricks.launch import torchrun
    from cria_tricks.run import given

    elastic = torchrun.Elastic(max_restarts, nodes, endpoint)
    words = torchrun.command(recipe, nproc, settings or [], out, resume, elastic)
    words += ["--other-base"] * other_base + ["--offline"] * offline
    for option, values in (("--fit", [fit] if fit else []), ("--may-change", may_change or [])):
        for value in values:
            words += [option, value]
    if not only_print:  # this one process says what would otherwise end each of them
        given.training(given.recipe(recipe, settings or []), out, resume or elastic != torchrun.ONCE, other_base)
    print(torchrun.shown(words), flush=True)
    if only_print:
        return
    # the processes speak
    code = torchrun.run(words)
    sys.exit(code)  # not typer.Exit, because interrupted processes have said so themselves
