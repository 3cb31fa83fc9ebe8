"""Joined processes to try things with, from a notebook or a test: started once, they run one function after the other.

::

    with Ranks(2) as ranks:
        ranks.run(lambda: torch.distributed.get_rank())  # [0, 1]

Training is started by ``torchrun``; see ``launch/torchrun.py``. Torch and transformers take seconds to import, so the
first process does it and forks the others, and all of them stay. They have one core each, no GPU, and
gloo between them.
"""

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

SECONDS = 240.0
"""How long a process waits for another before it gives up, in seconds."""
PATIENCE = 2.0
"""How long the others have to answer when one has failed, in seconds."""

_ENDED = True, "it has ended, and what it printed says why"


class Ranks:
    """N joined processes.

    Args:
        size: how many.
    """

    def __init__(self, size: int):
        self.size = size
        self._open()

    def _open(self) -> None:
        pipes = [Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pipes]
        theirs = [end.fileno() for _, end in pipes]
        place = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self._first = subprocess.Popen(
            [sys.executable, "-m", "cria_tricks.course.processes", *map(str, theirs)],
            pass_fds=theirs,
            start_new_session=True,  # Ctrl-C in a notebook is not meant for them
            env={**os.environ, **place, "CUDA_VISIBLE_DEVICES": ""},
        )
        for _, end in pipes:
            end.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` in every process.

        The processes cannot import the notebook. So cloudpickle sends a notebook's function or class with its code and
        with copies of the variables that the code uses. Two functions that share a ``nonlocal`` variable get a copy
        each.

        Returns:
            What the processes return, by rank.

        Raises:
            RuntimeError: with the traceback of the first process that failed.
        """
        call = cloudpickle.dumps((function, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):
                pipe.send_bytes(call)
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            failed = any(wrong for wrong, _ in answers.values())
            patience = PATIENCE if failed else None
            ready = wait(waiting, patience)
            if not ready:  # the others wait for what will never come
                break
            answers |= {rank: _answer(pipe) for pipe, rank in waiting.items() if pipe in ready}
        if len(answers) < self.size or _ENDED in answers.values():
            self.close()  # and take new ones, for whoever asks next
            self._open()
        for rank, (wrong, answer) in sorted(answers.items()):
            if wrong:
                raise RuntimeError(f"process {rank}: {answer}")
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._first.pid, signal.SIGKILL)  # the first, and those it has forked
        self._first.wait()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _answer(pipe: Connection) -> Any:
    """Whether the call failed, and what it returned or the traceback."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return _ENDED


def _start(numbers: list[int]) -> None:
    """Import what takes long, fork, and serve with one end of a pipe each."""
    os.dup2(2, 1)  # what a function prints is not what a notebook shows
    import cria_tricks.trainer.shared  # noqa: F401

    gc.freeze()  # no collection of garbage goes through the libraries, or copies their pages for each process
    os.environ["MASTER_PORT"] = str(_free_port())  # only now: seconds later another program might have it
    rank = next((rank for rank in range(1, len(numbers)) if os.fork() == 0), 0)
    for other, number in enumerate(numbers):
        if other != rank:
            os.close(number)  # or nobody would see that the other has ended
    size = str(len(numbers))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    _serve(Connection(numbers[rank]))


def _serve(pipe: Connection) -> None:
    """What a process does: read a function, call it, answer, until nobody asks any more."""
    import torch

    from cria_tricks.processes import world

    torch.set_num_threads(1)
    with world.joined(SECONDS):
        while True:
            try:
                call = pipe.recv_bytes()
            except EOFError:
                os._exit(0)  # without a farewell: the others may be gone already
            try:
                function, arguments = pickle.loads(call)
                result = cloudpickle.dumps((False, function(*arguments)))
            except BaseException:
                result = cloudpickle.dumps((True, traceback.format_exc()))
            pipe.send_bytes(result)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _start(list(map(int, sys.argv[1:])))
