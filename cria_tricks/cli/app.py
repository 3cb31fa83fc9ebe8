"""What the commands of ``cria`` share. With ``--json`` stdout is one JSON document and nothing else."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cria_tricks.common.console import Aside, Screen

screen = Screen(soft_wrap=True)
"""Standard output."""
aside = Aside()
"""Standard error, for everything that is not the answer."""
app = typer.Typer(
    name="cria",
    help="Fit LLM fine-tuning into a small GPU, and see what every trick costs.",
    epilog="Start: cria plan kwanzaa --gpu t4, then cria train smoke. Each command has an example: cria plan --help",
    pretty_exceptions_enable=False,
)


# The groups of ``cria --help``, in the order in which the commands are registered.
PLAN = "Before you train: does it fit, how long, at what price?"
TRAIN = "Train"
ADAPTER = "After training: use your adapter"
LEARN = "Learn the techniques"
MACHINE = "Check this machine"

# The groups of options, where a command has several.
SHOWN = "What to show"
OUTPUT = "Output and network"
HF_JOBS = "For --on hf-jobs"


# Of click, which newer versions of typer carry inside: an unknown option or command, a missing argument.
UsageError: type[Any] = typer.BadParameter.__base__  # type: ignore[assignment]


def _print_version(wanted: bool) -> None:
    if wanted:
        # Rarely asked for, and it looks the package up on the disk.
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


Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field; may be repeated.")
]
FitAim = Annotated[
    str, typer.Option("--fit", metavar="AIM", help="Search switches: fastest, smallest, longest, nearest.")
]
MayChange = Annotated[
    list[str] | None, typer.Option(help="--fit: a switch that may change results, too; may be repeated.")
]
Nodes = Annotated[
    str, typer.Option(metavar="MIN:MAX", help="Machines that may come and go.", rich_help_panel="For --on torchrun")
]
OtherBase = Annotated[
    bool, typer.Option("--other-base", help="Take the base although it is another than was trained over.")
]

Packed = Annotated[bool, typer.Option("--packed", help="Keep an NF4 or int8 base packed: less memory, slower answers.")]


Base = Annotated[Path | None, typer.Option(help="Where the base lies now, if not where the adapter says.")]


def _go_offline(wanted: bool) -> bool:
    if wanted:
        # It imports the hub's library.
        from cria_tricks.models.network import go_offline

        go_offline()
    return wanted  # else the command would be handed None


Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        callback=_go_offline,
        help="Ask no network; take what is here and in the caches.",
        rich_help_panel=OUTPUT,
    ),
]


Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document, and nothing else, to stdout.", rich_help_panel=OUTPUT),
]
