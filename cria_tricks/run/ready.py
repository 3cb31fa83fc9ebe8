"""Make a job ready to train: turn its rows into tokens, claim its folder, load the model, and watch all of it.

This module needs the heavy libraries. So ``run/train.py`` imports it only after the recipe, the rows and the folders
have been checked.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import set_seed

from cria_tricks import models
from cria_tricks.adapter.folder import RECIPE, refuse_another, refuse_damaged, trained_over
from cria_tricks.adapter.opening import quantization_of
from cria_tricks.bill.bill import Bill
from cria_tricks.common.console import Voice, doing
from cria_tricks.common.errors import Interrupted, OutOfMemory, is_out_of_memory
from cria_tricks.common.units import human
from cria_tricks.data.lengths import as_long_as
from cria_tricks.data.prepare import eval_rows, train_rows
from cria_tricks.data.stream import Stream
from cria_tricks.data.table import mapped
from cria_tricks.hardware import trust
from cria_tricks.hardware.gpus import this_host
from cria_tricks.kwanzaa import augment
from cria_tricks.load.model import count_trainable, load, load_tokenizer, quiet_libraries, refuse_unfit
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.measure.monitor import Monitor
from cria_tricks.measure.profiler import Profile
from cria_tricks.models import Weights, adapter_config, ends, identity, pretrained, weight_files
from cria_tricks.models.catalogue import ALIASES, short_name
from cria_tricks.models.configs import context_of
from cria_tricks.models.shape import Shape
from cria_tricks.predict.evaluation import Evaluated
from cria_tricks.predict.host import host_bill, refuse_beyond_host
from cria_tricks.predict.toggles import Target, in_words
from cria_tricks.recipe import Recipe
from cria_tricks.report import summary as report
from cria_tricks.resolve import still_off
from cria_tricks.run import results
from cria_tricks.run.allocator import in_force
from cria_tricks.run.job import Job
from cria_tricks.step_plan import Plan
from cria_tricks.switches.folds import for_shape
from cria_tricks.switches.lora import AT_ADAPTER, STARTS
from cria_tricks.trainer import samples
from cria_tricks.trainer.fit import guarded, summed_up, training
from cria_tricks.trainer.progress import ShowProgress
from cria_tricks.trainer.steps import micro_batches_at_once
from cria_tricks.trainer.trackers import trackers
from cria_tricks.trainer.training import Training
from cria_tricks.trainer.what_ran import quantized


def prepare(job: Job) -> None:
    """Find the base model, turn the rows into tokens, and refuse what does not fit together.

    Raises:
        BadInput: if model, adapter, rows and plan do not fit together.
    """
    quiet_libraries()
    recipe = job.recipe
    plan = job.plan
    console = job.console
    begun = job.folders.start
    if begun:  # a checkpoint's weights take the place of any other start
        plan = plan.without(*STARTS)
    continues = AT_ADAPTER in plan.after_load
    revision = revision_of_start(recipe) if continues else job.folders.revision
    weights = models.fetch(models.find(recipe.model), revision)
    job.weights = weights
    empty = refuse_unfit(plan, weights)
    job.began_over = job.folders.record_base(weights, other_base=job.other_base)
    if continues:
        job.warn(doubts_about_start(recipe, weights, job.other_base))
    job.tokenizer = load_tokenizer(weights, recipe.data.eos)
    with doing(console, "turning rows into tokens"):
        rows = _rows(job)
    job.rows = rows
    job.warn(report.data_warnings(rows, recipe, context_of(weights.path)))
    job.doubts_about_ends = _doubts_about_ends(job)  # of a stream, whose rows are not read yet, perhaps nothing
    job.warn(job.doubts_about_ends)
    highest_id = max(part.highest_id for part in rows.values())
    longest = max(part.longest for part in rows.values())
    job.trainable = count_trainable(empty, plan, weights, highest_id, longest, job.tokenizer.pad_token_id)
    if continues:
        job.folders.about["continued_from"] = record_of_start(recipe)
        console.print(f"beginning with the adapter {recipe.lora.continue_from}")
    elif begun and "continued_from" in begun.about:
        job.folders.about["continued_from"] = begun.about["continued_from"]


@contextlib.contextmanager
def claimed(job: Job) -> Iterator[None]:
    """Be the only run that writes into the job's folder, until the block's end.

    Raises:
        BadInput: if there is no room on the disk, or another process writes there.
    """
    with job.world.entered_on_rank_zero(job.folders.claimed(job.trainable, job.plan.optimizer["bits"])):
        job.console.print(f"loading {job.weights.name} on {job.plan.device.name}, writing to {job.folders.folder}")
        if job.weights.note:
            job.console.print(f"note: {job.weights.note}")
        yield


def _doubts_about_ends(job: Job) -> list[str]:
    """Say what is wrong with the end of an answer, if there are chats."""
    if job.recipe.data.eos or not any(part.tally.kinds.get("chat") for part in job.rows.values()):
        return []
    return ends.warnings(job.tokenizer, ends.named_in(Path(job.weights.path)))


def _rows(job: Job) -> dict[str, Any]:
    """Turn the ``train`` and ``eval`` rows into tokens; a stream does so later, as its rows are needed."""
    recipe = job.recipe
    tokenizer = job.tokenizer
    say = job.console.print
    rows: Any
    if recipe.data.stream:
        rows = Stream(recipe, job.train, job.eval, tokenizer, job.world, say, augment.of(recipe))
    else:
        rows = train_rows(recipe, job.train, job.eval, tokenizer, say, augment.of(recipe), mapped)
    return {"train": rows, "eval": eval_rows(recipe, job.eval, tokenizer)}


@contextlib.contextmanager
def in_training(job: Job) -> Iterator[Training]:
    """Load the model; inside the block it is trained, while a monitor, a meter and a progress bar watch.

    Raises:
        BadInput: if the host has no room for what waits there, or the model cannot be loaded.
        OutOfMemory: in one line, with the switches that would save how many bytes.

    Inside the block also what :func:`~cria_tricks.trainer.fit.guarded` raises.
    """
    recipe = job.recipe
    rows = job.rows
    shape = results.shape_of(recipe, job.weights.path)
    plan = for_shape(job.plan, recipe, shape) if shape else job.plan
    job.warn(plan.warnings[len(job.plan.warnings) :])
    world = job.world
    folders = job.folders
    set_seed(recipe.train.seed)
    spent = folders.start.spent if folders.start else None
    job.meter = Meter(plan.device.kind, job.began, spent, compiled=plan.compiled)
    longest = in_force(as_long_as(_longest(rows, job.plan), recipe), plan.device)
    most_trained = rows["train"].most_trained(recipe.train.batch_size)
    evaluated = Evaluated(rows["eval"].longest, rows["eval"].longest)
    estimated = _estimate(longest, shape, plan, most_trained, world.size, evaluated)
    job.warn(_doubts_about_memory(estimated))
    job.estimated = estimated.training if estimated else None
    if shape:
        target = Target(shape, plan.device, world.size, this_host())
        refuse_beyond_host(host_bill(target, longest))
    batch = recipe.train.batch_size * micro_batches_at_once(plan)
    eval_batches = math.ceil(len(rows["eval"].rows) / batch / world.data)
    expected = job.estimated.allocated_bytes if job.estimated else None
    asked = samples.of(recipe, job.eval.rows, job.tokenizer, job.warn)
    counted = results.counted_work(job, rows["train"], shape) if shape else None
    cuda = plan.device.kind == "cuda"
    file = folders.monitor(world.rank)
    monitor = Monitor(file, recipe.train.monitor_seconds, cuda=cuda, say=Voice(job.console))
    job.monitor = monitor
    progress = ShowProgress(job.console, eval_batches, expected, lambda: monitor.newest, counted)
    with monitor, _memory_in_one_line(job, longest, shape, evaluated):
        with job.meter.phase("load"), doing(job.console, f"loading {job.weights.name}"):
            job.loaded = load(plan.without(*STARTS) if folders.start else plan, job.weights)
            job.meter.track(every_tensor(job.loaded.model))
        job.parameters = count_parameters(job.loaded.model)
        known_loss = results.kept_before(job).get("eval_loss", math.inf) if recipe.train.keep_best else math.inf
        with _onlookers(job, monitor, progress) as onlookers:
            run = training(
                job.loaded,
                plan,
                recipe.train,
                rows["train"].rows,
                rows["eval"].rows,
                folders.checkpoints,
                pad_id=job.tokenizer.pad_token_id,
                meter=job.meter,
                start=folders.start,
                callbacks=onlookers,
                world=world,
                samples=asked,
                keep=functools.partial(results.keep, job) if recipe.train.keep_best else None,
                known=known_loss,
            )
            with guarded(run):
                yield run
    if recipe.data.stream:
        _say_what_came(job)
    job.warn(report.step_warnings(summed_up(run)))


def _say_what_came(job: Job) -> None:
    """Print what a stream has left out, and what is doubtful in its rows, which nobody has read before."""
    stream = job.rows["train"]
    stream.add_up(job.world)
    if stream.tally.in_words():
        job.console.print(f"data.train: {stream.tally.in_words()}")
    job.warn(report.data_warnings(job.rows, job.recipe))
    if not job.doubts_about_ends:
        job.warn(_doubts_about_ends(job))


def _longest(rows: dict[str, Any], plan: Plan) -> int:
    """Return the length of the longest row in training [tokens].

    A pipeline pads all rows, of training and of evaluation, to the longest of both.
    """
    both = plan.parallel["strategy"] == "pipeline"
    return max(rows["train"].longest, rows["eval"].longest if both else 0)


@contextlib.contextmanager
def _onlookers(job: Job, monitor: Monitor, progress: ShowProgress) -> Iterator[list[Any]]:
    """Yield the callbacks that observe the run and change nothing.

    Every process takes samples of the machine. Only rank 0 writes traces, feeds the trackers, and shows progress.
    """
    recipe = job.recipe
    folders = job.folders
    found: list[Any] = [monitor]
    with contextlib.ExitStack() as stack:
        if job.world.is_main:
            if recipe.train.profile:
                found.append(stack.enter_context(Profile(folders.folder / "profile", cuda=monitor.cuda)))
            step = folders.start.step if folders.start else 0
            found += stack.enter_context(trackers(recipe, folders.folder, step, lambda: monitor.newest))
        stack.enter_context(progress.panel)
        yield [*found, progress]


@contextlib.contextmanager
def _memory_in_one_line(job: Job, longest: Recipe, shape: Shape | None, evaluated: Evaluated) -> Iterator[None]:
    """Turn an out-of-memory error into one sentence: during what memory ran out, and which switches would save some."""
    try:
        yield
    except Interrupted:  # its message names a folder, whose name may be anything
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        what = error if isinstance(error, OutOfMemory) else "out of memory while the model was loaded"
        then = "a changed recipe begins in a new folder"
        if shape:
            advice = in_words(Target(shape, job.plan.device, job.world.size, evaluated=evaluated), longest)
            then += ", and --fit smallest finds the set that needs least"
        else:  # without an estimate, we can only list the switches that are off
            off = still_off(longest, job.plan.device, job.world.size)
            advice = f"still off: {', '.join(off) or 'no switch that works here'}"
        raise OutOfMemory(f"{what}; {advice} ({then})") from None


def _doubts_about_memory(memory: Bill | None) -> list[str]:
    """Warn before anything is loaded if the run may not fit by the estimate, which is an upper bound."""
    if memory is None or memory.verdict == "fits":
        return []
    has = human(memory.step.device.memory_bytes)
    found = f"by estimate the run needs {human(memory.needed_bytes)} of {has}"
    if memory.verdict == "tight":
        return [f"{found}: {trust.TIGHT}"]
    return [f"{found}, so it does not fit; cria plan says what would help"]


def _estimate(
    recipe: Recipe, shape: Shape | None, plan: Plan, most_trained: int, processes: int, evaluated: Evaluated
) -> Bill | None:
    """Estimate the memory bill of the largest micro-batch that may come, for the process that needs most.

    Args:
        recipe: the recipe, with its rows as long as the longest row of the data.
        shape: the model's shape, if it can be estimated.
        plan: the plan of the run.
        most_trained: the most trained tokens that a micro-batch of unpacked rows can have.
        processes: the world size.
        evaluated: the evaluation rows.
    """
    if shape is None:
        return None
    # Packed rows are made later. How many of their tokens are trained is not known yet, so all are taken as trained.
    trained_tokens = None if "packed_length" in plan.collator else most_trained
    return Target(shape, plan.device, processes, evaluated=evaluated).memory(recipe, trained_tokens=trained_tokens)


def count_parameters(model: Any) -> dict[str, int]:
    """Count the trainable and all parameters; a byte with two 4-bit weights counts as two."""
    if hasattr(model, "get_nb_trainable_parameters"):  # a model of peft, which counts 4-bit weights in this way
        trainable, total = model.get_nb_trainable_parameters()
        return {"trainable": trainable, "total": total}
    return {
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "total": sum(p.numel() for p in model.parameters()),
    }


PLAIN = "16 or 32 bits"
"""How a base is named that is not quantised."""


def revision_of_start(recipe: Recipe) -> str:
    """Return the hub commit of the base that the adapter was trained over; empty if it is another base, or unknown.

    Raises:
        BadInput: if the folder is gone, damaged.
    """
    folder = Path(recipe.lora.continue_from)
    refuse_another(folder)
    refuse_damaged(folder)
    base = short_name(adapter_config.read(folder)["base_model_name_or_path"])
    if ALIASES.get(base, base) != ALIASES.get(recipe.model, recipe.model):
        return ""
    return trained_over(folder).get("revision") or ""


def doubts_about_start(recipe: Recipe, base: Weights, other_base: bool) -> list[str]:
    """Compare the base of a run with that of the adapter from which it continues.

    Args:
        recipe: the recipe.
        base: the run's base.
        other_base: whether it may be another one than the adapter's.

    Returns:
        A warning for each difference.

    Raises:
        BadInput: if weights or config differ, and ``other_base`` is false.
    """
    folder = Path(recipe.lora.continue_from)
    before, now = trained_over(folder), identity.of(base)
    found = identity.compare(before, now, str(folder), allowed=other_base, moved="--set model=DIR", weights=base)
    if (folder / RECIPE).is_file():
        then = quantization_of(folder)
        was, wanted = quantized(Recipe(tricks=then)), quantized(recipe)
        if was != wanted:
            found.append(
                f"{folder}: was trained over a base in {was or PLAIN}, and this run's is in {wanted or PLAIN}: other "
                f"weights; set tricks.quantization={then.quantization} and tricks.double_quantization="
                f"{str(then.double_quantization).lower()} for those of before"
            )
    return found


def record_of_start(recipe: Recipe) -> dict[str, Any]:
    """Return the folder of the adapter from which a run continues, and the hash of its numbers."""
    folder = Path(recipe.lora.continue_from)
    return {"folder": str(folder), "weights": {pretrained.ADAPTER: weight_files.sha256(folder / pretrained.ADAPTER)}}
