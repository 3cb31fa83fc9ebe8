"""Accumulate a window in a pipeline: one of torch's schedules runs all its micro-batches, instead of a loop over them.

A batch of the loop is here a window: all micro-batches that this pipeline computes in a step. (With
``parallel.pipelines`` > 1 that is only its share of the step.) The schedule needs all of them at once, because it
decides which micro-batch runs its forward or its backward pass next.
"""

import contextlib
from collections.abc import Iterator

import torch

from cria_tricks.measure.counting import WatchAttention
from cria_tricks.trainer import forward
from cria_tricks.trainer.pipeline_stage import Stage
from cria_tricks.trainer.training import Batch, Training


def stage(run: Training) -> Stage | None:
    """Make the stage that this process computes; the strategy has removed the other stages' blocks by then."""
    if run.plan.parallel["strategy"] != "pipeline":
        return None

    @contextlib.contextmanager
    def around_a_pass() -> Iterator[None]:
        with forward.autocast(run.plan, run.device.type), forward.contexts(run.model, run.plan):
            yield

    scaler = run.scaler if run.scaler.is_enabled() else None
    return Stage(run.model, run.plan, run.world, around_a_pass, scaler)


def accumulate(run: Training, window: list[Batch], tokens: torch.Tensor) -> torch.Tensor:
    """Run all passes of a step, and return its mean loss per trained token, the same in all processes."""
    [batch] = window
    run.look_at_the_first_batch(batch)
    run.moment = "forward and backward passes"  # the error names it if memory runs out
    with run.step_meter.watching(batch):
        loss = _steps(run, batch, tokens)
    run.refuse_infinite(loss)
    run.step_meter.count(batch)
    return loss


def _steps(run: Training, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
    """Run the step, and record in the first one of this process which attention kernel runs."""
    assert run.stage is not None
    if run.attention_kernel:
        return run.stage.step(batch, tokens)
    if run.plan.compiled:  # compiled kernels cannot be watched, so run forward once more without compilation
        with torch.no_grad(), run.drawing_nothing(), run.eager(), WatchAttention() as watch:
            run.stage.loss_sum(batch)
        loss = run.stage.step(batch, tokens)
    else:
        with WatchAttention() as watch:
            loss = run.stage.step(batch, tokens)
    run.attention_kernel = watch.kernel
    return loss
