"""The whole command line, and how each foreseen error ends it."""

import sys
from typing import NoReturn

import typer

from cria_tricks.cli.app import UsageError, app
from cria_tricks.common import interrupts
from cria_tricks.common.again import resumed
from cria_tricks.common.errors import (
    BadInput,
    Diverged,
    Interrupted,
    Lost,
    OutOfMemory,
    Unfinished,
    is_out_of_memory,
)
from cria_tricks.common.startup import end_at_once
from cria_tricks.load import quiet
from cria_tricks.processes import numbers
from cria_tricks.processes.exit import leave, leave_for_a_package, unforeseen

# Each registers its commands, in the order of ``cria --help``.
# isort: off
from cria_tricks.cli import plan  # noqa: F401
from cria_tricks.cli import film  # noqa: F401
from cria_tricks.cli import data  # noqa: F401
from cria_tricks.cli import train  # noqa: F401
from cria_tricks.cli import adapters  # noqa: F401
from cria_tricks.cli import compare  # noqa: F401
from cria_tricks.cli import techniques  # noqa: F401
from cria_tricks.cli import bench  # noqa: F401
# isort: on

GONE = {
    "hardware": "cria plan RECIPE --gpu all",
    "prepare": "cria train, which keeps the tokens of any data in a mapped file",
}
"""Commands that are gone, each with what does its work now."""
INSTEAD = {
    "--collectives": "NVIDIA's nccl-tests measure a link; the lesson on interconnects has a script that does so",
    "--hang": "py-spy dump --pid PID shows where a process waits; see the page When it hangs",
}
"""An option that ``cria doctor`` had once -> what to use in its place."""


def main() -> None:
    """Run the command line; every foreseen error is one line on stderr and an exit code."""
    interrupts.begin()
    end_at_once()
    quiet.plain()
    numbers.see_one_card()
    try:
        code = _run()
    except UsageError as error:
        instead = INSTEAD.get(getattr(error, "option_name", ""), "see cria --help")
        leave(f"error: {error.format_message().rstrip('.')}; {instead}", 2)
    except Diverged as error:
        leave(f"error: {error}", 1)
    except OutOfMemory as error:
        leave(f"error: {error}", 3)
    except Lost as error:
        leave(f"error: {error}; {numbers.go_on()}", 1)
    except Interrupted as error:
        leave(f"{error}; go on with {resumed()}", 130)
    except (KeyboardInterrupt, typer.Abort):
        leave(interrupts.words(), interrupts.CODE)
    except Exception as error:
        _end(error)
    else:
        if code:
            sys.exit(code)


def _end(error: Exception) -> NoReturn:
    """End the command with one line about the package that an error is about, else about the error itself."""
    leave_for_a_package(error)
    if isinstance(error, BadInput):
        leave(f"error: {error}", 2)
    if isinstance(error, Unfinished):
        leave(f"error: {error}", 1)
    if is_out_of_memory(error):
        leave("error: out of memory", 3)
    unforeseen()


def _run() -> int | None:
    """Run the command; the exit code of typer.Exit.

    Raises:
        BadInput: for a command that is gone, or if it cannot be told which process of a run this is.
        KeyboardInterrupt: if a signal came, whatever a library or typer, which returns 130, has made of it.
    """
    numbers.refuse_odd_numbers()
    command = "".join(sys.argv[1:2])
    if command in GONE:
        raise BadInput(f"cria {command} is gone; use {GONE[command]}")
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="cria", standalone_mode=False)
    except (SystemExit, Interrupted):
        raise
    except BaseException:
        if interrupts.asked():
            raise KeyboardInterrupt from None
        raise
    if code == interrupts.CODE:  # what typer makes of the exception; launch hands such a code on by itself
        raise KeyboardInterrupt
    return code
