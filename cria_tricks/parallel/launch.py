"""The command that starts a recipe in several processes: written out as a person could have typed it, then run."""

import importlib
import logging
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from cria_tricks import recipes
from cria_tricks.errors import BadInput
from cria_tricks.hardware import this_device
from cria_tricks.memory.shape import find_shape
from cria_tricks.parallel.tensor import refuse_undivided
from cria_tricks.recipe import with_settings
from cria_tricks.tricks import resolve

LAUNCHERS = {
    # --standalone: one machine, with a free port of its own, so that two runs do not meet.
    "torchrun": "torchrun --standalone --nproc-per-node {processes}",
    # What it would ask for, said. (--multi_gpu is its word for several processes; they may be on CPUs.)
    "accelerate": (
        "accelerate launch --multi_gpu --num_processes {processes} --num_machines 1 --main_process_port 0 "
        "--mixed_precision no --dynamo_backend no"
    ),
}
"""Who starts the processes. Both give each its number in the environment; the recipe decides everything else."""


def command(
    recipe: str,
    on: str,
    processes: int | None = None,
    settings: Iterable[str] = (),
    out: Path | None = None,
    resume: bool = False,
) -> list[str]:
    """Write the command that trains a recipe, once it is clear that it can run.

    Args:
        recipe: a name or a TOML file.
        on: of :data:`LAUNCHERS`.
        processes: how many; one a card when left out, two where there is none.
        settings: as for ``cria train``. Without a ``parallel.strategy`` several processes share the rows: ``ddp``.
        out: folder to write.
        resume: whether to go on.

    Raises:
        BadInput: for what would end all processes once they had started.
    """
    if on not in LAUNCHERS:
        raise BadInput(f"--on {on}: there are {', '.join(LAUNCHERS)}")
    wanted, given = with_settings(recipes.get(recipe), settings), list(settings)
    cards = _cards()
    processes = processes or (1 if wanted.parallel.strategy == "model" else cards or 2)
    if cards and processes > cards:
        raise BadInput(f"--nproc {processes}: this machine has {cards} cards, and a process has one for itself")
    if processes > 1 and wanted.parallel.strategy == "none":
        given.append("parallel.strategy=ddp")
        wanted = with_settings(wanted, given[-1:])
    plan = resolve(wanted, processes=processes)
    if (shares := processes // plan.parallel["data"]) > 1:
        shape = find_shape(wanted.model)
        refuse_undivided(shape.name, shape.heads, shape.kv_heads, shape.inner, shares)
    words = [*LAUNCHERS[on].format(processes=processes).split(), "-m", "cria_tricks", "train", recipe]
    for setting in given:
        words += ["--set", setting]
    return words + (["--out", str(out)] if out else []) + (["--resume"] if resume else [])


def run(words: list[str]) -> int:
    """Do what the command does, in this process: call the launcher's own entry.

    Typed by hand it ends with the launcher's report on its processes, and exit code 1. Here the line of the process
    that knew why stands alone.

    Args:
        words: of :func:`command`.

    Returns:
        The exit code that the processes ended with.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    module = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}[words[0]]
    main = importlib.import_module(module).main
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _processes(words))))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    sys.argv = words
    try:
        main()
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return max((code for code in codes if code > 0), default=1)  # killed ones have none of their own
    except SignalException:
        return 130
    return 0


def shown(words: list[str]) -> str:
    """The command as a shell takes it."""
    return shlex.join(words)


def _processes(words: list[str]) -> int:
    return next(int(word) for word in words if word.isdigit())


def _cards() -> int:
    if this_device().kind != "cuda":
        return 0
    import torch

    return torch.cuda.device_count()
