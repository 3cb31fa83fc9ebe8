"""Start several joined processes from a notebook or a test, and run one function after the other in all of them.

::

    with Ranks(2) as ranks:
        ranks.run(lambda: torch.distributed.get_rank())  # [0, 1]

This is for experiments; training is started by ``torchrun``, see ``launch/torchrun.py``. Importing torch and
transformers takes seconds. So the first process imports them once, forks the others, and all of them stay. Each has one
thread and no GPU. They communicate by gloo. ``Ranks(2, cards=True)`` gives each process a GPU of its own; they
communicate by nccl.
"""

import contextlib
import gc
import os
import pickle
import random
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
"""How long a process waits for another one in a collective before it gives up [s]."""
PATIENCE = 2.0
"""How long the other processes may take to answer after one has failed [s]."""

_ENDED = True, "it has ended, and what it printed says why"
"""The answer of a process that has ended: it failed, and why."""


class Ranks:
    """Run functions in N joined processes, which stay until :meth:`close`.

    Args:
        size: the number of processes, N.
        cards: whether process r gets the machine's GPU number r; without it, no process sees a GPU.
    """

    def __init__(self, size: int, *, cards: bool = False):
        self.size = size
        self.cards = cards
        self._started: list[subprocess.Popen[bytes]] = []
        self._open()

    def _open(self) -> None:
        pipes = [Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pipes]
        theirs = [end.fileno() for _, end in pipes]
        if self.cards:
            # Not forked: a process that has looked for a GPU cannot be, and importing our libraries looks for one.
            port = str(free_port())
            for rank, number in enumerate(theirs):
                place = _numbers(rank, self.size) | {"MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": _card(rank)}
                self._begin(place, "--alone", number)
        else:
            self._begin({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, *theirs)
        for _, end in pipes:
            end.close()

    def _begin(self, place: dict[str, str], *words: str | int) -> None:
        """Start a process that serves the pipe ends whose numbers are among these words."""
        started = subprocess.Popen(
            [sys.executable, "-m", "cria_tricks.course.processes", *map(str, words)],
            pass_fds=[word for word in words if isinstance(word, int)],
            start_new_session=True,  # so Ctrl-C in a notebook does not reach them
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", **place},
        )
        self._started.append(started)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` in every process.

        The processes cannot import the notebook. So cloudpickle sends a notebook's function or class with its code and
        with copies of the variables that the code uses. Two functions that share a ``nonlocal`` variable get a copy
        each.

        Returns:
            The results, by rank.

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
            if not ready:  # the others may wait for a collective in which the failed process will never take part
                break
            answers |= {rank: _answer(pipe) for pipe, rank in waiting.items() if pipe in ready}
        if len(answers) < self.size or _ENDED in answers.values():
            self.close()  # processes that hang or are gone are replaced, so that the next call works
            self._open()
        for rank, (wrong, answer) in sorted(answers.items()):
            if wrong:
                raise RuntimeError(f"process {rank}: {answer}")
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for started in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # the process, and those that it has forked
            started.wait()
        self._started.clear()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _answer(pipe: Connection) -> Any:
    """Read a process's answer: whether the call failed, and its result or its traceback."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return _ENDED


def _start(numbers: list[int], *, alone: bool) -> None:
    """Import the slow libraries, fork the other processes, and serve calls in each.

    Args:
        numbers: file descriptors of the processes' pipe ends, by rank.
        alone: fork no others, because each was started by itself and knows its rank; then ``numbers`` has one.
    """
    os.dup2(2, 1)  # send prints to standard error, so that they do not mix with the notebook's own output
    import cria_tricks.trainer.loop  # noqa: F401

    if alone:
        _serve(Connection(numbers[0]))
        return
    # A garbage collection writes into the objects it visits, so each process would get its own copy of their memory.
    gc.freeze()
    # Chosen after the slow imports, because another program could take the port in the meantime.
    os.environ["MASTER_PORT"] = str(free_port())
    # fork returns 0 in a new process, which leaves the loop with its rank. The first process has rank 0.
    rank = next((rank for rank in range(1, len(numbers)) if os.fork() == 0), 0)
    for other, number in enumerate(numbers):
        if other != rank:
            os.close(number)  # a pipe reports that a process has ended only when all copies of its end are closed
    os.environ |= _numbers(rank, len(numbers))
    _serve(Connection(numbers[rank]))


def _numbers(rank: int, size: int) -> dict[str, str]:
    """Return the environment variables by which a process learns its rank, as a launcher sets them.

    A single process gets none: with them accelerate would make a process group of one on a GPU.
    """
    if size == 1:
        return {}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}


def _card(rank: int) -> str:
    """Return the GPU of a process: the one at this place among those that the notebook sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(rank) if visible is None else visible.split(",")[rank]


def _serve(pipe: Connection) -> None:
    """Join the processes, then read calls from the pipe and answer them until the notebook closes the pipe."""
    import torch

    from cria_tricks.processes import world

    torch.set_num_threads(1)
    with world.joined(SECONDS):
        while True:
            try:
                call = pipe.recv_bytes()
            except EOFError:
                os._exit(0)  # a clean exit would wait for the other processes, which may be gone already
            try:
                function, arguments = pickle.loads(call)
                result = cloudpickle.dumps((False, function(*arguments)))
            except BaseException:
                result = cloudpickle.dumps((True, traceback.format_exc()))
            pipe.send_bytes(result)


def free_port() -> int:
    """Return a TCP port that is free now.

    It is below the range from which the system takes ports for connections, because such a port could be taken before
    the first process listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # Linux takes others from 32768 on, macOS from 49152 on
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    _start([int(word) for word in sys.argv[1:] if word != "--alone"], alone="--alone" in sys.argv)
