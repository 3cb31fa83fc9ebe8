"""Go on with a smaller set of switches when training runs out of memory (``train.on_oom = "adapt"``).

What is kept: the state after the last whole step (or, if memory ran out in the optimizer step, which may leave
half-updated weights, the newest checkpoint), the same optimizer steps, and the same order of rows. So from that step on
the run equals a run that had the smaller set from the start, beyond rounding.

The set is chosen by ``run/search.py``, which changes no result. A run in the middle is more narrowly bound than a new
one, so four kinds of sets are left out:

- Another division of a step's rows into micro-batches keeps the windows and the order of rows. But dropout would draw
  other masks, and each micro-batch of a stream has rows of its own. There the micro-batch stays as it is.
- Steps in the backward pass in fp16: a step that overflows is another one there (``tricks/optimizer_in_backward.py``).
- Other optimizer states: with 32-bit states, paging takes bitsandbytes' AdamW instead of torch's, which cannot load
  the states of the checkpoint. So paging may change only with ``adamw_8bit``.
- After an evaluation ran out: sets that save memory only for the backward pass, which an evaluation does not have.

An error while the model is loaded is not handled, because these switches do not make the weights smaller.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from bitsandbytes.optim import GlobalOptimManager

from cria_tricks.bill.bill import Bill
from cria_tricks.common.errors import OutOfMemory
from cria_tricks.common.units import human
from cria_tricks.data.lengths import Lengths, as_long_as, full, padded_mean
from cria_tricks.data.stream import Stream
from cria_tricks.hardware import trust
from cria_tricks.load.model import built_empty
from cria_tricks.models import pretrained
from cria_tricks.models.configs import find_config
from cria_tricks.models.shape import Shape
from cria_tricks.predict.evaluation import Evaluated
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.run.allocator import in_force
from cria_tricks.run.job import Job
from cria_tricks.run.search import Choice, smaller
from cria_tricks.step_plan import Plan
from cria_tricks.store import adaptations
from cria_tricks.store.adaptations import Adaptation
from cria_tricks.trainer import what_ran

TRIES = 3
"""How many smaller sets a run tries before it stops."""
SMALLER = (0.9, 0.97)
"""The share of the failed set's estimated memory that the next one may need; the second if no set keeps to the first.

It must save more than the estimate's own error, which is about two hundredths.
"""

IN_EVALUATION = {"tricks.chunked_loss": True, "tricks.attention": "sdpa", "tricks.expand_kv": True}
"""The switches that make an evaluation smaller, and the values that do: fewer logits, no attention probabilities."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Known:
    """What stays the same over all tries of a run.

    Attributes:
        shape: the model's shape; ``None`` if this kind of model cannot be estimated.
        model: the model's folder.
        rows: the ``train`` and ``eval`` token rows.
        longest: tokens of the longest row in training.
    """

    shape: Shape | None
    model: str
    rows: Mapping[str, Any]
    longest: int


@dataclass(frozen=True)
class Try:
    """A set that ran out of memory: its changes in words, what it needs by estimate [bytes], and where it ended."""

    changed: str
    needed_bytes: int
    during: str


def until_it_fits(job: Job, known: Known, attempt: Callable[[Job], Result]) -> tuple[Job, Result]:
    """Run a job; if memory runs out in training and the recipe says so, go on with smaller sets, :data:`TRIES` at most.

    Args:
        job: the job as it was asked for.
        known: what the tries have in common.
        attempt: loads the model and trains it, from ``job.folders.start``.

    Returns:
        The job as it has run in the end, and what ``attempt`` returned.

    Raises:
        OutOfMemory: if the recipe does not allow to go on, there is no smaller set, or too many were tried.
    """
    train = known.rows["train"]
    beginning = train.state() if isinstance(train, Stream) else {}
    tried: list[Try] = []
    while True:
        try:
            return job, attempt(job)
        except OutOfMemory as error:
            if not error.during or job.recipe.train.on_oom == "stop":
                if tried:  # a smaller set could not even be loaded
                    _show(job, tried)
                raise
            failed = OutOfMemory(str(error), error.during)
        # Here the error is gone, and with it the frames that held the model and the trainer.
        _free(job.plan)
        changed, needed = _smaller(job, known, failed, tried)
        start = job.folders.go_back()
        if isinstance(train, Stream) and not start:
            train.go_on(beginning)
        job = _adapted(job, changed, needed, failed.during)
        name = job.recipe.model
        built_empty(job.plan, pretrained.config(known.model, name), name)  # the new set must suit the model, too


