"""Commands for a trained adapter: ``cria eval``, ``chat``, ``card``, ``verify``, ``merge``, ``export``, ``publish``.

Each command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cria_tricks.cli.app import ADAPTER, Base, Json, Offline, OtherBase, Packed, app, aside, screen
from cria_tricks.common.console import doing, table
from cria_tricks.common.units import human


def _say(*lines: str) -> None:
    screen.print(*lines, sep="\n", highlight=False, markup=False)


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria chat runs/smoke/adapter --prompt 'What is umoja?'")
def chat(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    prompt: Annotated[str | None, typer.Option(help="Ask this once and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with; default: as trained.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the text as it is, without a chat template.")] = False,
    with_base: Annotated[bool, typer.Option("--with-base", help="The model without the adapter answers, too.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    packed: Packed = False,
    base: Base = None,
    other_base: OtherBase = False,
    offline: Offline = False,
) -> None:
    """Talk to a trained adapter in the format that it was trained in; an empty line, Ctrl-D or Ctrl-C ends it."""
    from cria_tricks.adapter import folder as artifact

    artifact.adapter(adapter, base, other_base=other_base)
    if with_base and artifact.is_whole(adapter):
        raise artifact.no_base_below(adapter, "--with-base")
    from transformers import TextStreamer

    from cria_tricks.adapter.chat import open_for_chat

    with doing(aside, f"loading {adapter}"):
        talk = open_for_chat(
            adapter, raw, system, max_new_tokens, base=base, other_base=other_base, packed=packed, say=aside.print
        )
    if talk.form.note:
        aside.print(f"note: {talk.form.note}")
    talk.streamer = TextStreamer(talk.tokenizer, skip_prompt=True, skip_special_tokens=True)
    while True:
        text = prompt or _ask()
        if not text:
            return
        for name in ("base", "adapter") if with_base else ("adapter",):
            if with_base:
                _say(f"{name}:")
            talk.ask(text, name)
        if prompt:
            return


@app.command("eval", rich_help_panel=ADAPTER, epilog="Example: cria eval runs/kwanzaa/adapter --with-base")
def evaluate(
    adapter: Annotated[
        Path | None, typer.Argument(help="The adapter's folder; not needed for --reference and --trivial.")
    ] = None,
    data: Annotated[str, typer.Option(help="Held-out rows, by name (kwanzaa, history_notes) or a file.")] = "kwanzaa",
    with_base: Annotated[bool, typer.Option("--with-base", help="Also the model without the adapter.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Also score the data's own answers.")] = False,
    trivial: Annotated[bool, typer.Option("--trivial", help="Also score answers that need no model.")] = False,
    contract: Annotated[
        bool | None,
        typer.Option("--contract/--own-prompts", help="Show the contract in each system prompt; default: as trained."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; eval beside the adapter when left out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that are answered together.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 2048,
    packed: Packed = False,
    base: Base = None,
    other_base: OtherBase = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Answer held-out rows; loss and perplexity for any data, scores where answers keep the contract."""
    from cria_tricks.kwanzaa.evaluate import Settings
    from cria_tricks.kwanzaa.evaluate import evaluate as run
    from cria_tricks.kwanzaa.summary import table as scores_table

    settings = Settings(batch_size, max_new_tokens, base, other_base, contract, packed)
    with contextlib.redirect_stdout(sys.stderr):
        found = run(
            adapter,
            data,
            base=with_base,
            reference=reference,
            trivial=trivial,
            out=out,
            limit=limit,
            settings=settings,
            console=aside,
        )
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    head, *rows = scores_table(found)
    shown = table(*head)
    for row in rows:
        shown.add_row(*row)
    screen.wrapped(f"[bold]{found['rows']} rows, mean and 95 % interval[/]", "", shown, "")
    _say(f"to read: {Path(found['out']) / 'eval.md'}")


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria card runs/kwanzaa/adapter")
def card(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="A folder of cria eval; may be repeated. Default: eval beside it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the scores of cria eval into the adapter's model card, with a verdict in one sentence."""
    from cria_tricks.kwanzaa.card import write_scores

    said = write_scores(adapter, evaluation or ())
    if as_json:
        print(json.dumps({"verdict": said, "card": str(adapter / "README.md")}))
        return
    _say(said)
    _say(f"written: {adapter / 'README.md'}")


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria verify runs/smoke/adapter")
def verify(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    as_json: Json = False,
) -> None:
    """Check that every file of an adapter folder is the one that was written."""
    from cria_tricks.adapter import folder as artifact

    found = artifact.verify(adapter)
    if as_json:
        print(json.dumps({"ok": True, **found}))
        return
    for name in found["unlisted"]:
        _say(f"note: {name} is not in the manifest")
    _say(f"whole: {found['files']} files, {human(found['bytes'])}, every sha256 as written")


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria merge runs/kwanzaa/adapter")
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
    from cria_tricks.adapter.merge import merge as run

    with contextlib.redirect_stdout(sys.stderr):
        found = run(adapter, out, base=base, other_base=other_base, say=aside.print)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    for name, value in check_rows(found):
        _say(f"{name}: {value}")
    _say(f"merged into {found['base']}, {found['dtype']}: {found['merged']}")


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria export runs/kwanzaa/merged --type q8_0")
def export(
    model: Annotated[Path, typer.Argument(help="The folder of a merged model, or of one whose weights all trained.")],
    kinds: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="TYPE", help="f16 or q8_0; may be repeated; both when left out."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; gguf beside the model when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Write GGUF files for Ollama and llama.cpp, read each again, and hold it against the model."""
    from cria_tricks.adapter import folder as artifact

    artifact.whole_model(model)
    from cria_tricks.adapter.export import export as run

    with contextlib.redirect_stdout(sys.stderr):
        found = run(model, kinds, out, say=aside.print)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return
    _print_exported(found)


def _print_exported(found: dict[str, Any]) -> None:
    numbers = ("size", "logit off by", "KL, nats", "top token")
    shown = table("type", *numbers, numbers=numbers)
    for file in found["files"]:
        shown.add_row(
            file["type"],
            human(file["bytes"]),
            f"{file['largest_difference']:.2g}",
            f"{file['kl']:.2g}",
            f"{file['same_argmax']:.1%}",
        )
    screen.wrapped("[bold]each file, read again, against the model[/]", "", shown, "")
    _say(f"written: {found['folder']}")
    if not found["template"]:
        _say("note: the Modelfile has no TEMPLATE; write one by hand")
    _say(f"next: cd {found['folder']} && ollama create mine -f Modelfile")


@app.command(rich_help_panel=ADAPTER, epilog="Example: cria publish runs/kwanzaa/adapter me/kwanzaa --tag v0.1.0")
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
        done: dict[str, Any] = {}
        if yes:
            done = push(found, aside.print)
    if as_json:
        print(json.dumps({**found, "published": yes, **done}, indent=2))
        return
    _print_published(found, done)


def _print_published(found: dict[str, Any], done: dict[str, Any]) -> None:
    if done:
        _say(f"published: {done['url']} (commit {done['commit']})")
        return
    _say(found["card"])
    where = f"{found['repo']} {found['tag']}"
    if found["private"]:
        where += ", private if it is new"
    _say(where, "")
    widest = max(len(f"{file['bytes']:,}") for file in found["files"])
    _say(*(f"{file['sha256']}  {file['bytes']:>{widest},}  {file['path']}" for file in found["files"]), "")
    _say(*(f"note: {note}" for note in found["notes"]))
    _say(f"{len(found['files'])} files, {human(found['bytes'])}. Nothing was sent, and the hub was not asked.")
    _say("To publish it: the same command with --yes.")


def _ask() -> str:
    """Read the user's next line; an empty one, or the end of the input, is an empty text."""
    mark = "you> " if sys.stdin.isatty() else ""
    try:
        line = input(mark)
    except EOFError:
        return ""
    if not line.strip():
        return ""
    return line
