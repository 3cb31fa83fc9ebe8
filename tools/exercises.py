"""What is done in a lesson's own kernel, before its first cell and after its last; see ``executed.py``."""

import socket
from typing import Any

from IPython.display import display

from cria_tricks import course
from cria_tricks.startup import end_at_once

MEASURED: list[list[str]] = []
"""What the lesson would measure on a card."""


def begin() -> None:
    """Refuse the network, and note what the lesson says of a GPU."""
    end_at_once()
    socket.socket.connect = socket.socket.connect_ex = _refuse  # type: ignore[method-assign, assignment]
    on_a_gpu = course.on_a_gpu

    def noted(bench: str, off: str, on: str, shorter: int = 1) -> None:
        MEASURED.append([bench, off, on])
        on_a_gpu(bench, off, on, shorter)

    course.on_a_gpu = noted


def answer(shell: Any, asked: dict[str, Any]) -> None:
    """Hand over what the checks say: of the exercises as they stand, and of each of the answers."""
    found = {"on a GPU": MEASURED, "as it stands": list(course.CHECKS)}
    for name, code in asked["answers"].items():
        course.CHECKS.clear()
        exec(code, shell.user_ns)
        for check in asked["checks"]:
            exec(check, shell.user_ns)
        found[name] = list(course.CHECKS)
    display({"application/json": found}, raw=True)


def _refuse(self: socket.socket, address: Any) -> None:
    raise AssertionError(f"a lesson went to {address}")
