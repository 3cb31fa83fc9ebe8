"""Find the process that the others of a hanging run wait for: py-spy reads their stacks from outside."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from cria_tricks.common.errors import BadInput

SHOWN = 4
"""How many frames of a stack are shown, the innermost first."""


@dataclass(frozen=True)
class Waiting:
    """Where the main thread of a process is.

    Attributes:
        process: the process id.
        rank: its rank, from its environment.
        frames: its innermost frames, each ``function (file:line)``.
        in_collective: whether it waits in a collective of ``torch.distributed``.
    """

    process: int
    rank: int
    frames: tuple[str, ...]
    in_collective: bool


def look(process_id: int) -> list[Waiting]:
    """Read where each process of a run on this machine is, by rank.

    Args:
        process_id: the id of the launcher, or of one of the processes.

    Raises:
        BadInput: if there is no such process or no py-spy, or if this user may not read another process.
    """
    spy = shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if spy is None:
        raise BadInput("--hang: needs py-spy, which reads the stack of a running process; pip install py-spy")
    try:
        asked = psutil.Process(process_id)
        if _rank(asked) is not None:  # one of the processes: the launcher above it has them all
            asked = asked.parent() or asked
        family = [asked, *asked.children(recursive=True)]
    except psutil.Error as error:
        raise BadInput(f"--hang {process_id}: {error}; take the id of the launcher or of a process of it") from None
    ranks = {one.pid: _rank(one) for one in family}
    found = [_stack(spy, each, rank) for each, rank in ranks.items() if rank is not None]
    if not found:
        raise BadInput(f"--hang {process_id}: has no process with a rank; take the id that started the run")
    return sorted(found, key=lambda one: one.rank)


def _rank(process: psutil.Process) -> int | None:
    """Return the rank of a process; ``None`` if it has none, or has ended."""
    try:
        return int(process.environ()["RANK"])
    except (KeyError, psutil.Error):
        return None


def _stack(spy: str, process_id: int, rank: int) -> Waiting:
    done = subprocess.run([spy, "dump", "--json", "--pid", str(process_id)], capture_output=True, text=True)
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise BadInput(f"--hang: py-spy may not read process {process_id} ({why}); run it as root, or with SYS_PTRACE")
    threads = json.loads(done.stdout)
    frames = next(thread["frames"] for thread in threads if thread["thread_name"] == "MainThread")
    named = tuple(f"{one['name']} ({Path(one['filename']).name}:{one['line']})" for one in frames[:SHOWN])
    return Waiting(process_id, rank, named, any("torch/distributed/" in one["filename"] for one in frames))


def verdict(found: list[Waiting]) -> str:
    """Say which ranks the others wait for."""
    away = [one.rank for one in found if not one.in_collective]
    there = [one.rank for one in found if one.in_collective]
    if not there:
        return "no process waits in a collective"
    if not away:
        return "all wait in a collective: in another one each, or for a process on another machine"
    return f"rank {_listed(there)} waits in a collective for rank {_listed(away)}, which never came there"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
