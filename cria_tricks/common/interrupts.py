"""End a command on Ctrl-C, SIGTERM and SIGHUP with one line that says what is saved, and exit code 130.

The first signal raises ``KeyboardInterrupt``, so that half-written folders are removed and child processes end. The
next signal ends the process at once. While a library is imported, the first one does too: an exception inside an import
may come out as another one, get lost, or abort the process where the library's C++ code imports.

A command calls :func:`listen` before it imports anything else. Therefore this module imports only what Python has
loaded by itself; ``signal`` and ``typing`` would take longer than the rest of it.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn

CODE = 130
"""The exit code of an interrupted command."""
NOTHING = "nothing was written"


class _State:
    """What the signal handler needs to know.

    Attributes:
        saved: what is saved so far, in words.
        hasty: whether a signal ends the process at once, wherever it comes; a count, because blocks may be nested.
        asked: whether a signal has come.
        speaking: whether the last line is being written; nothing may cut it off.
        code: the exit code, once the last line is written.
        listening: whether the process is a command that handles the signals.
        first: whether this is the first process of a run, the one that speaks.
    """

    saved = NOTHING
    hasty = 0
    asked = speaking = listening = False
    code: int | None = None
    first = True


_state = _State()


def listen() -> None:
    """Handle the signals from now on, while imports run. Only a command calls this; importing the package does not."""
    sys.excepthook = _uncaught  # both first: the import below can be interrupted, too
    sys.unraisablehook = _unraisable
    _state.hasty = 1
    _state.listening = True
    _state.first = (os.environ.get("RANK") or "0") == "0"  # now, as the number is taken out of there later
    _install()
    atexit.register(_be_deaf)  # registered first, so it runs last


def _install() -> None:
    import signal

    for number in heard():
        signal.signal(number, _handle)


def heard() -> tuple[signal.Signals, ...]:
    """The signals to handle. An ignored SIGHUP, as nohup leaves it, stays ignored."""
    import signal

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AtOnce:
    """A block in which a signal ends the process at once, because nothing has to be put in order there."""

    def __enter__(self) -> None:
        _state.hasty += 1

    def __exit__(self, *error: object) -> None:
        _state.hasty -= 1


def begin() -> None:
    """Begin a command: nothing is saved, no signal has come, and the command's own modules are imported."""
    _state.saved = NOTHING
    _state.asked = _state.speaking = False
    _state.hasty = 0


def now_saved(sentence: str) -> None:
    """Keep what is saved by now, and how to go on, for the line of an interrupted command."""
    _state.saved = sentence


def asked() -> bool:
    """Whether a signal has come. Then it is the reason for whatever exception ends the command."""
    return _state.asked


def words() -> str:
    """The line of an interrupted command."""
    return f"interrupted; {_state.saved}"


def speaking() -> None:
    """Tell that the command's last line comes now. No later signal cuts it off or adds another."""
    _state.speaking = True


def is_speaking() -> bool:
    """Whether the command's last line is written, or being written."""
    return _state.speaking or _state.code is not None


def is_over(code: int) -> None:
    """Tell that everything is said: from here on a signal ends the process without a word, with this exit code.

    A launcher's signal handlers, which raise, are replaced.
    """
    _state.code = code
    if _state.listening:
        _install()


def end(code: int) -> NoReturn:
    """End the command with an exit code."""
    _state.code = code
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 (contextlib is among the imports that take longer)
            stream.flush()
        except (OSError, ValueError):  # nobody may be there any more to read it; Python would end with exit code 120
            pass
    if _state.asked:
        os._exit(code)  # at once: the libraries' exit functions may wait for threads, for example for an upload
    sys.exit(code)


def hung_up() -> None:
    """Redirect output to nowhere when its terminal is gone; as errors, the words would stop the save."""
    for number in range(3):
        try:
            is_device = os.fstat(number).st_mode & 0o170000 == 0o020000
            if is_device and not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)
        except OSError:
            pass


def _handle(number: int, frame: Any) -> None:
    import signal

    if number == signal.SIGHUP:
        hung_up()
    if _state.code is not None:
        os._exit(_state.code)
    if _state.speaking:
        return  # to the line that is being written
    if _state.asked or _state.hasty or _imports(frame):
        _end_at_once()
    _state.asked = True
    raise KeyboardInterrupt


def _imports(frame: Any) -> bool:
    """Whether an import is under way. Its frames are there, even if the library's C++ code is between them."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end_at_once() -> NoReturn:
    if _state.first and not _state.speaking:
        _state.speaking = True
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        try:  # noqa: SIM105 (the same)
            os.write(2, f"{cursor}{words()}\n".encode(errors="backslashreplace"))
        except OSError:  # nobody may be there any more to read it
            pass
    os._exit(CODE)


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Catch a signal that came between two lines of the entry itself."""
    if issubclass(kind, KeyboardInterrupt):
        _end_at_once()
    sys.__excepthook__(kind, error, trace)


def _unraisable(about: Any) -> None:
    """Catch a signal that came inside a destructor, where Python prints the traceback and goes on."""
    if isinstance(about.exc_value, KeyboardInterrupt):
        _end_at_once()
    if not _state.asked and _state.code is None:
        sys.__unraisablehook__(about)


def _be_deaf() -> None:
    """Ignore signals while Python takes its objects away, the handler among them."""
    import signal

    for number in heard():
        signal.signal(number, signal.SIG_IGN)
