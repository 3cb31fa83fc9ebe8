"""Recipe -> Report + adapter: the whole way, in one function."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import models
from cria_tricks.common.console import Aside
from cria_tricks.common.startup import importing
from cria_tricks.processes import numbers
from cria_tricks.processes import world as processes
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.run import given
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

    Everything that can be wrong with the recipe or the data is found before any model is loaded. Started by a launcher
    in several processes, it trains one recipe in all of them, by ``recipe.parallel.strategy``; the first one writes.

    Args:
        recipe: what to train.
        out: folder to write; ``runs/NAME`` (or the next free ``runs/NAME-2``, ...) when left out.
        resume: go on from the newest checkpoint in ``out``; from the beginning when there is none.
        other_base: let a resumed run go on over another base than it began over.
        console: where progress is shown; standard error when left out.

    Returns:
        The report, as written to ``report.json``.

    Raises:
        BadInput: naming what is wrong and what would be right.
        Diverged: if the loss is not finite.
        Interrupted: if Ctrl-C or SIGTERM came; ``resume=True`` goes on.
        Lost: if another process of the run died; ``resume=True`` goes on.
        OutOfMemory: naming what it was doing, and which toggles would save how many bytes.
    """
    began = time.perf_counter()
    given.trackers(recipe.train.report_to)
    recipe = recipe.model_copy(update={"model": models.anchored(recipe.model)})
    numbers.see_one_card()
    plan = resolve(recipe, processes=numbers.processes())
    with processes.joined(recipe.parallel.timeout, numbers.go_on()):
        divided = "stage" if plan.parallel["strategy"] == "pipeline" else "tensor"
        world = World.of(plan.parallel["data"], plan.device.kind, divided)
        look_at_files(recipe.model)
        job = checked(recipe, plan, world, out, resume, other_base, console or Aside(), began)
        with importing():  # only now the heavy libraries: what was wrong so far took a second to say
            from cria_tricks.run import steps
        return steps.carry_out(job)
