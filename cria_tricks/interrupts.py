"""What Ctrl-C, SIGTERM and SIGHUP do to a command: it ends in one line that says what is saved, with exit code 130.

The first signal raises ``KeyboardInterrupt``, so that half-written folders are taken away and child processes end. The
next one ends the process at once. So does the first one while libraries are imported: nothing is begun by then, and
an exception inside an import may come out as another one, or not at all.

This module imports only what Python has loaded by itself, because a command installs it before all else.
"""

import atexit
import os
import signal
import sys
from typing import Any, NoReturn

CODE = 130
"""The exit code of a command that was interrupted."""
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING = "nothing was written"


class _State:
    """What the handler needs to know.

    Attributes:
        saved: what is saved so far, in words.
        importing: whether a signal ends the process at once.
        asked: whether a signal has come.
        speaking: whether the last words are being written; nothing may cut them off.
        code: the exit code, once the last words are said.
    """

    saved = NOTHING
    importing = 0
    asked = speaking = False
    code: int | None = None


_state = _State()


class AtOnce:
    """A block in which a signal ends the process at once: nothing is written there, and exceptions may get lost."""

    def __enter__(self) -> None:
        _state.importing += 1

    def __exit__(self, *error: object) -> None:
        _state.importing -= 1


def listen() -> None:
    """Handle the signals from now on. Only a command does so; importing the package does not."""
    for number in heard():
        signal.signal(number, _handle)
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    atexit.register(_be_deaf)  # first of all, so it is called last


def heard() -> tuple[signal.Signals, ...]:
    """The signals to handle; an ignored SIGHUP, as nohup leaves it, stays ignored."""
    return tuple(n for n in NUMBERS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


def begin() -> None:
    """Forget an earlier command of this process."""
    _state.asked, _state.saved = False, NOTHING


def now_saved(sentence: str) -> None:
    """Say what is saved by now, and how to go on, for the line of an interrupted command."""
    _state.saved = sentence


def asked() -> bool:
    """Whether a signal has come. Then whatever exception ends the command, the signal is why."""
    return _state.asked


def words() -> str:
    """The line of an interrupted command."""
    return f"interrupted; {_state.saved}"


def speak(text: str) -> None:
    """Write the last words to standard error, whole; what comes after them ends the process without a word."""
    _state.speaking = True
    try:
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:  # nobody may be there any more to read it
        pass


def end(code: int) -> NoReturn:
    """End the command. From here a signal ends the process with the same code."""
    _state.code = code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    if _state.asked:
        os._exit(code)  # the libraries' farewells may wait, for threads that send files for example
    sys.exit(code)


def hung_up() -> None:
    """Let words for a terminal that is gone go nowhere; as errors they would stop the save."""
    for number in range(3):
        try:
            if not os.isatty(number) and os.fstat(number).st_mode & 0o170000 == 0o020000:  # a device, and no terminal
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)
        except OSError:
            pass


def _handle(number: int, frame: Any) -> None:
    if number == signal.SIGHUP:
        hung_up()
    if _state.code is not None:
        os._exit(_state.code)
    if _state.speaking:
        return
    if _state.asked or _state.importing:
        _end_at_once()
    _state.asked = True
    raise KeyboardInterrupt


def _end_at_once() -> NoReturn:
    if not _state.speaking and int(os.environ.get("RANK", 0)) == 0:  # one process of several speaks
        shown = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar may have hidden the cursor
        speak(f"{shown}{words()}\n")
    os._exit(CODE)


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A signal between two lines of the entry itself."""
    if issubclass(kind, KeyboardInterrupt):
        _end_at_once()
    sys.__excepthook__(kind, error, trace)


def _unraisable(about: Any) -> None:
    """A signal inside a destructor, where Python drops the exception and prints its traceback."""
    if isinstance(about.exc_value, KeyboardInterrupt):
        _end_at_once()
    if not _state.asked and _state.code is None:
        sys.__unraisablehook__(about)


def _be_deaf() -> None:
    """Everything is said and done; what is left takes Python's objects away, the handler among them."""
    for number in heard():
        signal.signal(number, signal.SIG_IGN)
