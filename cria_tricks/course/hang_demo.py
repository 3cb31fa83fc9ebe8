"""Two processes share a training, and one of them waits for rows that never come: a hang to look at.

``with hanging(folder, seconds) as processes:`` starts both and ends them. The lesson on monitoring looks at them from
outside. In each process a thread keeps writing what torch's flight recorder
holds, because the main thread of a process that hangs writes nothing. Only the two processes import torch: the program
that starts them does not need it.
"""

import contextlib
import datetime
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cria_tricks.common.atomic_files import write_file
from cria_tricks.course.processes import free_port

HANGS = 3
"""The step in which rank 1 waits, from 0."""


@contextlib.contextmanager
def hanging(folder: Path, seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes, of which rank 1 will hang, and end them at the end of the block.

    Args:
        folder: where they write.
        seconds: how long rank 0 waits in a collective [s].
    """
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", __name__, str(folder), str(seconds)]
    recorder = {"TORCH_FR_BUFFER_SIZE": "100", "CUDA_VISIBLE_DEVICES": ""}
    started = []
    for rank in range(2):
        environment = {**os.environ, **place, **recorder, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def recorded(folder: Path, processes: Sequence[subprocess.Popen[str]], patience: float = 240.0) -> list[dict[str, Any]]:
    """Wait until the two hang, and return what the flight recorder of each holds, by rank.

    Args:
        folder: where they write.
        processes: the two, as :func:`hanging` gives them.
        patience: how long to wait [s].

    Raises:
        ChildProcessError: if one of them ends before.
        TimeoutError: if they do not hang in time.
    """
    paths = [folder / f"flight_{rank}.json" for rank in range(2)]
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if all(path.exists() for path in paths):
            found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            # Rank 0 has begun one collective more, and both have ended all before it; the barrier at the start is one.
            if list(map(counts, found)) == [(HANGS + 2, HANGS + 1), (HANGS + 1, HANGS + 1)]:
                return found
        for rank, process in enumerate(processes):
            if process.poll() is not None:
                said = process.stderr.read().strip() if process.stderr else ""
                raise ChildProcessError(f"rank {rank} ended with exit code {process.returncode}: {said}")
        time.sleep(0.1)
    raise TimeoutError(f"the processes did not hang within {patience:.0f} s")


def counts(recorded: dict[str, Any]) -> tuple[int, int]:
    """Return how many collectives a process has begun and ended, by its flight recorder.

    The recorder also has ``last_completed_collective``. It is not reliable: two threads of gloo write it, so an earlier
    collective can overwrite a later one.
    """
    entries = recorded["entries"]
    return len(entries), sum(entry["retired"] for entry in entries)


def next_rows(rank: int, step: int) -> Any:
    """Return the rows of a step; rank 1 waits for those of one step forever."""
    import torch

    if (rank, step) == (1, HANGS):
        queue.SimpleQueue().get()  # nobody puts anything in
    return torch.full((1000,), float(step))


def train(rank: int) -> None:
    """Sum something over both processes, once a step."""
    import torch.distributed as dist

    for step in range(10):
        rows = next_rows(rank, step)
        dist.all_reduce(rows)


def _record(folder: Path, rank: int) -> None:
    """Write what the flight recorder holds, again and again."""
    import torch

    recorder: Any = torch._C._distributed_c10d
    while True:
        text = recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
        write_file(folder / f"flight_{rank}.json", text.decode())
        time.sleep(0.3)


def _main(folder: Path, seconds: float) -> None:
    import torch.distributed as dist

    from cria_tricks.common.errors import Lost
    from cria_tricks.processes import world

    rank = int(os.environ["RANK"])
    try:
        with world.joined(240):
            dist.barrier()  # both have come, however slowly; from here on they wait only as long as asked
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))
            threading.Thread(target=_record, args=(folder, rank), daemon=True).start()
            train(rank)
    except Lost as error:
        print(f"error: {error}; what was saved is whole: go on with --resume", file=sys.stderr, flush=True)
        os._exit(1)  # the libraries' exit functions would wait for the process that hangs


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
