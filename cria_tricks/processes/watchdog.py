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
"""Seconds in which the main thread must notice by itself that another process is gone; torchrun kills after 30."""


def find(store: Any, rank: int, size: int) -> list[int]:
    """List the process ids of the run's other processes on this machine.

    Every process writes its host name and its process id into the store, and reads those of the others.

    Args:
        store: the store of the joined processes.
        rank: the rank of this process.
        size: the world size.
    """
    here = socket.gethostname()
    store.set(f"place/{rank}", f"{here} {os.getpid()}")
    places = [store.get(f"place/{other}").decode().split() for other in range(size) if other != rank]
    return [int(process_id) for host, process_id in places if host == here]


@contextlib.contextmanager
def watched(others: list[int], advice: str) -> Iterator[None]:
    """End this process if another one has died and this one's main thread does not notice it.

    Sometimes a collective of gloo keeps waiting for a process that is gone. While it waits, Python does not handle
    signals, so the launcher would kill this process 30 s later, and the user would read no error message.

    Args:
        others: the process ids of the others on this machine.
        advice: what was saved, and how to continue; it ends the error message.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            if any(map(_gone, others)):
                # The main thread usually notices the loss by itself, and its error message says more.
                if not over.wait(PATIENCE):
                    leave(f"error: {LOST}; {advice}", 1)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _gone(process_id: int) -> bool:
    """Whether a process has ended; a zombie has, but its parent has not yet read its exit code."""
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
