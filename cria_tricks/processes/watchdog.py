"""Watch whether the other processes of a run on this machine are still alive, and end this one if they are not."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from cria_tricks.processes.exit import leave
from cria_tricks.processes.numbers import LOST

PATIENCE = 20.0
"""Seconds that a process has to notice that another is gone; torchrun's patience is 30."""


def find(store: Any, rank: int, size: int) -> list[int]:
    """List the process ids of the run's other processes on this machine; each process tells its own in the store."""
    here = socket.gethostname()
    store.set(f"place/{rank}", f"{here} {os.getpid()}")
    places = [store.get(f"place/{other}").decode().split() for other in range(size) if other != rank]
    return [int(process_id) for host, process_id in places if host == here]


@contextlib.contextmanager
def watched(others: list[int], advice: str) -> Iterator[None]:
    """End this process if another has died and its own main thread does not notice.

    Now and then gloo leaves a collective waiting for a process that is gone, and in there Python hears no signal: the
    launcher would kill it, without a word, 30 s later.

    Args:
        others: their process ids.
        advice: what is said beside the fact.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            if any(map(_gone, others)):
                # The main thread usually notices by itself, and has more to say.
                if not over.wait(PATIENCE):
                    leave(f"error: {LOST}; {advice}", 1)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _gone(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
