"""Write the command that starts a recipe in several processes, as a person could type it, and run it."""

import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cria_tricks import recipes
from cria_tricks.common import interrupts
from cria_tricks.common.errors import BadInput, Lost, first_line, usable_path
from cria_tricks.hardware import this_device
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import given
from cria_tricks.store import run_folder

MACHINES = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint {endpoint} "
    "--rdzv-id {name} "
)
"""The beginning of a torchrun command for several machines, which may join and leave while it runs.

Each machine gets the same command. With the environment variable, every round of the rendezvous gets a store of its
own. Without it, a machine that joins a running torch 2.13 never learns the store's address, because the first agent
writes it in the first round only (``DynamicRendezvousHandler.next_rendezvous``).
"""


@dataclass(frozen=True)
class Elastic:
    """The settings for a run that survives lost processes, and machines that come and go.

    Attributes:
        max_restarts: how often the agent, torchrun on one machine, restarts its processes after one of them has failed.
        nodes: ``MIN:MAX`` machines, or one number; this machine alone when empty.
        endpoint: ``HOST:PORT`` at which the machines meet; HOST is one of them.
    """

    max_restarts: int = 0
    nodes: str = ""
    endpoint: str = ""


ONCE = Elastic()
"""One start, on this machine: a lost process ends the run."""


def command(
    recipe: str,
    processes: int | None = None,
    settings: Iterable[str] = (),
    out: Path | None = None,
    resume: bool = False,
    elastic: Elastic = ONCE,
) -> list[str]:
    """Check that a recipe can run in so many processes, and return the command that trains it, as a list of words.

    Args:
        recipe: a name or a TOML file.
        processes: number of processes on each machine. When left out, it is one per GPU, or two if there are no GPUs.
        settings: changes of the recipe, as for ``cria train``; several processes use ``ddp`` if none is named.
        out: folder to write.
        resume: whether to resume the run in that folder.
        elastic: how the run survives lost processes. Then the command always has ``--resume``, because a restarted
            process continues from the newest checkpoint.

    Raises:
        BadInput: for anything that would end all processes soon after their start.
    """
    changes = list(settings)
    given.recipe(recipe, changes)
    machines = _machines(elastic.nodes)
    wanted = with_settings(recipes.get(recipe), changes)
    # Imported here: it imports torch, which takes seconds, and wrong names are refused above without it.
    from cria_tricks.parallel.strategies import ELASTIC

    cards = _cards()
    if not processes:
        # strategy=model spreads one model over all GPUs, from a single process.
        processes = 1 if wanted.parallel.strategy == "model" else cards or 2
    if cards and processes > cards:
        raise BadInput(f"--nproc {processes}: this machine has {cards} cards, and a process has one for itself")
    if max(machines) * processes > 1 and wanted.parallel.strategy == "none":
        changes.append("parallel.strategy=ddp")
        wanted = with_settings(wanted, changes[-1:])
    # Among several machines a single process may be left. With an elastic strategy that is always a valid run, so it
    # needs no check.
    for number in machines:
        if len(machines) == 1 or number * processes > 1 or wanted.parallel.strategy not in ELASTIC:
            _refuse_unshared(wanted, number * processes)
    start, out, resume = _elastic(processes, wanted.name, elastic, out, resume)
    words = [*start, "-m", "cria_tricks", "train", recipe]
    for setting in changes:
        words += ["--set", setting]
    if out:
        words += ["--out", str(out)]
    if resume:
        words += ["--resume"]
    return words


def _machines(nodes: str) -> range:
    """Return the possible numbers of machines: ``"1:4"`` is 1 to 4, and nothing is this machine alone."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?", nodes or "1")
    machines = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not machines:
        raise BadInput(f"--nodes {nodes}: write how many machines at least and at most, such as 1:4")
    return machines


def _refuse_unshared(recipe: Recipe, processes: int) -> None:
    """Refuse a recipe that so many processes cannot share."""
    # Imported here, as above.
    from cria_tricks.load import refusals
    from cria_tricks.models.shape import facts_of
    from cria_tricks.resolve import resolve

    plan = resolve(recipe, processes=processes)
    if processes > plan.parallel["data"]:  # some processes train on the same rows, and divide the model
        refusals.refuse(plan, facts_of(find_shape(recipe.model)), processes)


def _elastic(
    processes: int, name: str, elastic: Elastic, out: Path | None, resume: bool
) -> tuple[list[str], Path | None, bool]:
    """Return the launcher's words, the folder, and whether to resume."""
    # --standalone: one machine, with a free port of its own, so that two runs do not disturb each other.
    start = ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
    if elastic == ONCE:
        return start, out, resume
    if elastic.nodes:
        if not (out and re.fullmatch(r"[\w.-]+:\d{1,5}", elastic.endpoint)):
            raise BadInput(
                "--nodes: needs --endpoint HOST:PORT, where the machines meet, and --out, a folder they share"
            )
        # These words take the place of the first two, "torchrun --standalone".
        start = [*MACHINES.format(nodes=elastic.nodes, endpoint=elastic.endpoint, name=name).split(), *start[2:]]
    elif elastic.endpoint:
        raise BadInput("--endpoint: is for --nodes MIN:MAX; on one machine torchrun finds a free port")
    elif not resume:
        out = usable_path("--out", out) if out else run_folder.numbered(Path("runs") / name, resume=False)
        there = run_folder.taken(out)
        if there:  # a restarted process could not tell that run from its own
            raise BadInput(f"--out {out}: holds another run ({there}); name a new folder, or go on with it: --resume")
    return [*start, "--max-restarts", str(elastic.max_restarts)], out, True


def run(words: list[str]) -> int:
    """Run the command in this process, by calling torchrun's main function.

    If a person types the command and a process fails, the launcher prints a long report and ends with exit code 1. Here
    only the error line of the process that failed is printed, and its exit code is returned.

    Args:
        words: the command, from :func:`command`.

    Returns:
        The exit code that the processes ended with.
    """
    # Imported here: torch takes seconds, and a command that is only printed does not need its errors.
    import torch.distributed.run
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    while "=" in words[0]:  # environment variables before the command, as in a shell
        name, _, value = words[0].partition("=")
        os.environ[name] = value
        words = words[1:]
    # The processes share the cores of the CPU.
    processes = int(words[words.index("--nproc-per-node") + 1])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # The process that fails prints its error itself, so the launcher's log is switched off.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    sys.argv = words
    try:
        torch.distributed.run.main()
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return max((code for code in codes if code > 0), default=1)  # a killed process has a negative one
    except SignalException:  # Ctrl-C or SIGTERM; the processes have printed already what is saved
        return interrupts.CODE
    except (RendezvousError, DistError) as error:
        raise Lost(f"the machines of this run did not meet, or lost each other ({first_line(error)})") from None
    return 0


def shown(words: list[str]) -> str:
    """Return the command as one line, quoted for a shell."""
    return shlex.join(words)


def _cards() -> int:
    """Count the CUDA GPUs of this machine."""
    if this_device().kind != "cuda":
        return 0
    # At the top this import would cost every command seconds; here this_device has imported torch already.
    import torch

    return torch.cuda.device_count()
