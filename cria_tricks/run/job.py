"""What is known about a run, and what is made for it: a ``Job``, with its plan, processes, rows and folders."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cria_tricks import models
from cria_tricks.common.console import Aside, Voice, doing
from cria_tricks.data import samples, sources
from cria_tricks.data.sources import DataSource, OpenedSource
from cria_tricks.models import weight_files
from cria_tricks.processes import numbers
from cria_tricks.processes import world as processes
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.run.allocator import ask_for_expandable_segments, keep_freed_memory
from cria_tricks.settings import NAMED_SETS
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import describe
from cria_tricks.store.run_folder import Folders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cria_tricks.bill.bill import Bill
    from cria_tricks.load.model import Loaded
    from cria_tricks.measure.memory import Meter
    from cria_tricks.measure.monitor import Monitor


@dataclass
class Job:
    """One run, from the recipe to the result: :func:`opened` makes it, and ``run/ready.py`` adds to it.

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
        weights: where the base model is.
        tokenizer: its tokenizer, which is saved with the adapter.
        rows: the ``train`` and ``eval`` token rows.
        doubts_about_ends: the warnings about how answers end, so that they are not printed twice.
        trainable: the number of parameters that will train, counted before the model is loaded.
        began_over: the identity of the base that a resumed run began with, if it is another one; else empty.
        estimated: the estimated memory bill; ``None`` for a kind of model that cannot be estimated.
        meter: the seconds, and the peak bytes by phase.
        monitor: the samples of the machine.
        loaded: the model that trains; with some strategies, only this process's part of it.
        parameters: the numbers of ``trainable`` and ``total`` parameters of the whole model.
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
    # What is made once the heavy libraries are there.
    weights: models.Weights = field(init=False)
    tokenizer: "PreTrainedTokenizerBase" = field(init=False)
    rows: dict[str, Any] = field(init=False)
    doubts_about_ends: list[str] = field(init=False)
    trainable: int = field(init=False)
    began_over: Mapping[str, Any] = field(init=False)
    estimated: "Bill | None" = field(init=False)
    meter: "Meter" = field(init=False)
    monitor: "Monitor" = field(init=False)
    loaded: "Loaded" = field(init=False)
    parameters: dict[str, int] = field(init=False)

    @property
    def sources(self) -> dict[str, OpenedSource]:
        """The rows by part, ``train`` and ``eval``."""
        return {"train": self.train, "eval": self.eval}

    def warn(self, sentences: Sequence[str]) -> None:
        """Print warnings, one line each."""
        for sentence in sentences:
            self.console.print(f"warning: {sentence}")


@contextlib.contextmanager
def opened(
    recipe: Recipe,
    out: str | Path | None,
    resume: bool,
    other_base: bool,
    console: Console | None,
) -> Iterator[Job]:
    """Make the plan, let the processes join, read the rows, look at the folders; the job is carried out in the block.

    The arguments are those of :func:`cria_tricks.run.train.train` and the attributes of :class:`Job`.

    Raises:
        BadInput: if something is wrong with the plan, the rows or the folders.
    """
    began = time.perf_counter()
    recipe = recipe.model_copy(update={"model": models.anchored(recipe.model)})
    numbers.see_one_card()
    ask_for_expandable_segments(recipe)
    plan = resolve(recipe, processes=numbers.processes())
    console = console or Aside()
    with keep_freed_memory(plan.device), processes.joined(recipe.parallel.timeout):
        divided = {"pipeline": "stage", "context": "context"}.get(plan.parallel["strategy"], "tensor")
        world = World.of(plan.parallel["data"], plan.device.kind, divided)
        _look_at_files(recipe.model)
        console.quiet = console.quiet or not world.is_main
        with doing(console, "reading the rows"):
            train_rows, held_out = sources.both(recipe.data, recipe.train.seed)
            found: dict[str, OpenedSource] = {"train": train_rows, "eval": held_out}
            # All that decides the run's result. It is saved in run.json, and --resume compares it with what is there.
            about = describe(recipe, found, plan.device.name, world.size)
        too_few_to_answer = samples.check(recipe.eval.samples, held_out.rows)
        # Rank 0 sends the Folders to the other ranks, which pickles them. A console cannot be pickled, but a Voice can.
        folders = world.on_rank_zero(lambda: Folders(recipe, out, resume, about, Voice(console)))
        job = Job(recipe, plan, world, train_rows, held_out, folders, other_base, console, began)
        if not recipe.data.eval and recipe.data.train not in NAMED_SETS:
            console.print(f"data.eval: {held_out.description}", markup=False, highlight=False)
        job.warn(plan.warnings)
        job.warn(too_few_to_answer)
        yield job


def _look_at_files(name: str) -> None:
    """Refuse a model's folder if its weight files are missing, damaged, pickles, or contradict their index.

    Only the headers of the files are read.
    """
    # The names of folders are absolute here. An absolute path without a model is refused by find.
    if Path(name).is_absolute():
        weight_files.tensors(Path(models.find(name).path), name)
