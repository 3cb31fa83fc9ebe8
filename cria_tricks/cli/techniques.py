"""``cria tricks``, ``explain``, ``doctor`` and ``report``: the techniques, this machine, benchmarks.

Each command imports its part of the package when it is called, so that ``cria --help`` is quick.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cria_tricks.cli.app import LEARN, MACHINE, Json, app, aside, screen
from cria_tricks.common.console import table
from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import hint, nearest, plain
from cria_tricks.common.lessons import number_of
from cria_tricks.common.units import human


@app.command(rich_help_panel=LEARN, epilog="Example: cria tricks")
def tricks(as_json: Json = False) -> None:
    """List the techniques: how to switch each on, whether it works here, what it saves, and its lesson."""
    from cria_tricks.doctor import machine
    from cria_tricks.hardware import this_device
    from cria_tricks.predict.toggles import off_the_capstone
    from cria_tricks.switches import TECHNIQUES
    from cria_tricks.techniques import INFERENCE

    device = this_device()
    toggles = machine.toggles(device)
    status = {entry["set"].removeprefix("tricks."): entry["status"] for entry in toggles}
    saved = off_the_capstone()
    rows: list[dict[str, Any]] = []
    for trick in (*TECHNIQUES, *INFERENCE):
        about = described(trick)
        settings = about["settings"] or (about["command"],)
        rows.append(
            {
                "name": about["name"],
                "set": ", ".join(settings),
                "claim": trick.TECHNIQUE.claim,
                "lesson": about["lesson"],
                # What has no switch works everywhere, and is not counted among the switches.
                "here": {one: status.get(one, "always") for one in settings},
                "off_the_capstone_bytes": {one: saved[one] for one in settings if one in saved},
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    shown = table("set", "here", "exact?", "MiB less", "lesson", numbers=["MiB less", "lesson"])
    for row in rows:
        for one, here in row["here"].items():
            less = _mib(row["off_the_capstone_bytes"].get(one))
            shown.add_row(one, _coloured(here), row["claim"], less, str(number_of(row["lesson"])))
    screen.wrapped(_how_many_work(toggles, device.name), "", shown, "", TRICKS)


TRICKS = (
    "MiB less: what the peak of the course's job (QLoRA of Llama-3.2-1B on a T4, with all that saves memory) would "
    "grow by without it; empty where the job does not use it.\n"
    "gradient_checkpointing=8 checkpoints the first 8 blocks only: true is all blocks, 1 is one.\n"
    "One technique in full: cria explain nf4. Why something does not work here: cria doctor."
)
"""What ``cria tricks`` says below its table."""


def _mib(saved: int | None) -> str:
    """Write saved bytes in MiB; what is added is said in words."""
    if saved is None:
        return ""
    size = f"{abs(saved) / 2**20:,.0f}"
    return size if saved >= 0 else f"adds {size}"


def _how_many_work(toggles: list[dict[str, Any]], name: str) -> str:
    """Say how many switches work on a device, how many warn and how many are refused."""
    counts = Counter(entry["status"] for entry in toggles)
    found = f"{counts['works']} of {len(toggles)} switches work on {name}"
    return f"{found}; with a warning: {counts['warning']}; refused: {counts['refused']}"


@app.command(rich_help_panel=LEARN, epilog="Example: cria explain nf4")
def explain(
    trick: Annotated[str, typer.Argument(help="The name of a technique, e.g. nf4.")], as_json: Json = False
) -> None:
    """Show a technique's card, the reference lines that matter, and the plain Hugging Face code it stands for."""
    from rich.syntax import Syntax

    about = described(technique(trick))
    if as_json:
        print(json.dumps(about, indent=2))
        return
    card = Table.grid(padding=(0, 2))
    for line, text in about["card"].items():
        card.add_row(line, Text(text))
    screen.wrapped(Text(about["title"], style="bold"), "", card)
    sets = "  ".join(f"--set {about['group']}.{setting}" for setting in about["settings"]) or about["command"]
    for title, code in (
        (f"From scratch, in {about['file']}", about["reference"]),
        (f"In plain code of the libraries; here: {sets}", about["plain"]),
    ):
        # A Syntax would be cut at the edge of the terminal. Its text is not, and can be copied as it is.
        coloured = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(code)
        screen.wrapped("", Text(title, style="bold"), "")
        screen.print(coloured, soft_wrap=True, end="")


def technique(name: str) -> ModuleType:
    """Find the module of a technique by its name or by one of its settings, in any letter case.

    Raises:
        BadInput: for an unknown name; the message suggests the nearest known one.
    """
    from cria_tricks import parallel
    from cria_tricks.switches import TECHNIQUES, technique_name
    from cria_tricks.techniques import INFERENCE

    modules = (*TECHNIQUES, *INFERENCE, *parallel.STRATEGIES.values(), *parallel.BESIDE.values())
    known = {technique_name(trick): trick for trick in modules}
    there_are = f"there are {', '.join(known)}"
    # "peft=lora" finds lora. "quantization" alone finds nothing, because it could mean int8 or nf4.
    for trick in modules:
        for switch in trick.TECHNIQUE.switches:
            known.setdefault(switch.removesuffix("=true"), trick)
    # Without a number of blocks or of micro-batches, which is a choice of the user's.
    wanted = re.sub(r"^(tricks|parallel)\.|=true$|=\d+$", "", plain(name))
    if wanted not in known:
        raise BadInput(f"unknown trick {name}: {hint(nearest(wanted, known), there_are)}")
    return known[wanted]


