"""Make a training of a loaded model, guard it while it runs, and sum up what happened (Loaded -> Training -> Run)."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from cria_tricks.common.errors import BadInput, Diverged, Interrupted, Unwritten
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.stream import Stream
from cria_tricks.load.model import Loaded
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.models import pretrained
from cria_tricks.processes.world import World
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoint, Checkpoints
from cria_tricks.techniques.packing import PackedRows
from cria_tricks.trainer import loop
from cria_tricks.trainer.checkpoint import position, rescue
from cria_tricks.trainer.evaluate import evaluate, evaluated
from cria_tricks.trainer.samples import Samples
from cria_tricks.trainer.steps import micro_batches_at_once
from cria_tricks.trainer.stops import KeepBest, Patience, SaveOnClock, StopOnBudget, StopOnSignal
from cria_tricks.trainer.training import Rows, Training


@dataclass(frozen=True)
class Run:
    """The results of a finished training run.

    Attributes:
        history: one entry per optimizer step (``step``, ``loss``, ``peak_bytes``, ``tokens``,
            ``trained_tokens``, ``step_seconds``, ...) and per evaluation (``step``, ``eval_loss``, ...).
        steps: optimizer steps, those that the loss scaler skipped included.
        skipped_steps: steps whose fp16 gradients overflowed, so that nothing was updated (with steps in the backward
            pass: nothing from the overflow on).
        planned_steps: steps that the recipe asked for; more than ``steps`` when the time budget or
            ``train.patience`` ended the run.
        train_rows: rows of an epoch, counted after packing if they were packed; ``None`` for a stream.
        attention_kernel: the one that ran, as :class:`cria_tricks.measure.counting.WatchAttention` names it.
        warnings: sentences about what was found in the first batch.
        lengthened: an entry for each time that the run was resumed with more steps than before, if its learning rates
            so far were not those of the longer run: ``step``, and ``lengthened_from``, the steps planned before.
        stopped_early: where and why ``train.patience`` ended the run, as :class:`~cria_tricks.trainer.stops.Patience`
            says it; else empty.
        goes_on: whether these are the results so far of a run that goes on, for ``train.keep_best``.
    """

    history: list[dict[str, Any]]
    steps: int
    skipped_steps: int
    planned_steps: int
    train_rows: int | None
    attention_kernel: str
    warnings: tuple[str, ...] = ()
    lengthened: tuple[dict[str, int], ...] = ()
    stopped_early: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False

    @property
    def training(self) -> list[dict[str, Any]]:
        """The entries of the optimizer steps."""
        return [entry for entry in self.history if "loss" in entry]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The entries of the evaluations."""
        return [entry for entry in self.history if "eval_loss" in entry]


def training(
    loaded: Loaded,
    plan: Plan,
    settings: Train,
    train_rows: Rows | Stream,
    eval_rows: Rows,
    checkpoints: Checkpoints,
    *,
    pad_id: int,
    meter: Meter | None = None,
    start: Checkpoint | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    world: World | None = None,
    samples: Samples | None = None,
    keep: Callable[[Run], None] | None = None,
    known: float = math.inf,
) -> Training:
    """Make the training of a loaded model, for :func:`guarded` and the loop to carry out.

    The model is trained in place, and evaluated before, during and after that.

    Args:
        loaded: from :func:`cria_tricks.load.model.load`.
        plan: the plan by which the model was loaded.
        settings: the recipe's ``train`` fields.
        train_rows: with ``input_ids`` and ``labels``; or a stream of such rows.
        eval_rows: the same; if it is empty, nothing is evaluated.
        checkpoints: writes and finds the checkpoints of the run.
        pad_id: token id that fills up shorter rows.
        meter: counts bytes and seconds; made here when left out.
        start: the checkpoint to resume from; from the beginning when left out.
        callbacks: more callbacks, e.g. a progress bar.
        world: the processes that share the run; this one alone when left out.
        samples: the rows that are answered at each evaluation.
        keep: keeps the weights after an evaluation with a loss below ``known`` and all before; in all processes.
        known: the loss of what an earlier part of the run has kept.

    Raises:
        BadInput: if a stream cannot go on where the checkpoint left it.
    """
    world = world or World()
    meter = meter or Meter(plan.device.kind, compiled=plan.compiled)
    stop = StopOnSignal(world)
    # Writing the result at the end is taken to be as slow as writing a checkpoint, and so is keeping the best.
    writes = 3 if settings.keep_best else 2
    budget = StopOnBudget(settings.time_budget, lambda: meter.elapsed, lambda: writes * checkpoints.seconds)
    patience = Patience(settings.patience)
    rows = _laid_out(train_rows, plan, start)
    run = Training(
        model=loaded.model,
        weights=loaded.weights,
        plan=plan,
        settings=settings,
        rows=rows,
        eval_rows=eval_rows,
        collate=PadToLongest(pad_id, *_shape_of_a_window(plan, settings, rows, eval_rows)),
        checkpoints=checkpoints,
        meter=meter,
        world=world,
        stop=stop,
        patience=patience,
        callbacks=[stop, budget, SaveOnClock(settings.save_minutes), *callbacks, patience],
        samples=samples,
        start=start,
    )
    if keep:
        run.callbacks.append(KeepBest(lambda: keep(summed_up(run, goes_on=True)), known))
    return run


