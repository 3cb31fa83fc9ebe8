"""Print a line on standard error every five seconds while a command works and prints nothing else."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from cria_tricks.common import interrupts

PATIENCE = 4.0
"""Seconds of silence before a line. A second less than promised, because a busy machine wakes the thread late."""


class Waiting:
    """Says what a command is doing when nothing else was printed for a while.

    Args:
        say: takes a line.
        clock: gives the time in seconds.

    Attributes:
        phases: what is being done, the innermost last.
        began: when the innermost one began, or was gone back to.
        printed: when something else was printed. A new phase is silent too, so it does not count here.
        said: when the last line was said.
    """

    def __init__(self, say: Callable[[str], Any], clock: Callable[[], float] = time.monotonic):
        self.say = say
        self.clock = clock
        self.phases: list[str] = []
        self.began = self.printed = self.said = clock()
        self.in_a_line = False
        self.paused = 0

    def tick(self) -> float:
        """Say a line if it is time.

        Returns:
            Seconds until the next one may be due.
        """
        now = self.clock()
        left = max(self.printed, self.said) + PATIENCE - now
        if self.paused or not self.phases or interrupts.is_speaking():
            return PATIENCE / 8  # nothing tells this thread when that is over, so it looks again soon
        if left > 0:
            return left
        # A progress bar leaves the cursor in its line; the sentence begins a new one.
        self.say("\n" * self.in_a_line + f"still {self.phases[-1]}, {now - max(self.began, self.printed):.0f} s\n")
        self.said = now
        self.in_a_line = False
        return PATIENCE

    def listen_to(self, stream: TextIO) -> None:
        """Notice whatever is printed to a stream, also by libraries and progress bars."""
        write = stream.write

        def noticed(text: str) -> int:
            self.printed = self.clock()
            self.in_a_line = not text.endswith("\n")
            return write(text)

        stream.write = noticed  # type: ignore[method-assign]


_waiting: Waiting | None = None


def start(what: str, streams: Iterable[TextIO]) -> None:
    """Begin to say what the command is doing; of several processes only rank 0 does.

    Args:
        what: the command, until :func:`doing` names something else.
        streams: where else is printed.
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
    """Name what is being done: ``"loading NAME"``."""
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
    """Say nothing: the user is asked for something, or another process speaks."""
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
    with contextlib.suppress(OSError):  # nobody may be there any more to read it
        os.write(2, line.encode(errors="backslashreplace"))
