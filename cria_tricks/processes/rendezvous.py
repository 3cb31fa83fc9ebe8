"""Agree on a name for the current launch, so that restarted processes do not read what earlier ones have left.

torchrun's agent outlives its workers and shares one TCPStore with all of them, restarted ones too. What a dead process
wrote into the store is still there, for example its address. A new process may read such a stale address before the new
one is written, and then it cannot connect; whether that happens is chance (pytorch issue 135712). The count in
``TORCHELASTIC_RESTART_COUNT`` cannot tell launches apart, because each agent counts only its own failures, and
processes that join or leave are no failure. So the processes agree on a new name, and everything else that they write
into the store has this name as its prefix.
"""

import time
import uuid
from typing import Any

from cria_tricks.common.errors import Lost

PAUSE = 0.02
"""Seconds for which a process sleeps before it reads the store again."""


def agree(store: Any, rank: int, size: int, timeout: float) -> str:
    """Agree with the other processes on a name for this launch, whatever earlier launches have left in the store.

    Process 0 writes a new name. Every other process writes a random token under the name that it reads, and process 0
    echoes all tokens under its new name. A process whose own token is in the echo knows that the name is the new one:
    an old echo cannot hold a token that was made just now. No process of an earlier launch may still run,
    because it could write a name or an echo of its own; torchrun stops the old workers before it starts new ones.

    Args:
        store: the launcher's store, from torch. Its ``get`` waits until somebody has set the key.
        rank: the rank of this process.
        size: the world size.
        timeout: how long a process other than 0 waits for process 0 [s].

    Raises:
        Lost: if process 0 does not answer in time. Where a ``get`` runs out of time, torch raises an error of its own,
            which :func:`cria_tricks.processes.world.in_one_line` turns into ``Lost``.
    """
    deadline = time.monotonic() + timeout
    token = uuid.uuid4().hex
    if rank == 0:
        name = token
        store.set("cria_tricks/round", name)
        tokens = [store.get(f"cria_tricks/{name}/{other}") for other in range(1, size)]  # waits for each of them
        store.set(f"cria_tricks/{name}/all", b" ".join(tokens))
        return name
    while time.monotonic() < deadline:
        name = store.get("cria_tricks/round").decode()
        store.set(f"cria_tricks/{name}/{rank}", token)
        if store.check([f"cria_tricks/{name}/all"]) and token.encode() in store.get(f"cria_tricks/{name}/all"):
            return name
        time.sleep(PAUSE)
    raise Lost("the first process of this run did not start")
