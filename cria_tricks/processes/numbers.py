"""Find the rank and the world size of this process, and elect the process that prints the error of a run.

Before the processes join, the numbers come from the launcher's environment variables. After that, they come from
``torch.distributed``.

Importing this module does not import torch, because that takes seconds. Of its functions, only
:func:`is_elected_to_speak` may import torch: when a launcher has started several processes that have not joined yet.
"""

import os
import sys
from datetime import timedelta
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.common.interrupts import resumed

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
"""The environment variables in which a launcher tells a process its rank and the size of its group."""
_SPEAKER = "cria_tricks/speaker"
"""Key of a counter in the store, which the first process that asks finds at zero; see :func:`is_elected_to_speak`."""
LOST = "another process of this run died or stopped answering"
"""The error text of a run that has lost one of its processes."""
_store: Any = None
"""The store of the joined processes, set by :func:`keep`; ``None`` before they join."""


def processes() -> int:
    """Return the world size: the number of joined processes, or else ``WORLD_SIZE``, or 1 without a launcher."""
    if have_joined():
        import torch.distributed as dist

        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Return the rank of this process: in the joined group, or else ``RANK``, or 0 without a launcher."""
    if have_joined():
        import torch.distributed as dist

        return dist.get_rank()
    return _number("RANK", 0)


def _number(name: str, default: int) -> int:
    """Return the number in an environment variable, or the default if the variable is not set or is no number.

    It must not raise for a wrong value: the code that prints the error about that value asks for the rank, too.
    """
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def refuse_odd_numbers() -> None:
    """Refuse an environment variable of :data:`NUMBERS` that is set to something other than a whole number.

    Raises:
        BadInput: if there is such a variable. The message names the first one.
    """
    for name in NUMBERS:
        value = os.environ.get(name, "")
        if value and not value.isdecimal():
            raise BadInput(f"{name}={value}: must be a whole number, as a launcher such as torchrun sets it; unset it")


def see_one_card() -> None:
    """Make only its own GPU visible to a process of a launcher: the one at index ``LOCAL_RANK``.

    Call it before CUDA is initialized, because CUDA reads ``CUDA_VISIBLE_DEVICES`` only once.
    """
    if "LOCAL_RANK" not in os.environ:
        return
    local_rank = _number("LOCAL_RANK", 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # all GPUs are visible, with the indices 0, 1, ...
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
        return
    gpus = visible.split(",")
    # An empty variable hides all GPUs and stays as it is. A list that is too short for this local rank stays, too.
    if visible and local_rank < len(gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]


def is_elected_to_speak() -> bool:
    """Whether this process prints why the run ends: True for the first process that asks, False for all others.

    Several processes of a run often fail together, and the user should read one error instead of N. The processes count
    in the shared store how often this function was called. If the store cannot be reached, rank 0 prints.
    """
    if _store is None and processes() == 1:
        return True
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # restarted processes elect again
    try:
        return (_store or _launchers_store()).add(f"{_SPEAKER}/{restart}", 1) == 1
    except (RuntimeError, KeyError):  # the store's process is gone, or there are no MASTER_ADDR and MASTER_PORT
        return rank() == 0


def launched() -> bool:
    """Whether torchrun, or a launcher that is built on it, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def starts_again() -> bool:
    """Whether torchrun will restart the processes after a failure: it has restarts left."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def go_on() -> str:
    """Return the advice for an error message: how a run with checkpoints continues after a process was lost."""
    if starts_again():
        return "what was saved is whole: all are started again and go on from there"
    return f"what was saved is whole: go on with {resumed()}"


def _launchers_store() -> Any:
    """Connect to the launcher's key-value store, which exists before the processes join.

    Raises:
        KeyError: if ``MASTER_ADDR`` or ``MASTER_PORT`` is not set.
        RuntimeError: if no store answers within five seconds.
    """
    import torch.distributed as dist

    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=5))


def keep(store: Any) -> None:
    """Remember the store of the joining processes, for :func:`is_elected_to_speak`."""
    global _store
    _store = store


def have_joined() -> bool:
    """Whether this process has joined the others, that is, whether ``torch.distributed`` is initialized."""
    if "torch" not in sys.modules:  # joining needs torch, so it has not joined; importing torch here would take seconds
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
