"""Check a run before any model is loaded: read its rows, look at its folders, and keep what is known in a ``Job``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cria_tricks import models
from cria_tricks.common.console import Voice, doing
from cria_tricks.data import samples, sources
from cria_tricks.data.sources import DataSource, OpenedSource
from cria_tricks.models import weight_files
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.settings import NAMED_SETS
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import describe
from cria_tricks.store.run_folder import Folders


@dataclass(frozen=True)
class Job:
    """What is known about a run before any model is loaded.

    Attributes:
        recipe: what the user wants.
        plan: what will run.
        world: the processes of the run.
        train: the training rows, read and checked once; but a stream is not read yet.
        eval: the evaluation rows.
        folders: the folders in which the run writes.
        other_base: whether a resumed run, or one that continues from an adapter, may have another base model.
        console: where messages are printed; quiet on every rank but 0.
        began: when the run began, as ``time.perf_counter`` gives it [s].
    """

    recipe: Recipe
    plan: Plan
    world: World
    train: OpenedSource
    eval: DataSource
    folders: Folders
    other_base: bool
    console: Console
    began: float

    @property
    def sources(self) -> dict[str, OpenedSource]:
        """The rows by part, ``train`` and ``eval``."""
        return {"train": self.train, "eval": self.eval}

    def warn(self, sentences: Sequence[str]) -> None:
        """Print warnings, one line each."""
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
    """Read the rows, look at the folders, and make the job.

    The arguments are those of :func:`cria_tricks.run.run.train` and the attributes of :class:`Job`.

    Raises:
        BadInput: if something is wrong with the rows or the folders.
    """
    console.quiet = console.quiet or not world.is_main
    with doing(console, "reading the rows"):
        train_rows, held_out = sources.both(recipe.data, recipe.train.seed)
        found: dict[str, OpenedSource] = {"train": train_rows, "eval": held_out}
        # All that decides the run's result. It is saved in run.json, and --resume compares it with what is saved there.
        about = describe(recipe, found, plan.device.name, world.size)
    too_few_to_answer = samples.check(recipe.eval.samples, held_out.rows)
    # Rank 0 sends the Folders to the other ranks, which pickles them. A console cannot be pickled, but a Voice can.
    folders = world.on_rank_zero(lambda: Folders(recipe, out, resume, about, Voice(console)))
    job = Job(recipe, plan, world, train_rows, held_out, folders, other_base, console, began)
    if not recipe.data.eval and recipe.data.train not in NAMED_SETS:
        console.print(f"data.eval: {held_out.description}", markup=False, highlight=False)
    job.warn(plan.warnings)
    job.warn(too_few_to_answer)
    return job


def look_at_files(name: str) -> None:
    """Refuse a model's folder if its weight files are missing, damaged, pickles, or contradict their index.

    Only the headers of the files are read.
    """
    # run.train has made the names of folders absolute. An absolute path without a model is refused by find.
    if Path(name).is_absolute():
        weight_files.tensors(Path(models.find(name).path), name)
