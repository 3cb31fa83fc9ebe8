"""Recipe -> Report + adapter: the whole way, in one function."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import given, models, weight_files
from cria_tricks.checkpoints import describe
from cria_tricks.console import Aside, Voice
from cria_tricks.data import sources
from cria_tricks.data.shards import open_stream
from cria_tricks.folders import Folders
from cria_tricks.parallel import numbers
from cria_tricks.parallel import world as processes
from cria_tricks.parallel.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.startup import importing
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import resolve
from cria_tricks.waiting import doing


@dataclass(frozen=True)
class Job:
    """What is known of a run before any model is loaded.

    Attributes:
        recipe: what is wanted.
        plan: what will run.
        world: in which processes.
        sources: the ``train`` and ``eval`` rows, checked, or a stream of them.
        folders: where it is written.
        other_base: whether a resumed run may go on over another base.
        console: who is told; quiet in all processes but the first.
        began: when, by ``time.perf_counter``.
    """

    recipe: Recipe
    plan: Plan
    world: World
    sources: dict[str, Any]
    folders: Folders
    other_base: bool
    console: Console
    began: float

    def warn(self, sentences: Sequence[str]) -> None:
        """Tell what does not stop a run."""
        for sentence in sentences:
            self.console.print(f"warning: {sentence}")


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
        world = World.of(plan.parallel["data"], plan.device.kind)
        _look_at_files(recipe.model)
        job = _checked(recipe, plan, world, out, resume, other_base, console or Aside(), began)
        with importing():  # only now the heavy libraries: what was wrong so far took a second to say
            from cria_tricks import training
        return training.carry_out(job)


def _checked(
    recipe: Recipe,
    plan: Plan,
    world: World,
    out: str | Path | None,
    resume: bool,
    other_base: bool,
    console: Console,
    began: float,
) -> Job:
    """Find what can be wrong with the rows and the folders."""
    console.quiet = console.quiet or not world.is_first
    lanes = recipe.tricks.gradient_accumulation
    with doing("reading the rows"):
        train_rows = (
            open_stream(recipe.data.train, lanes) if recipe.data.stream else sources.find(recipe.data.train, "train")
        )
        found = {"train": train_rows, "eval": sources.find(recipe.data.eval, "eval")}
    about = describe(recipe, found, plan.device.name, world.size)
    folders = world.first(lambda: Folders(recipe, out, resume, about, Voice(console)))
    job = Job(recipe, plan, world, found, folders, other_base, console, began)
    job.warn(plan.warnings)
    return job


def _look_at_files(name: str) -> None:
    """Refuse a folder whose files of weights contradict each other, by their headers."""
    if Path(name).is_absolute():
        weight_files.tensors(Path(models.find(name).path), name)
