"""The command line, ``cria``. With ``--json`` stdout is one JSON document and nothing else."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cria_tricks.common import interrupts, waiting
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import (
    BadInput,
    Diverged,
    Interrupted,
    JobFailed,
    Lost,
    OutOfMemory,
    Unfinished,
    is_out_of_memory,
)
from cria_tricks.common.startup import end_at_once, importing
from cria_tricks.load import quiet
from cria_tricks.processes import numbers
from cria_tricks.processes.exit import leave, unforeseen

if TYPE_CHECKING:
    from cria_tricks.predict.machines import Advice, Option

app = typer.Typer(
    name="cria",
    help="Fit LLM fine-tuning into a small GPU, and see what every trick costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Of click, which newer versions of typer carry inside: an unknown option or command, a missing argument.
UsageError: type[Any] = typer.BadParameter.__base__  # type: ignore[assignment]

screen, aside = Console(soft_wrap=True), Aside()


def _print_version(wanted: bool) -> None:
    if wanted:
        from cria_tricks.common.version import __version__

        print(f"cria_tricks {__version__}")
        raise typer.Exit


@app.callback()
def cria(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""


OtherBase = Annotated[
    bool, typer.Option("--other-base", help="Take the base although it is another than was trained over.")
]
Base = Annotated[Path | None, typer.Option(help="Where the base lies now, if not where the adapter says.")]


def _go_offline(wanted: bool) -> bool:
    if wanted:
        from cria_tricks.models.network import go_offline

        go_offline()
    return wanted  # else the command would be handed None


Offline = Annotated[
    bool, typer.Option("--offline", callback=_go_offline, help="Ask no network; take what is here and in the caches.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, to stdout.")]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")] = "smoke",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; runs/NAME when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    other_base: OtherBase = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Train a recipe: smoke, kwanzaa, kwanzaa_small, baseline, or a file."""
    from cria_tricks.run import api

    with contextlib.redirect_stdout(sys.stderr):  # libraries that print must not spoil the document
        report = api.train(recipe, out, settings=settings or (), resume=resume, other_base=other_base, console=aside)
    if numbers.rank():  # one process speaks for all
        return
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
        return
    from cria_tricks.common.units import human

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
    screen.print(f"adapter: {report['adapter']}", f"report:  {folder / 'report.md'}", sep="\n", markup=False)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")] = "smoke",
    model: Annotated[str | None, typer.Option(help="A short name, a hub id, a folder or a config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="t4, l4, a10g or a100; this machine's card, or t4.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the real step on tensors without data.")] = False,
    advise: Annotated[bool, typer.Option("--advise", help="Try all toggle sets: bytes against time.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Find the longest row that fits.")] = False,
    rows: Annotated[int | None, typer.Option(help="Training rows; then time and price are given.")] = None,
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
            advise=advise,
            longest=longest,
            rows_full=rows_full,
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        found.show(Console())
    if not found.fits:
        raise typer.Exit(3)


@app.command()
def launch(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")],
    on: Annotated[str, typer.Option(help="Who starts it: torchrun, accelerate, or hf-jobs on a rented machine.")],
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; one a card when left out, else two.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; runs/NAME when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="torchrun: how often lost processes start again.")] = 0,
    nodes: Annotated[str, typer.Option(metavar="MIN:MAX", help="torchrun: machines that may come and go.")] = "",
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="--nodes: where they meet.")] = "",
    only_print: Annotated[bool, typer.Option("--print", help="Only print what would be run, or sent.")] = False,
    repo: Annotated[str, typer.Option(metavar="OWNER/NAME", help="hf-jobs: where the adapter goes, private.")] = "",
    flavor: Annotated[str, typer.Option(help="hf-jobs: the machine; auto is the cheapest that it fits on.")] = "auto",
    timeout: Annotated[str, typer.Option(help="hf-jobs: when it is ended, e.g. 90m; else from the estimate.")] = "",
    budget: Annotated[float | None, typer.Option(help="hf-jobs: USD that it may cost at most.")] = None,
    other_base: OtherBase = False,
    offline: Offline = False,
) -> None:
    """Train a recipe in several processes, or as a job on a rented machine: print what is run or sent, and do it."""
    if on == "hf-jobs":
        if nproc or resume or max_restarts or nodes or endpoint or other_base:
            options = "--nproc, --resume, --max-restarts, --nodes, --endpoint and --other-base"
            raise BadInput(f"--on hf-jobs: {options} are for the other launchers; leave them out")
        _job(recipe, repo, settings or [], flavor, timeout, budget, out, only_print)
        return
    if repo or flavor != "auto" or timeout or budget:
        raise BadInput(f"--on {on}: --repo, --flavor, --timeout and --budget are for --on hf-jobs; leave them out")
    from cria_tricks.launch import torchrun
    from cria_tricks.run import given

    elastic = torchrun.Elastic(max_restarts, nodes, endpoint)
    words = torchrun.command(recipe, on, nproc, settings or [], out, resume, elastic)
    words += ["--other-base"] * other_base + ["--offline"] * offline
    if not only_print:  # what would end every process is said by one
        given.training(given.recipe(recipe, settings or []), out, resume or elastic != torchrun.ONCE, other_base)
    print(torchrun.shown(words), flush=True)
    if only_print:
        return
    with waiting.paused():  # the processes speak
        code = torchrun.run(words)
    sys.exit(code)  # not typer.Exit, because interrupted processes have said so themselves


