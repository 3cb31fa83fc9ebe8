"""Processes that stay: started once a session, they run one function after the other, joined by gloo.

A process takes seconds to import the libraries, so no test starts its own. What they run must be a module's function,
and what it is given and returns must pickle.
"""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

SECONDS = 240


class Ranks:
    """N joined processes of one core each."""

    def __init__(self, size: int):
        self.size, port = size, _free_port()
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` in every process; what they return, by rank.

        Raises:
            AssertionError: with the traceback of the first rank that failed.
        """
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(SECONDS), f"rank {rank} gave no answer within {SECONDS} s"
            answers.append(pipe.recv())
        for rank, (failed, answer) in enumerate(answers):
            assert not failed, f"rank {rank}: {answer}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    import torch

    torch.set_num_threads(1)
    from cria_tricks.parallel import world

    with world.joined(timeout=SECONDS):
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((False, function(*arguments)))
            except BaseException:
                pipe.send((True, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
