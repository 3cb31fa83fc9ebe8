"""Train a recipe, in one function: from the recipe to the adapter and the report."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import models
from cria_tricks.common.console import Aside
from cria_tricks.processes import numbers
from cria_tricks.processes import world as processes
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.run import given
from cria_tricks.run.allocator import ask_for_expandable_segments, keep_freed_memory
from cria_tricks.run.job import checked, look_at_files


def train(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    other_base: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train one recipe and write its adapter and report.

    Mistakes in the recipe or the data are found before any model is loaded. When a launcher starts several processes,
    all of them train one recipe together, by ``recipe.parallel.strategy``, and rank 0 writes the results.

    Args:
        recipe: what to train.
        out: the folder to write; ``runs/NAME`` (or the next free ``runs/NAME-2``, ...) when left out.
        resume: continue from the newest checkpoint in ``out``; start from the beginning if there is none.
        other_base: allow a resumed run, or one that continues from an adapter, another base model than before.
        console: where progress is shown; standard error when left out.

    Returns:
        The report, as written to ``report.json``.

    Raises:
        BadInput: if something is wrong with the input. The message says what, and what would be right.
        Diverged: if the loss is not finite.
        Interrupted: if Ctrl-C or SIGTERM came; ``resume=True`` continues the run.
        Lost: if another process of the run died; ``resume=True`` continues the run.
        OutOfMemory: if the run does not fit. It says during what, and which switches would save how many bytes.
    """
    began = time.perf_counter()
    given.trackers(recipe.train.report_to)
    recipe = recipe.model_copy(update={"model": models.anchored(recipe.model)})
    numbers.see_one_card()
    ask_for_expandable_segments(recipe)
    plan = resolve(recipe, processes=numbers.processes())
    with keep_freed_memory(plan.device), processes.joined(recipe.parallel.timeout):
        divided = {"pipeline": "stage", "context": "context"}.get(plan.parallel["strategy"], "tensor")
        world = World.of(plan.parallel["data"], plan.device.kind, divided)
        look_at_files(recipe.model)
        job = checked(recipe, plan, world, out, resume, other_base, console or Aside(), began)
        # the heavy libraries, only now: the errors above should not have to wait for them
        from cria_tricks.run import steps

        return steps.carry_out(job)
