"""What is known of a run before any model is loaded: the light part, in which a recipe or its rows are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import models
from cria_tricks.common.console import Voice
from cria_tricks.common.waiting import doing
from cria_tricks.data import sources
from cria_tricks.data.shards import open_stream
from cria_tricks.models import weight_files
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import describe
from cria_tricks.store.run_folder import Folders


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
        console: where messages are printed; quiet on every rank but 0.
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


def checked(
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
    console.quiet = console.quiet or not world.is_main
    lanes = plan.training["gradient_accumulation_steps"] * plan.parallel["data"]  # of a step, in all processes
    with doing("reading the rows"):
        train_rows = (
            open_stream(recipe.data.train, lanes) if recipe.data.stream else sources.find(recipe.data.train, "train")
        )
        found = {"train": train_rows, "eval": sources.find(recipe.data.eval, "eval")}
    about = describe(recipe, found, plan.device.name, world.size)
    folders = world.on_rank_zero(lambda: Folders(recipe, out, resume, about, Voice(console)))
    job = Job(recipe, plan, world, found, folders, other_base, console, began)
    job.warn(plan.warnings)
    return job


def look_at_files(name: str) -> None:
    """Refuse a folder whose files of weights contradict each other, by their headers."""
    if Path(name).is_absolute():
        weight_files.tensors(Path(models.find(name).path), name)