def described(trick: ModuleType) -> dict[str, Any]:
    """Collect what the module of a technique says about it.

    Returns:
        ``name``; ``title`` and ``card``, from the module's docstring; ``group``, the part of a recipe that switches it
        on, and ``settings``, those that do; ``file``, where its code is; ``command``, which uses a technique without
        settings; ``reference``, the source code of the from-scratch reference, as far as it matters; ``plain``, the
        Hugging Face code that the setting stands for; and ``lesson``.
    """
    from cria_tricks.switches import technique_name
    from cria_tricks.techniques import CARD, card, code_of

    fields = card(trick)
    code = code_of(trick)
    # REFERENCE holds names inside the module, such as "pack" or "Quantized.forward".
    parts = [functools.reduce(getattr, place.split("."), code) for place in code.REFERENCE]
    return {
        "name": technique_name(trick),
        "title": fields["title"],
        "card": {line: fields[line] for line in CARD},
        "group": "parallel" if code.__name__.split(".")[-2] == "parallel" else "tricks",
        "file": f"{parts[0].__module__.replace('.', '/')}.py",
        "settings": trick.TECHNIQUE.switches,
        "command": trick.TECHNIQUE.command,
        "reference": "\n\n\n".join(textwrap.dedent(inspect.getsource(part)).rstrip() for part in parts),
        "plain": code.PLAIN.strip(),
        "lesson": trick.TECHNIQUE.lesson,
    }


@app.command(rich_help_panel=MACHINE, epilog="Example: cria doctor --selftest")
def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Look for seven failures of the libraries that raise nothing.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine for a minute; its plans then use that."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what this machine is and which switches work on it. With --selftest exit code 1 if a check fails."""
    if calibrate:
        _calibrate(as_json)
        return
    if selftest:
        _selftest(as_json)
        return
    from cria_tricks.doctor import machine

    found = machine.examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    about = Table.grid(padding=(0, 2))
    about.add_column(no_wrap=True)
    works = [entry["set"].removeprefix("tricks.") for entry in found["toggles"] if entry["status"] == "works"]
    for name, text in (*_about_the_machine(found), ("works", ", ".join(works))):
        about.add_row(name, Text(text))
    problems = table("switch", "here", "why")
    for entry in found["toggles"]:
        if entry["status"] != "works":
            problems.add_row(entry["set"].removeprefix("tricks."), _coloured(entry["status"]), Text(entry["why"]))
    screen.wrapped(_how_many_work(found["toggles"], found["device"]["name"]), "", about, "")
    if problems.row_count:
        screen.wrapped(problems)


def _about_the_machine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Write what was found out about the machine: the name of a line, and its text."""
    device = found["device"]
    kind = device["kind"]
    if kind == "cuda":
        kind += f", compute capability {'.'.join(map(str, device['capability']))}"
    yield "device", f"{device['name']} ({kind})"
    yield "memory", f"{human(device['memory_bytes'])}, of which {human(device['free_bytes'])} are free"
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
    from cria_tricks.doctor import selftest

    with contextlib.redirect_stdout(sys.stderr):
        found = selftest.examine()
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        failing = [check for check in found["checks"] if not check["holds"]]
        lines = [
            f"{'holds' if check['holds'] else 'fails'}  {check['name']:<27}{check['found']}"
            for check in found["checks"]
        ]
        for check in failing:
            lines += ["", f"{check['name']}: {check['asks']}", f"  cause: {check['cause']}", f"  cure: {check['cure']}"]
        screen.print(*lines, sep="\n", highlight=False, markup=False)
    if not found["ok"]:
        raise typer.Exit(1)


def _calibrate(as_json: bool) -> None:
    aside.print("measuring this machine; it takes about a minute, and nothing else should run meanwhile")
    from cria_tricks.doctor import calibrate
    from cria_tricks.hardware import calibration

    def say(name: str) -> None:
        aside.print(f"  {name}", highlight=False)

    with contextlib.redirect_stdout(sys.stderr):
        found = calibrate.measure(say)
        file = calibration.store(found)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False))
        return
    shown = table("what", "in", "rate", numbers=["rate"])
    for name, rate in sorted(found.rates.items()):
        unit, _, rest = name.partition(" ")
        part, _, precision = rest.rpartition(" ")
        measured = f"{rate / 1e9:,.2f} GB/s" if unit == "bytes" else f"{rate / 1e9:,.1f} GFLOP/s"
        shown.add_row(part, precision, measured)
    shown.add_row("an operation beside its work", "", f"{1e6 * found.launch:.1f} us")
    title = f"{found.device}, {found.threads} threads, at the widths of {found.model}"
    screen.wrapped(
        title, "", shown, "", f"Stored in {file}. From now on plans for this machine use it: cria plan --gpu here"
    )


def _coloured(status: str) -> str:
    colour = {"works": "green", "always": "green", "warning": "yellow", "refused": "red"}[status]
    return f"[{colour}]{status}[/]"
