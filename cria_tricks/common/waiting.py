"""Print a line on standard error every five seconds while a command is working but prints nothing else."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from cria_tricks.common import interrupts

PATIENCE = 4.0
"""Seconds without output before a line is printed: one less than five, because a busy machine wakes threads late."""


class Waiting:
    """Print what a command is doing when nothing else was printed for a while.

    Args:
        say: prints a text.
        clock: returns the time [s].

    Attributes:
        phases: what the command is doing, from the outermost phase to the innermost.
        began: when the innermost phase began, or when it became the innermost again.
        printed: when anything else was printed last. The beginning of a phase prints nothing, so it does not count.
        said: when :meth:`tick` printed its last line.
        in_a_line: whether the last output did not end its line, as a progress bar's.
        paused: if it is above 0, nothing is printed. It counts, because :func:`paused` blocks may nest.
    """

    def __init__(self, say: Callable[[str], Any], clock: Callable[[], float] = time.monotonic):
        self.say = say
        self.clock = clock
        self.phases: list[str] = []
        self.began = self.printed = self.said = clock()
        self.in_a_line = False
        self.paused = 0

    def tick(self) -> float:
        """Print a line if it is time.

        Returns:
            Seconds after which to call this again.
        """
        now = self.clock()
        left = max(self.printed, self.said) + PATIENCE - now
        if self.paused or not self.phases or interrupts.is_speaking():
            return PATIENCE / 8  # nothing wakes this thread when the pause is over, so it checks again soon
        if left > 0:
            return left
        # A progress bar leaves the cursor in its line, so begin a new one.
        self.say("\n" * self.in_a_line + f"still {self.phases[-1]}, {now - max(self.began, self.printed):.0f} s\n")
        self.said = now
        self.in_a_line = False
        return PATIENCE

    def listen_to(self, stream: TextIO) -> None:
        """Replace a stream's ``write``, to notice whatever libraries and progress bars print there."""
        write = stream.write

        def noticed(text: str) -> int:
            self.printed = self.clock()
            self.in_a_line = not text.endswith("\n")
            return write(text)

        stream.write = noticed  # type: ignore[method-assign]


_waiting: Waiting | None = None


def start(what: str, streams: Iterable[TextIO]) -> None:
    """Start the thread that prints the lines; of several processes only rank 0 starts it.

    Args:
        what: what the lines name outside of :func:`doing`: the command.
        streams: where other output is printed; any output there postpones the next line.
    """
    global _waiting
    if (os.environ.get("RANK") or "0") != "0":
        return
    _waiting = Waiting(_to_stderr)
    _waiting.phases.append(what)
    for stream in streams:
        _waiting.listen_to(stream)
    threading.Thread(target=_tick, args=(_waiting,), daemon=True, name="waiting").start()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Name a phase for the lines that are printed in it: ``"loading NAME"``."""
    waiting = _waiting
    if waiting is None:
        yield
        return
    waiting.phases.append(what)
    waiting.began = waiting.clock()
    try:
        yield
    finally:
        waiting.phases.pop()
        waiting.began = waiting.clock()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Print no line inside: the user is asked for input, or another process prints."""
    waiting = _waiting
    if waiting is None:
        yield
        return
    waiting.paused += 1
    try:
        yield
    finally:
        waiting.paused -= 1
        waiting.printed = waiting.clock()


def _tick(waiting: Waiting) -> None:
    while True:
        time.sleep(waiting.tick())


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal or the reader of a pipe may be gone
        os.write(2, line.encode(errors="backslashreplace"))
