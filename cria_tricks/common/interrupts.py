"""End a command on Ctrl-C, SIGTERM and SIGHUP with one line that says what is saved, and exit code 130.

The first signal raises ``KeyboardInterrupt``, so that half-written folders are removed and child processes end. The
second signal ends the process at once. While a library is imported, even the first signal ends the process at once,
because an exception is not safe there: Python may turn it into another one or drop it, and C++ code that imports a
module may abort the process.

A command calls :func:`listen` before it imports anything else, so that it handles signals from the start. Therefore
this module must load fast. It imports only modules that Python has loaded already or that take almost no time.
``signal`` (which imports ``enum``) and ``typing`` would take longer than the rest of this module. So ``signal`` is
imported in the functions that use it. :func:`listen` sets the exception hooks first; so a Ctrl-C during the import of
``signal`` already ends the process without a traceback.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # type checkers take it for True, like typing.TYPE_CHECKING, which would need an import
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn

CODE = 130
"""The exit code of an interrupted command: 128 + 2, as shells report a process that SIGINT ended."""
NOTHING = "nothing was written"
"""What the last line of an interrupted command says before anything is saved."""


class _State:
    """The state that the signal handler reads.

    Attributes:
        saved: what is saved so far, as a sentence for the last line.
        hasty: if it is above 0, a signal ends the process at once. It counts, because :class:`AtOnce` blocks may nest.
        asked: whether a signal has raised ``KeyboardInterrupt``, that is, whether the user asked to stop.
        speaking: whether the last line is being written. From then on signals are ignored until ``code`` is set.
        listening: whether :func:`listen` was called, that is, whether this process is a command.
        code: the exit code, once everything is printed. From then on a signal ends the process with it.
        first: whether this is rank 0. If a signal ends all processes at once, only rank 0 prints the last line.
    """

    saved = NOTHING
    hasty = 0
    asked = speaking = listening = False
    code: int | None = None
    first = True


_state = _State()


def listen() -> None:
    """Handle signals from now on. Only a command calls this, as its first line; importing the package does not.

    Until :func:`begin` a signal ends the process at once, because the command's modules are being imported.
    """
    # The hooks come first, because a signal can also interrupt the import of signal in _install.
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    _state.hasty = 1
    _state.listening = True
    # Read RANK now: when the processes of a run join, world.py removes it from the environment.
    _state.first = (os.environ.get("RANK") or "0") == "0"
    _install()
    atexit.register(_ignore_signals)  # registered first, so it runs last


def _install() -> None:
    import signal

    for signal_number in heard():
        signal.signal(signal_number, _handle)


def heard() -> tuple[signal.Signals, ...]:
    """Return the signals to handle, without SIGHUP if it is ignored already: nohup starts a command that way."""
    import signal

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AtOnce:
    """A context manager in which the first signal ends the process at once, because there is nothing to clean up."""

    def __enter__(self) -> None:
        _state.hasty += 1

    def __exit__(self, *error: object) -> None:
        _state.hasty -= 1


def begin() -> None:
    """Reset the state before a command runs. Its modules are imported, so from now on a signal raises an exception."""
    _state.saved = NOTHING
    _state.asked = _state.speaking = False
    _state.hasty = 0


def now_saved(sentence: str) -> None:
    """Set what the last line of an interrupted command says: what is saved so far, and how to continue."""
    _state.saved = sentence


def asked() -> bool:
    """Return whether a signal asked the command to stop; if so, any exception that ends it is due to the signal."""
    return _state.asked


def words() -> str:
    """Return the last line of an interrupted command."""
    return f"interrupted; {_state.saved}"


def speaking() -> None:
    """Record that the command prints its last line now, so that no signal interrupts it or prints a second one."""
    _state.speaking = True


def is_speaking() -> bool:
    """Return whether the command's last line is printed, or being printed."""
    return _state.speaking or _state.code is not None


def is_over(code: int) -> None:
    """Record that everything is printed: from now on a signal ends the process silently, with this exit code.

    In a command, our signal handlers are installed again, because a launcher has replaced them by handlers that raise.
    """
    _state.code = code
    if _state.listening:
        _install()


def end(code: int) -> NoReturn:
    """Flush the output and end the command with an exit code."""
    _state.code = code
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 (contextlib is among the imports that take longer)
            stream.flush()
        except (OSError, ValueError):  # the reader is gone or the stream closed; Python itself would exit with 120
            pass
    if _state.asked:
        os._exit(code)  # skip the exit functions of libraries: they may wait for threads, for example for an upload
    sys.exit(code)


def hung_up() -> None:
    """Redirect stdin, stdout and stderr to /dev/null after SIGHUP, if they belonged to the terminal that is gone.

    Without this, each print would raise an ``OSError``, and a training run would end before it has written the
    checkpoint that it writes after a signal. Files and pipes stay.
    """
    for descriptor in range(3):
        try:
            is_device = os.fstat(descriptor).st_mode & 0o170000 == 0o020000  # a character device, as a terminal is
            if is_device and not os.isatty(descriptor):  # a terminal that is gone is no tty any more
                devnull = os.open(os.devnull, os.O_RDWR)
                os.dup2(devnull, descriptor)
                os.close(devnull)
        except OSError:
            pass


def _handle(signal_number: int, frame: Any) -> None:
    """Handle a signal: finish the last line, end the process at once, or raise ``KeyboardInterrupt``."""
    import signal

    if signal_number == signal.SIGHUP:
        hung_up()
    if _state.code is not None:
        os._exit(_state.code)
    if _state.speaking:
        return  # let the last line be finished
    if _state.asked or _state.hasty or _imports(frame):
        _end_at_once()
    _state.asked = True
    raise KeyboardInterrupt


def _imports(frame: Any) -> bool:
    """Return whether a module is being loaded, in this frame or in a caller.

    An exception is not safe there, above all if C++ code started the import (see the top of this file). An ``import``
    of a module that is loaded already runs other functions of that file; there it is safe.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def _end_at_once() -> NoReturn:
    """End the process without any clean-up. Before that, rank 0 prints the last line, unless it is printed already."""
    if _state.first and not _state.speaking:
        _state.speaking = True
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # show the cursor again, which a progress bar hides
        try:  # noqa: SIM105 (contextlib is among the imports that take longer)
            os.write(2, f"{cursor}{words()}\n".encode(errors="backslashreplace"))
        except OSError:  # the terminal or the reader of a pipe may be gone
            pass
    os._exit(CODE)


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Replace ``sys.excepthook``: a ``KeyboardInterrupt`` that no code caught ends the process without a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        _end_at_once()
    sys.__excepthook__(kind, error, trace)


def _unraisable(unraisable: Any) -> None:
    """Replace ``sys.unraisablehook``, which gets the exceptions that cannot propagate, such as those in destructors.

    A ``KeyboardInterrupt`` ends the process; Python would only print its traceback and continue. Other exceptions are
    printed as usual, unless the command was interrupted or has ended: then its last line stays the last.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end_at_once()
    if not _state.asked and _state.code is None:
        sys.__unraisablehook__(unraisable)


def _ignore_signals() -> None:
    """Ignore signals while Python shuts down, because it deletes the objects that the handler needs."""
    import signal

    for signal_number in heard():
        signal.signal(signal_number, signal.SIG_IGN)
