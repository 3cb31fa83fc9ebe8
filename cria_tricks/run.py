"""Recipe -> Report + adapter: the whole way, in one function."""

import contextlib
import importlib.util
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cria_tricks.checkpoints import describe
from cria_tricks.console import Aside, Voice
from cria_tricks.data import sources
from cria_tricks.data.shards import open_stream
from cria_tricks.errors import BadInput, OutOfMemory, is_out_of_memory
from cria_tricks.folders import Folders
from cria_tricks.memory.estimate import MemoryEstimate, estimate
from cria_tricks.memory.shape import Shape, find_shape
from cria_tricks.memory.toggles import Bench, in_words
from cria_tricks.parallel import world as processes
from cria_tricks.parallel.per_process import PerProcess, per_process
from cria_tricks.parallel.world import World
from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe
from cria_tricks.startup import importing
from cria_tricks.tricks import resolve, still_off

if TYPE_CHECKING:
    from cria_tricks.monitor import Monitor
    from cria_tricks.progress import ShowProgress


def train(
    recipe: Recipe, out: str | Path | None = None, *, resume: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train one recipe and write its adapter and report.

    Everything that can be wrong with the recipe or the data is found before any model is loaded. Started by a launcher
    in several processes, it trains one recipe in all of them, by ``recipe.parallel.strategy``; the first one writes.

    Args:
        recipe: what to train.
        out: folder to write; ``runs/NAME`` (or the next free ``runs/NAME-2``, ...) when left out.
        resume: go on from the newest checkpoint in ``out``; from the beginning when there is none.
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
    _refuse_missing(recipe.train.report_to)
    processes.see_one_card()
    plan = resolve(recipe, processes=processes.processes())
    with processes.joined(recipe.parallel.timeout):
        world = processes.World.of(plan.parallel["data"], plan.device.kind)
        return _train(recipe, plan, out, resume, console or Aside(), world, began)


def _train(
    recipe: Recipe, plan: Plan, out: str | Path | None, resume: bool, console: Console, world: World, began: float
) -> dict[str, Any]:
    console.quiet = console.quiet or not world.is_first
    found: dict[str, Any] = {
        "train": open_stream(recipe.data.train, recipe.tricks.gradient_accumulation)
        if recipe.data.stream
        else sources.find(recipe.data.train, "train"),
        "eval": sources.find(recipe.data.eval, "eval"),
    }
    about = describe(recipe, found, plan.device.name, world.size)
    folders = world.first(lambda: Folders(recipe, out, resume, about, Voice(console)))
    for sentence in plan.warnings:
        console.print(f"warning: {sentence}")

    with importing():  # only now the heavy libraries: what was wrong so far took a second to say
        from transformers import set_seed

        from cria_tricks import artifact, card, models, profiling, provenance, report
        from cria_tricks.data.prepare import eval_rows, train_rows
        from cria_tricks.data.stream import Stream
        from cria_tricks.load import count_trainable, load, load_tokenizer, quiet_libraries
        from cria_tricks.measure import Meter, every_tensor
        from cria_tricks.monitor import Monitor
        from cria_tricks.parallel import sharded
        from cria_tricks.progress import ShowProgress
        from cria_tricks.trainer import fit

    quiet_libraries()
    weights = models.find(recipe.model)
    tokenizer = load_tokenizer(weights)
    stream = None
    if recipe.data.stream:
        stream = Stream(recipe, found["train"], found["eval"], tokenizer, world, console.print)
    rows: dict[str, Any] = {
        "train": stream or train_rows(recipe, found["train"], found["eval"], tokenizer, console.print),
        "eval": eval_rows(recipe, found["eval"], tokenizer),
    }
    for sentence in report.data_warnings(rows, recipe):
        console.print(f"warning: {sentence}")
    highest_id = max(part.highest_id for part in rows.values())
    with world.within(folders.claimed(count_trainable(plan, weights, highest_id), plan.optimizer["bits"])):
        console.print(f"loading {weights.name} on {plan.device.name}, writing to {folders.folder}")
        if stream:
            stream.look_for_duplicates(folders.folder, world, console)
        set_seed(recipe.train.seed)
        meter = Meter(plan.device.kind, began, folders.start.spent if folders.start else None, compiled=plan.compiled)
        shape = _shape(weights.path)
        longest = _as_long_as(rows["train"].longest, recipe)
        most_trained = rows["train"].most_trained(recipe.train.batch_size)
        estimated = _estimate(longest, shape, plan, most_trained, world.size)
        monitor = Monitor(
            folders.monitor(world.rank),
            recipe.train.monitor_seconds,
            cuda=plan.device.kind == "cuda",
            say=Voice(console),
        )
        with _memory_in_one_line(longest, plan, shape, world.size), monitor:
            with meter.phase("load"):
                loaded = load(plan, weights)
                meter.track(every_tensor(loaded.model))
            eval_batches = math.ceil(len(rows["eval"].rows) / recipe.train.batch_size / world.data)
            progress = ShowProgress(
                console, eval_batches, estimated.allocated_bytes if estimated else None, lambda: monitor.newest
            )
            with _onlookers(recipe, folders, world, monitor, progress) as onlookers:
                run = fit(
                    loaded,
                    plan,
                    recipe.train,
                    rows["train"].rows,
                    rows["eval"].rows,
                    folders.checkpoints,
                    pad_id=tokenizer.pad_token_id,
                    meter=meter,
                    start=folders.start,
                    callbacks=onlookers,
                    world=world,
                )
        if stream:
            stream.add_up(world)
            if stream.tally.in_words():
                console.print(f"data.train: {stream.tally.in_words()}")
            for sentence in report.data_warnings(rows, recipe):
                console.print(f"warning: {sentence}")
        for sentence in report.step_warnings(run):
            console.print(f"warning: {sentence}")
        trained = folders.folder / ("model" if recipe.tricks.peft == "none" else "adapter")
        descriptions = {part: source.description for part, source in found.items()}
        summary = report.summarise(recipe, plan, run, meter, rows, descriptions, count_parameters(loaded.model))
        summary |= report.compare(estimated, run)
        summary |= {"adapter": str(trained), "model": weights.name}
        summary["monitor"] = world.gather(monitor.summary())
        summary["profile"] = profiling.read(folders.folder / "profile") if recipe.train.profile else None
        made = provenance.describe(summary, weights, found)
        text = card.model_card(summary, made, weights.name, weights.note, recipe)
        in_one = sharded.weights(loaded.model, keep=world.is_first)

        def write() -> None:
            artifact.save(trained, loaded.model, tokenizer, weights.name, text, recipe, made, in_one)
            report.write(folders.folder, summary)
            folders.mirror_results()

        world.first(write)
    return world.first(lambda: summary)


def _refuse_missing(trackers: Sequence[str]) -> None:
    """A library that is not there is told before a model is loaded."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise BadInput(
                f"train.report_to={name}: the package {name} is not installed; pip install 'cria_tricks[monitor]', or "
                "leave it out"
            )


@contextlib.contextmanager
def _onlookers(
    recipe: Recipe, folders: Folders, world: World, monitor: "Monitor", progress: "ShowProgress"
) -> Iterator[list[Any]]:
    """The callbacks that change nothing: every process takes samples, the first one traces, reports and shows."""
    from cria_tricks.profiling import Profile
    from cria_tricks.tracking import trackers

    found: list[Any] = [monitor]
    with contextlib.ExitStack() as stack:
        if world.is_first:
            if recipe.train.profile:
                found.append(stack.enter_context(Profile(folders.folder / "profile", cuda=monitor.cuda)))
            step = folders.start.step if folders.start else 0
            found += stack.enter_context(trackers(recipe, folders.folder, step, lambda: monitor.newest))
        stack.enter_context(progress.panel)
        yield [*found, progress]


@contextlib.contextmanager
def _memory_in_one_line(recipe: Recipe, plan: Plan, shape: Shape | None, processes: int) -> Iterator[None]:
    """Say at what memory ran out, and what would save some."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        what = error if isinstance(error, OutOfMemory) else "out of memory while the model was loaded"
        if shape:
            advice = in_words(Bench(shape, plan.device, processes), recipe)
        else:  # of a kind that cannot be estimated
            advice = f"still off: {', '.join(still_off(recipe, plan.device)) or 'no toggle that works here'}"
        raise OutOfMemory(f"{what}; {advice} (a changed recipe begins in a new folder)") from None


def _shape(model: str) -> Shape | None:
    """The model's widths, if it is of a kind that can be estimated."""
    try:
        return find_shape(model)
    except BadInput:
        return None


def _as_long_as(length: int, recipe: Recipe) -> Recipe:
    """The recipe for rows of the length that the longest really has; packed ones are full."""
    if recipe.tricks.packing:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": length})})


def _estimate(
    recipe: Recipe, shape: Shape | None, plan: Plan, most_trained: int, processes: int
) -> MemoryEstimate | PerProcess | None:
    """The bill of the largest micro-batch that may come, in the process that needs most."""
    if shape is None:
        return None
    trained_tokens = None if recipe.tricks.packing else most_trained
    if processes == 1:
        return estimate(recipe, shape, plan.device, trained_tokens=trained_tokens)
    strategy = recipe.parallel.strategy
    return per_process(recipe, shape, plan.device, strategy, processes, trained_tokens=trained_tokens)


def count_parameters(model: Any) -> dict[str, int]:
    """Trainable and total parameters; packed 4-bit weights count unpacked."""
    if hasattr(model, "get_nb_trainable_parameters"):  # peft's, which knows that 4-bit weights are packed
        trainable, total = model.get_nb_trainable_parameters()
        return {"trainable": trainable, "total": total}
    return {
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "total": sum(p.numel() for p in model.parameters()),
    }
