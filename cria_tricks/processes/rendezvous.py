"""Which start of its processes this is: a launcher that restarts them keeps its store, and all that was said in it.

torchrun's agent outlives its workers and shares one TCPStore with all of them, restarted ones too. What the dead wrote
there, the addresses they listened at for instance, is still there, and a new process that reads it first connects to
nobody (pytorch issue 135712: by chance it works). The count in ``TORCHELASTIC_RESTART_COUNT`` does not tell rounds
apart: each agent counts its own failures, and a change of members is none. So the processes agree on a name for the
round, and all else they say is said under it.
"""

import time
import uuid
from typing import Any

from cria_tricks.common.errors import Lost

PAUSE = 0.02
"""Seconds between two looks at the store."""


def agree(store: Any, number: int, size: int, timeout: float) -> str:
    """Name this round, in all of its processes, whatever earlier ones have left in the store.

    The first process writes a new name and waits until each of the others has put a word of its own under it; then it
    repeats these words. The others put their word under whatever name they find, and go on under the one whose words
    hold theirs: an old name's cannot, for a word is made anew each time. It needs the processes of earlier rounds to be
    gone, which a launcher sees to.

    Args:
        store: torch's, of the launcher.
        number: of this process.
        size: how many there are.
        timeout: seconds after which a process gives up.

    Raises:
        Lost: if some process does not come.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if number == 0:
        store.set("cria_tricks/round", word)
        store.set(f"cria_tricks/{word}/all", b" ".join(store.get(f"cria_tricks/{word}/{n}") for n in range(1, size)))
        return word
    while time.monotonic() < deadline:
        name = store.get("cria_tricks/round").decode()
        store.set(f"cria_tricks/{name}/{number}", word)
        if store.check([f"cria_tricks/{name}/all"]) and word.encode() in store.get(f"cria_tricks/{name}/all"):
            return name
        time.sleep(PAUSE)
    raise Lost("the first process of this run did not start")