def _job(
    recipe: str,
    repo: str,
    settings: list[str],
    flavor: str,
    timeout: str,
    budget: float | None,
    out: Path | None,
    only_print: bool,
) -> None:
    from cria_tricks.common.units import human
    from cria_tricks.launch import hub as jobs_hub
    from cria_tricks.launch import job as jobs

    def say(*lines: str) -> None:
        screen.print(*lines, sep="\n", highlight=False, markup=False)

    def prepare(prices: dict[str, float] | None = None) -> jobs.Job:
        return jobs.prepare(recipe, repo, settings, flavor, timeout, budget, prices)

    job = prepare()
    if only_print:
        say(*jobs_hub.shown(job), "nothing was sent; prices are those of the list kept here")
        return
    folder = jobs_hub.free_folder(out, job)
    hub = jobs_hub.Hub()
    job = prepare(hub.prices())
    say(*jobs_hub.shown(job))
    interrupts.now_saved("the job may have been sent; hf jobs ps lists the ones that run and cost")
    started = hub.send(job)
    interrupts.now_saved(f"the job goes on, and costs: {'; '.join(jobs_hub.ways_on(started, job))}")
    say(f"job {started.id}: {started.url}")
    hub.follow(started, job, say)
    interrupts.now_saved(f"the job has ended; {jobs_hub.by_hand(job)}")
    found = hub.fetch(job, folder)
    interrupts.now_saved(f"the job has ended, and its result is in {folder}")
    say(f"whole: {found.files} files, {human(found.bytes)}, every sha256 as written", f"adapter: {folder}")


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
    found, rows = machine.toggles(device), explain.table()
    for row in rows:
        mine = [entry for entry in found if entry["trick"] == row["name"]]
        row["here"] = "\n".join(_status(entry) for entry in mine) or "works"
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
    device, bf16, library = found["device"], found["bf16"], found["bitsandbytes"]
    capability = f", compute capability {'.'.join(map(str, device['capability']))}" if device["kind"] == "cuda" else ""
    about = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    about.add_column(no_wrap=True)
    about.add_row("device", f"{device['name']} ({device['kind']}{capability})")
    about.add_row("memory", f"{device['memory']}, of which {device['free']} are free")
    claims = "" if bf16["torch_says"] is None else f" (torch.cuda.is_bf16_supported() says {bf16['torch_says']})"
    about.add_row("bf16", ("runs in hardware" if bf16["runs"] == "real" else "is emulated, slowly") + claims)
    about.add_row("attention", "\n".join(f"{row}: {kernel}" for row, kernel in found["attention"].items()))
    about.add_row(
        "bitsandbytes", f"{library['library']} ({library['backend']})" if library["library"] else "no library"
    )
    about.add_row("paging", ("works: " if found["paging"]["works"] else "no: ") + found["paging"]["why"])
    about.add_row("Google Colab", found["colab"] or "no")
    versions = (f"{name} {version or 'missing'}" for name, version in found["versions"].items())
    about.add_row("versions", f"python {found['python']}, CUDA {found['cuda'] or 'missing'}, " + ", ".join(versions))
    screen.print(about, highlight=False)
    table = Table()
    for column in ("set", "here", "why"):
        table.add_column(column, no_wrap=column == "set", overflow="fold")
    for entry in found["toggles"]:
        table.add_row(entry["set"], _status(entry), entry["why"])
    screen.print(table)


def _selftest(as_json: bool) -> None:
    aside.print("looking for failures that raise nothing; it takes some ten seconds")
    with importing():
        from cria_tricks.doctor import selftest

    with contextlib.redirect_stdout(sys.stderr):
        found = selftest.examine()
    failing = [check for check in found["checks"] if not check["holds"]]
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        for check in found["checks"]:
            line = f"{'holds' if check['holds'] else 'fails'}  {check['name']:<27}{check['found']}"
            screen.print(line, highlight=False, markup=False)
        for check in failing:
            cause, cure = (f"  {name}: {check[name]}" for name in ("cause", "cure"))
            screen.print("", f"{check['name']}: {check['asks']}", cause, cure, sep="\n", highlight=False, markup=False)
    if failing:
        raise typer.Exit(1)


