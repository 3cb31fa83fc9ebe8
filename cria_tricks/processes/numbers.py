"""Tell the rank and the world size, by the launcher's variables or by the joined group, and which process speaks.

Nothing here imports torch before somebody else has.
"""

import os
import sys
from datetime import timedelta
from typing import Any

from cria_tricks.common.errors import BadInput

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
"""Variables by which a launcher tells a process which one it is."""
_SPEAKER = "cria_tricks/speaker"
LOST = "another process of this run died or stopped answering"
_store: Any = None


def processes() -> int:
    """Return the world size: of the processes that joined, or that a launcher says it has started."""
    if have_joined():
        import torch.distributed as dist

        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Return the rank of this process."""
    if have_joined():
        import torch.distributed as dist

        return dist.get_rank()
    return _number("RANK", 0)


def _number(name: str, alone: int) -> int:
    """A number that a launcher sets in the environment; also the words of an error ask for it."""
    said = os.environ.get(name, "")
    return int(said) if said.isdecimal() else alone


def refuse_odd_numbers() -> None:
    """Refuse an environment in which a launcher's number is none.

    Raises:
        BadInput: naming the variable.
    """
    for name in NUMBERS:
        said = os.environ.get(name, "")
        if said and not said.isdecimal():
            raise BadInput(f"{name}={said}: must be a whole number, as a launcher such as torchrun sets it; unset it")


def see_one_card() -> None:
    """Let a process that a launcher has started see only its own card. Call it before CUDA is first asked."""
    if "LOCAL_RANK" not in os.environ:
        return
    here = _number("LOCAL_RANK", 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # all cards are visible, and numbered from 0
        os.environ["CUDA_VISIBLE_DEVICES"] = str(here)
        return
    cards = visible.split(",")
    # An empty list hides all cards, and stays as it is; so does one that is too short for this process.
    if visible and here < len(cards):
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[here]


def is_elected_to_speak() -> bool:
    """Tell whether this process is the first to ask: of processes that end together, only that one says why."""
    if _store is None and processes() == 1:
        return True
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return (_store or _launchers_store()).add(f"{_SPEAKER}/{start}", 1) == 1
    except (RuntimeError, KeyError):  # the process that kept the store is gone, or there is none yet
        return rank() == 0


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def starts_again() -> bool:
    """Whether torchrun starts these processes anew when one of them has failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def go_on() -> str:
    """Say how a run with checkpoints goes on after it has lost a process."""
    if starts_again():
        return "what was saved is whole: all are started again and go on from there"
    return "what was saved is whole: go on with --resume"


def _launchers_store() -> Any:
    """Connect to the store that torchrun keeps for its processes, also before they have joined."""
    import torch.distributed as dist

    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=5))


def keep(store: Any) -> None:
    """Remember the store of the processes that join, for :func:`is_elected_to_speak`."""
    global _store
    _store = store


def have_joined() -> bool:
    """Whether this process has joined the others."""
    if "torch" not in sys.modules:  # nobody can have joined, and the question should not cost its import
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
