"""Agree on a name for the current launch, so that restarted processes do not read what earlier ones have left.

torchrun's agent outlives its workers and shares one TCPStore with all of them, restarted ones too. What a dead process
wrote there is still there, its address for example. A new process that reads a stale address connects to nobody
(pytorch issue 135712: by chance it works). The count in ``TORCHELASTIC_RESTART_COUNT`` cannot tell launches apart,
because each agent counts its own failures, and a change of members is none. So the processes agree on a new name, and
everything else that they write into the store has this name as its prefix.
"""

import time
import uuid
from typing import Any

from cria_tricks.common.errors import Lost

PAUSE = 0.02
"""Seconds between two looks at the store."""


def agree(store: Any, rank: int, size: int, timeout: float) -> str:
    """Agree with the other processes on a name for this launch, whatever earlier launches have left in the store.

    Process 0 writes a new name. Every other process writes a random token under the name that it reads, and process 0
    echoes all tokens under its new name. A process whose own token is in the echo knows that the name is the new one:
    an old echo cannot hold a token that was made just now. The processes of earlier launches must be gone by then,
    which the launcher sees to.

    Args:
        store: torch's, of the launcher.
        rank: of this process.
        size: how many processes there are.
        timeout: after which a process gives up [s].

    Raises:
        Lost: if some process does not come.
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
