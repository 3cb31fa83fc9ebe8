"""Joined processes to try things with, from a notebook or a test: started once, they run one function after the other.

::

    with Ranks(2) as ranks:
        ranks.run(lambda: torch.distributed.get_rank())  # [0, 1]

Training is started by ``torchrun``; see ``launch.py``. A process takes seconds to import torch, so these stay. They
have one core each, no card, and gloo between them.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

import dill

SECONDS = 240.0
"""How long a process waits for another before it gives up."""
PATIENCE = 5.0
"""How long the others have to answer when one has failed."""

_ENDED = dill.dumps((True, "it has ended, and what it printed says why"))


class Ranks:
    """N joined processes.

    Args:
        size: how many.
    """

    def __init__(self, size: int):
        self.size = size
        self._open()

    def _open(self) -> None:
        port = _free_port()
        self.processes = [self._start(rank, port) for rank in range(self.size)]

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [sys.executable, "-m", "cria_tricks.parallel.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a notebook is not meant for them
            env={**os.environ, **{name: str(value) for name, value in (numbers | place).items()}},
        )

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` in every process; a function of a notebook goes there with what it uses.

        What cannot travel, a class of autograd, a function that torch has decorated or a module that is not installed,
        is imported or defined inside the function.

        Returns:
            What the processes return, by rank.

        Raises:
            RuntimeError: with the traceback of the first process that failed.
        """
        call = dill.dumps((function, arguments), recurse=True)
        for process in self.processes:
            assert process.stdin
            _write(process.stdin, call)
        answers: dict[int, Any] = {}
        pipes: dict[Any, int] = {process.stdout: rank for rank, process in enumerate(self.processes)}
        while len(answers) < self.size:
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            failed = next((rank for rank, (wrong, _) in answers.items() if wrong), None)
            ready, _, _ = select.select(waiting, [], [], None if failed is None else PATIENCE)
            if failed is not None and not ready:  # the others wait for what will never come
                break
            for pipe in ready:
                answers[pipes[pipe]] = dill.loads(_read(pipe) or _ENDED)
        if len(answers) < self.size or any(process.poll() is not None for process in self.processes):
            self.close()  # and take new ones, for whoever asks next
            self._open()
        for rank, (wrong, answer) in sorted(answers.items()):
            if wrong:
                raise RuntimeError(f"process {rank}: {answer}")
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _serve() -> None:
    """What a process does: read a function, call it, answer, until nobody asks any more."""
    ask, answer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints must not come between the answers
    import torch

    from cria_tricks.parallel import world

    torch.set_num_threads(1)
    with world.joined(SECONDS):
        while call := _read(ask):
            try:
                function, arguments = dill.loads(call)
                result = dill.dumps((False, function(*arguments)), recurse=True)
            except BaseException:
                result = dill.dumps((True, traceback.format_exc()))
            _write(answer, result)
        os._exit(0)  # the others may be gone already


def _write(pipe: IO[bytes], message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.write(struct.pack("<q", len(message)) + message)
        pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(8)
    return pipe.read(struct.unpack("<q", head)[0]) if len(head) == 8 else b""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _serve()