def _collectives(nproc: int | None, as_json: bool) -> None:
    from cria_tricks.common.units import human
    from cria_tricks.doctor import collectives

    with contextlib.redirect_stdout(sys.stderr):
        found = collectives.examine(nproc)
    if found is None:  # another process of the launcher's says it
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


@app.command()
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
    found = advise(shape, lambda *what: estimate(*what).needed_bytes, tokens, budget, kind)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False))
        return
    _print_advice(found)


@app.command()
def chat(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    prompt: Annotated[str | None, typer.Option(help="Ask this once and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the text as it is, without a chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    base: Base = None,
    other_base: OtherBase = False,
    offline: Offline = False,
) -> None:
    """Talk to a trained adapter in the format that it was trained in; an empty line, Ctrl-D or Ctrl-C ends it."""

    from cria_tricks.adapter import folder as artifact

    artifact.adapter(adapter, base, other_base=other_base)
    with importing():
        from transformers import TextStreamer

        from cria_tricks.adapter.chat import answer, open_for_chat

    with waiting.doing(f"loading {adapter}"):
        model, tokenizer, form = open_for_chat(adapter, raw, system, base=base, other_base=other_base, say=aside.print)
    if form.note:
        aside.print(f"note: {form.note}")

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = [{"role": "system", "content": system}] if system else []
    while text := prompt or _ask():
        messages.append({"role": "user", "content": prompt or text.strip()})
        with waiting.doing("answering"):
            reply = answer(model, tokenizer, messages if form.template else text, max_new_tokens, streamer)
        messages.append({"role": "assistant", "content": reply})
        if prompt:
            return


@app.command("eval")
def evaluate(
    adapter: Annotated[Path | None, typer.Argument(help="The adapter's folder; not needed for --reference.")] = None,
    data: Annotated[str, typer.Option(help="Held-out rows: kwanzaa, nguzo_saba, a file, a hub data set.")] = "kwanzaa",
    with_base: Annotated[bool, typer.Option("--with-base", help="Also the model without the adapter.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Also score the data's own answers.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write; eval beside the adapter when left out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that are answered together.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 2048,
    base: Base = None,
    other_base: OtherBase = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Answer held-out rows; loss and perplexity for any data, scores where answers keep the contract. Goes on."""
    from cria_tricks.kwanzaa.evaluate import Settings
    from cria_tricks.kwanzaa.evaluate import evaluate as run
    from cria_tricks.kwanzaa.page import scores_table

    settings = Settings(batch_size, max_new_tokens, base, other_base)
    with contextlib.redirect_stdout(sys.stderr):
        found = run(
            adapter, data, base=with_base, reference=reference, out=out, limit=limit, settings=settings, console=aside
        )
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    head, *rows = scores_table(found)
    table = Table(title=f"{found['rows']} rows, mean and 95 % interval", title_justify="left")
    for column in head:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    screen.print(table, highlight=False)
    screen.print(f"to read: {Path(found['out']) / 'eval.md'}", markup=False, highlight=False)


@app.command()
def verify(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    as_json: Json = False,
) -> None:
    """Check that every file of an adapter folder is the one that was written."""
    from cria_tricks.adapter import folder as artifact
    from cria_tricks.common.units import human

    found = artifact.verify(adapter)
    if as_json:
        print(json.dumps({"ok": True, "files": found.files, "bytes": found.bytes, "unlisted": found.unlisted}))
        return
    for name in found.unlisted:
        screen.print(f"note: {name} is not in the manifest", highlight=False, markup=False)
    screen.print(f"whole: {found.files} files, {human(found.bytes)}, every sha256 as written", highlight=False)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; merged beside the adapter when left out.")] = None,
    base: Base = None,
    other_base: OtherBase = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Merge a LoRA adapter into its base, in 16 bits, and hold the result against the unmerged model."""
    from cria_tricks.adapter import folder as artifact
    from cria_tricks.adapter.model_card import check_rows

    artifact.adapter(adapter, base, other_base=other_base)
    with importing():
        from cria_tricks.adapter.merge import merge as run

    with contextlib.redirect_stdout(sys.stderr):
        found = run(adapter, out, base=base, other_base=other_base, say=aside.print)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    for name, value in check_rows(found):
        screen.print(f"{name}: {value}", highlight=False, markup=False)
    screen.print(f"merged into {found['base']}, {found['dtype']}: {found['merged']}", highlight=False, markup=False)


@app.command()
def publish(
    adapter: Annotated[Path, typer.Argument(help="The folder of an adapter, or of a merged or trained model.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Where on the Hugging Face hub.")],
    tag: Annotated[str, typer.Option(help="The version, vX.Y.Z; one that is there already is refused.")] = "v0.1.0",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Really do it; without, it is only said.")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say what would be published on the Hugging Face hub, and with --yes publish it, under a version tag."""
    from cria_tricks.adapter.publish import prepare, push

    with contextlib.redirect_stdout(sys.stderr):
        found = prepare(adapter, repo, tag, private)
        done = push(found, aside.print) if yes else {}
    if as_json:
        print(json.dumps({**found, "published": yes, **done}, indent=2))
        return
    _print_published(found, done)


def _print_published(found: dict[str, Any], done: dict[str, Any]) -> None:
    from cria_tricks.common.units import human

    def say(*lines: str) -> None:
        screen.print(*lines, sep="\n", highlight=False, markup=False)

    if done:
        say(f"published: {done['url']} (commit {done['commit']})")
        return
    say(found["card"])
    say(f"{found['repo']} {found['tag']}{', private if it is new' if found['private'] else ''}", "")
    widest = max(len(f"{file['bytes']:,}") for file in found["files"])
    say(*(f"{file['sha256']}  {file['bytes']:>{widest},}  {file['path']}" for file in found["files"]), "")
    say(*(f"note: {note}" for note in found["notes"]))
    say(f"{len(found['files'])} files, {human(found['bytes'])}. Nothing was sent, and the hub was not asked.")
    say("To publish it: the same command with --yes. The same by hand:", *(f"  {line}" for line in found["commands"]))


def _print_advice(found: "Advice") -> None:
    from cria_tricks.predict.machines import METHODS
    from cria_tricks.predict.words import in_words

    screen.print(
        f"[bold]{found.model}[/]: {found.parameters / 1e9:.2f} billion parameters; {found.tokens:,} tokens in rows of "
        f"{found.tokens_per_row:,} ({found.kind})\n",
        highlight=False,
    )
    table = Table(title="What we estimate, on one machine each", title_justify="left")
    for column in ("machine", *METHODS.values()):
        table.add_column(column, no_wrap=True)
    for flavor in dict.fromkeys(option.flavor for option in found.options):
        table.add_row(flavor, *(_cell(option) for option in found.options if option.flavor == flavor))
    screen.print(table)
    for paragraph in in_words(found):
        screen.print(f"\n{paragraph}", highlight=False, markup=False, soft_wrap=False)


def _cell(option: "Option") -> str:
    from cria_tricks.common.units import duration, human, money

    if option.minutes is None or option.cost is None:
        return f"[red]needs {human(option.needed_bytes)} of {human(option.capacity_bytes)}[/]"
    colour = "yellow" if option.within_budget is False else "green"
    return f"[{colour}]{duration(60 * option.minutes)}, {money(option.cost)}[/]"


def _status(entry: dict[str, Any]) -> str:
    colour = {"works": "green", "warning": "yellow", "refused": "red"}[entry["status"]]
    return f"[{colour}]{entry['status']}[/]"


def _ask() -> str:
    try:
        with waiting.paused():
            line = input("you> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""
    return line if line.strip() else ""


def main() -> None:
    """Run the command line; every foreseen error is one line on stderr and an exit code."""
    interrupts.begin()
    end_at_once()
    quiet.plain()
    numbers.see_one_card()
    try:
        code = _run()
    except UsageError as error:
        leave(f"error: {error.format_message().rstrip('.')}; see cria --help", 2)
    except BadInput as error:
        leave(f"error: {error}", 2)
    except (Diverged, JobFailed, Unfinished) as error:
        leave(f"error: {error}", 1)
    except OutOfMemory as error:
        leave(f"error: {error}", 3)
    except Lost as error:
        leave(f"error: {error}; {numbers.go_on()}", 1)
    except Interrupted as error:
        leave(f"{error}; go on with --resume", 130)
    except (KeyboardInterrupt, typer.Abort):
        leave(interrupts.words(), interrupts.CODE)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            unforeseen()
        leave("error: out of memory", 3)
    except Exception:
        unforeseen()
    else:
        if code:
            sys.exit(code)


def _run() -> int | None:
    """Run the command; the exit code of typer.Exit.

    Raises:
        BadInput: if it cannot be told which process of a run this is.
        KeyboardInterrupt: if a signal came, whatever a library or typer, which returns 130, has made of it.
    """
    numbers.refuse_odd_numbers()
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (SystemExit, Interrupted):
        raise
    except BaseException:
        if interrupts.asked():
            raise KeyboardInterrupt from None
        raise
    if code == interrupts.CODE:  # what typer makes of the exception; launch hands such a code on by itself
        raise KeyboardInterrupt
    return code
