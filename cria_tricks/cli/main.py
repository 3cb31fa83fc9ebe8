"""The whole command line, and how each foreseen error ends it."""

import contextlib
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import typer

from cria_tricks.cli.app import UsageError, app
from cria_tricks.common import interrupts, packages
from cria_tricks.common.errors import (
    BadInput,
    Diverged,
    Interrupted,
    Lost,
    OutOfMemory,
    is_out_of_memory,
    redacted,
)
from cria_tricks.load import quiet
from cria_tricks.processes import numbers

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
    "report": "cria bench, which writes report.md, or in a checkout python -m tools.figures --mine FILE --into FOLDER",
    "prepare": "cria train, which keeps the tokens of any data in a mapped file",
}
"""Commands that are gone, each with what does its work now."""
_NCCL = "NVIDIA's nccl-tests measure a link; the lesson on interconnects has a script that does so"
_MERGED = "cria export takes a whole model: cria merge writes it, and takes --base, --other-base and --offline"
_ONE_JOB = "cria launch --on hf-jobs sends one job, which --timeout ends"
INSTEAD = {
    "bench --minutes": "--short is predicted to take ten minutes on a T4, all of it an hour",
    "compare --page": "cria compare prints the tables, and each run's folder has a report.md",
    "compare --rows": "each run's eval/eval.json has its answers",
    "data --figure": "cria data FILE --json gives the numbers, and --show N the rows",
    "doctor --collectives": _NCCL,
    "doctor --hang": "py-spy dump --pid PID shows where a process waits; see the page When it hangs",
    "doctor --nproc": _NCCL,
    "export --base": _MERGED,
    "export --offline": _MERGED,
    "export --other-base": _MERGED,
    "export --to": "cria export writes GGUF files alone",
    "launch --attempts": _ONE_JOB,
    "launch --bucket": f"{_ONE_JOB}, and --repo says where the result goes",
    "launch --budget": f"{_ONE_JOB}; cria plan --gpu all says what an hour costs",
    "plan --advise": "it is --front",
    "plan --toggles": "it is --switches",
}
"""Options that commands had once, each with what does its work now."""


def main() -> None:
    """Run the command line; every foreseen error is one line on stderr and an exit code."""
    interrupts.now_saved(interrupts.NOTHING)
    quiet.plain()
    numbers.see_one_card()
    try:
        code = _run()
    except UsageError as error:
        instead = INSTEAD.get(_refused(error), "see cria --help")
        leave(f"error: {error.format_message().rstrip('.')}; {instead}", 2)
    except Diverged as error:
        leave(f"error: {error}", 1)
    except OutOfMemory as error:
        leave(f"error: {error}", 3)
    except Lost as error:
        leave(f"error: {error}; {numbers.go_on()}", 1)
    except Interrupted as error:
        leave(f"{error}; go on with {interrupts.resumed()}", interrupts.CODE)
    except (KeyboardInterrupt, typer.Abort):
        leave(interrupts.words(), interrupts.CODE)
    except Exception as error:
        _end(error)
    else:
        if code:
            sys.exit(code)


def _refused(error: Any) -> str:
    """Return the command and the option that an error of usage is about, such as ``plan --toggles``."""
    command = error.ctx.info_name if error.ctx else ""
    return f"{command} {getattr(error, 'option_name', '')}"


def _end(error: Exception) -> NoReturn:
    """End the command with one line about the package that an error is about, else about the error itself."""
    unusable = packages.fault(error)
    if unusable:
        leave(f"error: {unusable}", 2)
    if isinstance(error, BadInput):
        leave(f"error: {error}", 2)
    if is_out_of_memory(error):
        leave("error: out of memory", 3)
    # An unforeseen error is a bug of ours, so the user needs the traceback to report it.
    _say(redacted("".join(traceback.format_exception(error))))
    _exit(1)


def leave(sentence: str, code: int) -> NoReturn:
    """Print in one line why a command ends, and end it with an exit code."""
    _say(redacted(" ".join(sentence.split())) + "\n")
    _exit(code)


def _say(text: str) -> None:
    """Print the last words of a command, in one of its processes only."""
    if numbers.processes() > 1:
        # As soon as one process has ended, torchrun ends the others by a signal. Each shall still end with the exit
        # code of its own error, and one of them print it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    if numbers.is_elected_to_speak():
        with contextlib.suppress(OSError):  # the terminal, or the reader of a pipe, may be gone
            print(text, file=sys.stderr, end="", flush=True)


def _exit(code: int) -> NoReturn:
    """End this process; as one of several, without the libraries' exit functions."""
    if numbers.processes() > 1:
        os._exit(code)  # the exit functions would wait for processes that may be gone
    sys.exit(code)


def _run() -> int | None:
    """Run the command; the exit code of typer.Exit.

    Raises:
        BadInput: for a command that is gone, or if it cannot be told which process of a run this is.
        KeyboardInterrupt: on Ctrl-C, of which typer makes the exit code 130.
    """
    numbers.refuse_odd_numbers()
    command = "".join(sys.argv[1:2])
    if command in GONE:
        raise BadInput(f"cria {command} is gone; use {GONE[command]}")
    code = app(sys.argv[1:] or ["--help"], prog_name="cria", standalone_mode=False)
    if code == interrupts.CODE:
        raise KeyboardInterrupt
    return code
