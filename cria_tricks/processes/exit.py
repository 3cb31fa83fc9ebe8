"""End a command that cannot continue: one of its processes prints the error, and all end with the same exit code."""

import contextlib
import os
import signal
import sys
import threading
import traceback
from typing import NoReturn

from cria_tricks.common import interrupts
from cria_tricks.common.errors import redacted
from cria_tricks.processes import numbers


def leave(sentence: str, code: int) -> NoReturn:
    """Print in one line why a command ends, and end it with an exit code."""
    _say(redacted(" ".join(sentence.split())) + "\n")
    _exit(code)


def leave_for_a_package(error: Exception) -> None:
    """End the command with one line and exit code 2 if an error is about a package that is missing or unusable."""
    from cria_tricks.common import packages  # needed after an error only

    unusable = packages.fault(error)
    if unusable:
        leave(f"error: {unusable}", 2)


def unforeseen() -> NoReturn:
    """Print the traceback of an unexpected error, with all access tokens hidden, and end with exit code 1.

    Call it in an ``except`` block. An unexpected error is a bug of ours, so the user needs the traceback to report it.
    """
    _say(redacted(traceback.format_exc()))
    _exit(1)


def _say(text: str) -> None:
    """Print the last words of a command, in one of its processes only."""
    interrupts.speaking()
    # As soon as one process has ended, a launcher sends signals to the others. We ignore them, so that each process can
    # print, and ends with the exit code of the error. Only the main thread may set signal handlers.
    if numbers.processes() > 1 and threading.current_thread() is threading.main_thread():
        for number in interrupts.heard():
            signal.signal(number, signal.SIG_IGN)
    if numbers.is_elected_to_speak():  # otherwise another process of the run prints
        with contextlib.suppress(OSError):  # the terminal, or the reader of a pipe, may be gone
            print(text, file=sys.stderr, end="", flush=True)


def _exit(code: int) -> NoReturn:
    """End this process; as one of several, without the libraries' exit functions."""
    if numbers.processes() > 1:
        os._exit(code)  # the exit functions would wait for processes that may be gone
    sys.exit(code)
