"""Train a recipe, in one function: from its name to the adapter and the report.

Checks run in stages, because torch takes seconds to import, and the libraries of Hugging Face take more. Each stage
imports its libraries only after the checks before it have passed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cria_tricks.recipe import Recipe, several

if TYPE_CHECKING:
    from rich.console import Console


def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    *,
    settings: Iterable[str] = (),
    resume: bool = False,
    other_base: bool = False,
    fit: str = "",
    may_change: Iterable[str] = (),
    console: "Console | None" = None,
) -> dict[str, Any]:
    """Train a recipe, and write its adapter and its report.

    Mistakes in the recipe or the data are found before a model is loaded. When a launcher starts several processes, all
    of them train one recipe together, by ``recipe.parallel.strategy``, and rank 0 writes the results.

    Args:
        recipe: a recipe, the name of one, or the path of a ``.toml`` file.
        out: the folder to write; ``runs/NAME`` (or the next free ``runs/NAME-2``, ...) when left out.
        settings: changes of the recipe, written as for ``--set``, e.g. ``["train.max_steps=20", "lr=1e-3"]``.
        resume: continue from the newest checkpoint in ``out``; start from the beginning if there is none.
        other_base: allow a resumed run, or one that continues from an adapter, another base model than before.
        fit: ``fastest``, ``smallest`` or ``longest``: train with the switches that :func:`plan` finds for this aim.
        may_change: as for :func:`plan`.
        console: where progress is shown; standard error when left out.

    Returns:
        The report, as written to ``report.json``; every process returns that of rank 0.

    Raises:
        BadInput: if something is wrong with the input. The message says what, and what would be right.
        Diverged: if the loss is not finite.
        Interrupted: if Ctrl-C or SIGTERM came; ``resume=True`` continues the run.
        Lost: if another process of the run died; ``resume=True`` continues the run.
        OutOfMemory: if the run does not fit. It says during what, and which switches would save how many bytes.

    Examples:
        >>> report = train("smoke", settings=["steps=2"])  # doctest: +SKIP
        >>> report["eval_loss_after"] < report["eval_loss_before"]  # doctest: +SKIP
        True
    """
    # It imports numpy, and importing this package should stay quick.
    from cria_tricks.run import given

    changes = several(settings)
    checked = given.recipe(recipe, changes)
    given.training(checked, out, resume, other_base)

    # These import torch.
    from cria_tricks.run import on_this_machine
    from cria_tricks.run.job import opened

    wanted = on_this_machine.recipe(recipe, changes, checked.model, fit, several(may_change), console)
    with opened(wanted, out, resume, other_base, console) as job:
        # These import transformers, peft and bitsandbytes.
        from cria_tricks.run import ready, results
        from cria_tricks.trainer import loop
        from cria_tricks.trainer.fit import summed_up

        ready.prepare(job)
        with ready.claimed(job):
            with ready.in_training(job) as run:
                loop.train(run)
            happened = summed_up(run)
            del run  # with the states of its optimizer, before the weights are gathered
            report = results.write(job, happened)
        return job.world.on_rank_zero(lambda: report)  # to each of several processes