def _smaller(job: Job, known: Known, failed: OutOfMemory, tried: list[Try]) -> tuple[Choice, int]:
    """Choose the next set; also return what the failed one needs [bytes]. Add the failed one to ``tried``."""
    strategy = job.plan.parallel["strategy"]
    if strategy != "none":
        raise _stopped(failed, f"a run with parallel.strategy={strategy} cannot change its set by itself")
    if known.shape is None:
        raise _stopped(failed, "this kind of model cannot be estimated, so no smaller set is known")
    in_evaluation = failed.during.startswith("the evaluation")
    # What ran out must get smaller, and nothing else.
    rows = Evaluated(known.rows["eval"].longest, known.rows["eval"].longest) if in_evaluation else Evaluated(1, 1)
    target = Target(known.shape, job.plan.device, evaluated=rows)
    recipe = in_force(as_long_as(known.longest, job.recipe), job.plan.device)
    needed = target.memory(recipe).needed_bytes
    changed = "at first"
    if tried:
        changed = f"then {adaptations.in_words(job.folders.adapted[-1].set)}"
    tried.append(Try(changed, needed, failed.during))
    if len(tried) > TRIES:
        _show(job, tried)
        raise _stopped(failed, f"{TRIES} smaller sets ran out, too")
    allowed = _allowed(job.recipe, known, in_evaluation=in_evaluation)
    for share in SMALLER:
        choice = smaller(target, recipe, _lengths(recipe, known), share * needed, allowed)
        if choice:
            return choice, needed
    _show(job, tried)
    raise _stopped(failed, f"no set with the same results needs less than {share:.0%} of {human(needed)}")


def _adapted(job: Job, choice: Choice, needed: int, during: str) -> Job:
    """Record the choice, say so in one line, and return the job with it."""
    folders = job.folders
    was, now = adaptations.differing(job.recipe, choice.recipe)
    step = folders.start.step if folders.start else 0
    adaptation = Adaptation(
        step=step, during=during, was=was, set=now, needed_bytes=needed, chosen_bytes=choice.memory.needed_bytes
    )
    changed = adaptations.applied(job.recipe, [adaptation])
    folders.adapt(adaptation)
    job.console.print(what_ran.adapted(adaptation.model_dump()))
    return replace(job, recipe=changed, plan=resolve(changed, job.plan.device))


def _allowed(recipe: Recipe, known: Known, *, in_evaluation: bool) -> Callable[[Recipe], bool]:
    """Return a function that says whether the run can go on with a set; see the module's docstring."""
    config = find_config(known.model)
    model_draws = any(value for name, value in config.items() if "drop" in name)
    kept = set()
    if recipe.lora.dropout or model_draws or recipe.data.stream:
        kept.add("train.batch_size")
    if model_draws:
        kept.add("tricks.attention")
    if recipe.tricks.optimizer != "adamw_8bit":
        kept.add("tricks.paged_optimizer")
    if recipe.tricks.precision == "fp16":
        kept.add("tricks.optimizer_in_backward")

    def allowed(changed: Recipe) -> bool:
        was, now = adaptations.differing(recipe, changed)
        if not kept.isdisjoint(now):
            return False
        if not in_evaluation:
            return True
        more_rows = changed.train.batch_size - recipe.train.batch_size
        saves = more_rows < 0 or any(now.get(field) == value for field, value in IN_EVALUATION.items())
        costs = more_rows > 0 or any(was.get(field) == value for field, value in IN_EVALUATION.items())
        return saves and not costs

    return allowed


def _lengths(recipe: Recipe, known: Known) -> Lengths:
    """Return the lengths of the training rows; those of a stream and of packed rows are taken as full."""
    train = known.rows["train"]
    if isinstance(train, Stream) or recipe.tricks.packing:
        return full(recipe, "")
    each = tuple(sorted(len(row["input_ids"]) for row in train.rows))
    return Lengths(each[-1], padded_mean(each, recipe.train.batch_size), len(each), each=each)


def _free(plan: Plan) -> None:
    """Give back the memory of a model and a trainer that nothing refers to any more."""
    if not plan.steps_by_torch:
        GlobalOptimManager.get_instance().initialize()  # it remembers the embedding of each model
    if plan.compiled:
        torch.compiler.reset()
    gc.collect()  # the trainer and its callbacks refer to each other
    if plan.device.kind == "cuda":
        torch.cuda.empty_cache()


def _show(job: Job, tried: list[Try]) -> None:
    """Print a table of the sets that ran out of memory."""
    wide = max(len(one.during) for one in tried)
    job.console.print(f"{'needs (estimate)':>16}  {'ran out in':{wide}}  set")
    for one in tried:
        job.console.print(f"{human(one.needed_bytes):>16}  {one.during:{wide}}  {one.changed}")


def _stopped(failed: OutOfMemory, why: str) -> OutOfMemory:
    return OutOfMemory(f"{failed}; train.on_oom=adapt: {why}")


def doubts(memory: Bill | None) -> list[str]:
    """Warn before anything is loaded if the run may not fit by the estimate, which is an upper one."""
    if memory is None or memory.verdict == "fits":
        return []
    has = human(memory.facts.device.memory_bytes)
    found = f"by estimate the run needs {human(memory.needed_bytes)} of {has}"
    if memory.verdict == "tight":
        return [f"{found}: {trust.TIGHT}"]
    return [f"{found}, so it does not fit; cria plan says what would help"]