@contextlib.contextmanager
def guarded(run: Training) -> Iterator[None]:
    """Let a training run inside the block, and turn what may happen to it into one clear end.

    A signal ends it after a whole step, a lack of memory is put into words, and a base with NaN is named. If it ends
    early, it is evaluated once more.

    Raises:
        BadInput: if the checkpoint cannot be loaded into this model, the model's activations overflow fp16, or its
            weights hold NaN or infinity, so that the first loss is not finite.
        Diverged: if the loss or the gradients are not finite; only steps in the backward pass have changed weights.
        Interrupted: if SIGINT, SIGTERM or SIGHUP came; a checkpoint was written, if any step was done.
        OutOfMemory: if it does not fit. A single process then saves the last whole step, if its weights are unchanged.
        Unwritten: if a checkpoint could not be written; the earlier ones are whole.
    """
    run.meter.track(every_tensor(run.model))
    with run.stop:
        try:
            with rescue(run):
                with run.meter.phase("train"):
                    yield
                run.callbacks.remove(run.patience)  # the training has ended, so it can end nothing more
                if run.eval_rows and not evaluated(run.state) and not run.stop.requested:
                    evaluate(run)
        except Unwritten:  # a BadInput, too, but not about numbers
            raise
        except (Diverged, BadInput):  # BadInput: fp16 cannot hold the activations of the first batch
            # Only now is every weight read. If the base itself holds NaN, no setting helps.
            pretrained.refuse_nonfinite(Path(run.weights.path), run.weights.name)
            raise
        if run.stop.requested:
            step = run.state.global_step
            kept = f"its state is in {run.checkpoints.folder}" if step else "there was nothing to save yet"
            raise Interrupted(f"interrupted after step {step}; {kept}")


def fit(run: Training) -> Run:
    """Carry out a training, and return what happened; the errors are those of :func:`guarded`.

    It is for those who have a model: benchmarks, checks and tests. ``run/train.py`` does the same around it.
    """
    with guarded(run):
        loop.train(run)
    return summed_up(run)


def _laid_out(rows: Rows | Stream, plan: Plan, start: Checkpoint | None) -> Rows | Stream:
    """Pack rows if the plan says so; move a resumed stream to its position in the checkpoint."""
    if isinstance(rows, Stream):
        if start:
            rows.go_on(position(start))
        return rows
    return PackedRows(rows, plan.collator["packed_length"]) if plan.collator else rows


def _shape_of_a_window(plan: Plan, settings: Train, rows: Rows | Stream, eval_rows: Rows) -> tuple[int, int]:
    """Return rows of a batch and tokens of a row, if all batches must have one shape; (0, 0) if they need not.

    A pipeline takes all micro-batches of a step (a window) as one batch, and torch's stages keep the shapes of their
    first step. So all rows are padded to the longest row of the run, and a shorter last window gets rows of padding.
    """
    if plan.parallel["strategy"] != "pipeline" or isinstance(rows, Stream):
        return 0, 0
    longest = max(len(row["input_ids"]) for row in itertools.chain(rows, eval_rows))
    return settings.batch_size * micro_batches_at_once(plan), longest


def summed_up(run: Training, *, goes_on: bool = False) -> Run:
    """Collect what happened in a training; ``goes_on`` if it has not ended."""
    state = run.state
    number = None
    if not run.stream:
        number = len(run.rows)
    # The others say where the run was lengthened.
    history = [entry for entry in state.log_history if "loss" in entry or "eval_loss" in entry]
    return Run(
        history=history,
        steps=state.global_step,
        skipped_steps=sum(entry.get("skipped", 0) for entry in history),
        planned_steps=state.max_steps,
        train_rows=number,
        attention_kernel=run.attention_kernel,
        warnings=tuple(run.warnings),
        lengthened=tuple(entry for entry in state.log_history if "lengthened_from" in entry),
        stopped_early={} if goes_on else run.patience.stopped,
        goes_on=goes_on,
    )
