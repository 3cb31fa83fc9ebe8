"""Loaded -> Run: the shared trainer, set up for one run and started."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from cria_tricks.common.errors import Interrupted
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.stream import Stream
from cria_tricks.load.model import Loaded
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.processes.world import World
from cria_tricks.recipe import Train
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoint, Checkpoints
from cria_tricks.trainer.arguments import evaluated, training_arguments
from cria_tricks.trainer.callbacks import Agree, SaveOnClock, StopOnBudget, StopOnSignal
from cria_tricks.trainer.resumable import position
from cria_tricks.trainer.shared import SharedTrainer
from cria_tricks.trainer.shares import with_filler
from cria_tricks.tricks.packing import pack


@dataclass(frozen=True)
class Run:
    """What a finished training run has to say.

    Attributes:
        history: one entry per optimizer step (``step``, ``loss``, ``peak_bytes``, ``tokens``,
            ``trained_tokens``, ``step_seconds``, ...) and per evaluation (``step``, ``eval_loss``, ...).
        steps: optimizer steps, those that the loss scaler skipped included.
        skipped_steps: steps whose fp16 gradients overflowed, so that nothing was updated.
        planned_steps: what the recipe asked for; more than ``steps`` when the time budget ended the run.
        train_rows: rows of an epoch, packed ones when they were packed; ``None`` for a stream.
        attention_kernel: the one that ran, as :class:`cria_tricks.hardware.attention_kernels.WatchAttention` names it.
        warnings: sentences about what was found in the first batch.
        lengthened: an entry for each time that the run was lengthened and so is not the longer run: ``step``, and
            ``lengthened_from``, the steps that it was to have.
    """

    history: list[dict[str, Any]]
    steps: int
    skipped_steps: int
    planned_steps: int
    train_rows: int | None
    attention_kernel: str
    warnings: tuple[str, ...] = ()
    lengthened: tuple[dict[str, int], ...] = ()

    @property
    def training(self) -> list[dict[str, Any]]:
        """The entries of the optimizer steps."""
        return [entry for entry in self.history if "loss" in entry]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The entries of the evaluations."""
        return [entry for entry in self.history if "eval_loss" in entry]


def fit(
    loaded: Loaded,
    plan: Plan,
    settings: Train,
    train_rows: Sequence[dict[str, list[int]]] | Stream,
    eval_rows: Sequence[dict[str, list[int]]],
    checkpoints: Checkpoints,
    *,
    pad_id: int,
    meter: Meter | None = None,
    start: Checkpoint | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    world: World | None = None,
) -> Run:
    """Train the loaded model in place, evaluating before, during and after.

    Args:
        loaded: from :func:`cria_tricks.load.model.load`.
        plan: the same plan.
        settings: the recipe's ``train`` fields.
        train_rows: with ``input_ids`` and ``labels``; or a stream of such.
        eval_rows: the same; may be empty, then nothing is evaluated.
        checkpoints: where they are written.
        pad_id: token id that fills up shorter rows.
        meter: counts bytes and seconds; made here when left out.
        start: the checkpoint to go on from; from the beginning when left out.
        callbacks: more callbacks, e.g. a progress bar.
        world: the processes that share the run; this one alone when left out.

    Raises:
        BadInput: if the checkpoint cannot be loaded into this model, or its activations overflow fp16.
        Diverged: if the loss or the gradients are not finite; the trained weights are those before that step.
        Interrupted: if SIGINT or SIGTERM came; a checkpoint was written.
        OutOfMemory: if it does not fit; a checkpoint was written unless the optimizer had begun its step.
        Unwritten: if a checkpoint could not be written; the earlier ones are whole.
    """
    meter = meter or Meter(plan.device.kind, compiled=plan.compiled)
    stream = train_rows if isinstance(train_rows, Stream) else None
    if stream and start:
        stream.go_on(position(start))
    rows = [] if isinstance(train_rows, Stream) else train_rows
    if plan.collator:
        rows = pack(rows, plan.collator["packed_length"])
    number = None if stream else len(rows)
    world = world or World()
    stop = StopOnSignal(world)
    budget = StopOnBudget(settings.time_budget, lambda: meter.elapsed, lambda: checkpoints.seconds)
    trainer = SharedTrainer(
        plan=plan,
        meter=meter,
        model=loaded.model,
        checkpoints=checkpoints,
        stop=stop,
        world=world,
        args=training_arguments(plan, settings, number, bool(eval_rows), checkpoints.folder, start),
        stream=stream,
        train_dataset=stream or with_filler(rows, pad_id),
        eval_dataset=with_filler(eval_rows, pad_id) if eval_rows else None,
        data_collator=PadToLongest(pad_id),
        callbacks=[stop, budget, SaveOnClock(settings.save_minutes), *callbacks, Agree(world)],
    )
    trainer.remove_callback(PrinterCallback)  # our own progress bar prints
    if world.data_rank:  # each share of the rows has draws of its own; the first one's are those of a single process
        torch.manual_seed(settings.seed + world.data_rank)
    meter.track(every_tensor(loaded.model))
    with stop, contextlib.closing(trainer.step):
        with trainer.rescue():
            with meter.phase("train"):
                trainer.train(resume_from_checkpoint=str(start.path) if start else None)
            state = trainer.state
            if eval_rows and not evaluated(state) and not stop.requested:
                trainer.evaluate()
        if stop.requested:
            kept = f"its state is in {checkpoints.folder}" if state.global_step else "there was nothing to save yet"
            raise Interrupted(f"interrupted after step {state.global_step}; {kept}")
    # Without the Trainer's closing entry, whose averages cover only the part after a resume.
    history = [entry for entry in state.log_history if "loss" in entry or "eval_loss" in entry]
    skipped = sum(entry.get("skipped", 0) for entry in history)
    lengthened = tuple(entry for entry in state.log_history if "lengthened_from" in entry)
    kernel, warnings = trainer.attention_kernel, tuple(trainer.warnings)
    return Run(history, state.global_step, skipped, state.max_steps, number, kernel, warnings, lengthened)
