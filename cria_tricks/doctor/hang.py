"""Find the process that the others of a hanging run wait for: py-spy reads their stacks from outside.

On gloo a process waits inside the call of a collective, so its stack shows the wait. On NCCL a collective only starts
work on the card and returns. The process then waits at the next line that needs the result, for example a ``.item()``,
and its stack does not tell this from other work; torch's flight recorder does.
"""

import json
import linecache
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cria_tricks.common.errors import BadInput

SHOWN = 4
"""How many frames of a stack are shown, the innermost first."""
PATIENCE = 60.0
"""How long py-spy may take for one process [s]; it waits forever for one that the system does not let stop."""


@dataclass(frozen=True)
class Waiting:
    """Where the main thread of a process of a run is.

    Attributes:
        process: the process id.
        rank: its rank, from its environment.
        frames: its innermost frames, each ``function (file:line)``.
        in_collective: whether it waits for other processes: in a function of ``torch.distributed``, in a backward pass
            that sums gradients, or for a collective that it has started.
    """

    process: int
    rank: int
    frames: tuple[str, ...]
    in_collective: bool


def look(process_id: int) -> list[Waiting]:
    """Read where each process of a run on this machine is, in the order of their ranks.

    Args:
        process_id: the id of the launcher, or of one of the processes.

    Raises:
        BadInput: if there is no such process or no py-spy, if this user may not read another process, or if it cannot
            be read.
    """
    spy = shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if spy is None:
        raise BadInput("--hang: needs py-spy, which reads the stack of a running process; pip install py-spy")
    try:
        top = psutil.Process(process_id)
        while _numbers(top) and (parent := top.parent()):  # the launcher above the processes has them all
            top = parent
        numbers = {}
        parents = {}
        for one in (top, *top.children(recursive=True)):
            numbers[one.pid] = _numbers(one)
            parents[one.pid] = one.ppid()
    except psutil.Error as error:
        raise BadInput(f"--hang {process_id}: {error}; take the id of the launcher or of a process of it") from None
    found = []
    for number, here in numbers.items():
        # A process with its parent's numbers is a helper of it, such as a DataLoader's worker.
        if here and here != numbers.get(parents[number]):
            found.append(_stack(spy, number, here[0]))
    if not found:
        raise BadInput(f"--hang {process_id}: has no process with a rank; take the id that started the run")
    return sorted(found, key=lambda one: one.rank)


def _numbers(process: psutil.Process) -> tuple[int, str] | None:
    """Return the rank and the local rank of a process; ``None`` if it has no rank, or has ended."""
    try:
        environment = process.environ()
        return int(environment["RANK"]), environment.get("LOCAL_RANK", "")
    except (KeyError, ValueError, psutil.Error):
        return None


def _stack(spy: str, process_id: int, rank: int) -> Waiting:
    words = [spy, "dump", "--json", "--pid", str(process_id)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"--hang: process {process_id} (rank {rank}) did not let py-spy read it within {PATIENCE:.0f} s; it may "
            "wait for a disk or a network drive (state D in ps)"
        ) from None
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise BadInput(
            f"--hang: py-spy cannot read process {process_id} ({why}); if it still runs, run this as root, or with "
            "SYS_PTRACE"
        )
    # The main thread has the number of its process (on Linux). Only a process that has imported threading names it.
    threads = json.loads(done.stdout)
    main = [one for one in threads if process_id == one["os_thread_id"] or one["thread_name"] == "MainThread"]
    frames = main[0]["frames"] if main else []
    named = tuple(f"{one['name']} ({Path(one['filename']).name}:{one['line']})" for one in frames[:SHOWN])
    return Waiting(process_id, rank, named, bool(main) and _in_collective(frames, main[0]["active"]))


def _in_collective(frames: list[dict[str, Any]], active: bool) -> bool:
    """Tell from the frames of a thread, the innermost first, whether it waits for other processes.

    Args:
        frames: as py-spy writes them.
        active: whether the thread is running on a core.
    """
    if any("torch/distributed/" in one["filename"] for one in frames):
        return True
    if active or not frames:
        return False
    # DistributedDataParallel sums gradients inside the backward pass, in C++. A call of Work.wait has no frame of its
    # own; the line that makes it does. (Python's own wait functions are frames, so they are not the innermost line.)
    line = linecache.getline(frames[0]["filename"], frames[0]["line"])
    return frames[0]["name"] == "_engine_run_backward" or ".wait(" in line


def verdict(found: list[Waiting]) -> str:
    """Say which ranks the others wait for."""
    missing = [one.rank for one in found if not one.in_collective]
    waiting = [one.rank for one in found if one.in_collective]
    if not waiting:
        return "no process waits in a collective (on NCCL a stack does not show it; read the flight recorder)"
    if not missing:
        return "all wait in a collective: in different ones, or for a process that has ended or is on another machine"
    wait = "waits" if len(waiting) == 1 else "wait"
    return f"{_listed(waiting)} {wait} in a collective for {_listed(missing)}, which never came there"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
