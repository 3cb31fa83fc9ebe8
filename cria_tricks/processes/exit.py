"""End a command that cannot go on: one of its processes prints one line, and all end with the same exit code."""

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
    """Say why a command ends, and end it."""
    _say(redacted(" ".join(sentence.split())) + "\n")
    _exit(code)


def unforeseen() -> NoReturn:
    """Print the traceback of a bug of ours, without any token that it may quote, and end with exit code 1."""
    _say(redacted(traceback.format_exc()))
    _exit(1)


def _say(text: str) -> None:
    interrupts.speaking()
    if numbers.processes() > 1 and threading.current_thread() is threading.main_thread():
        for number in interrupts.heard():
            signal.signal(number, signal.SIG_IGN)  # a launcher ends the others as soon as one has died
    if numbers.is_elected_to_speak():  # else another process of the run has said it
        with contextlib.suppress(OSError):  # nobody may be there any more to read it
            print(text, file=sys.stderr, end="", flush=True)


def _exit(code: int) -> NoReturn:
    if numbers.processes() > 1:
        os._exit(code)  # at once: the libraries' farewells would wait for processes that may be gone
    sys.exit(code)
