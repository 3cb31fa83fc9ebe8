"""The loop in which every run trains: forward, backward, update. Read this file first.

What it does beyond the textbook, and why (a window is the micro-batches of one optimizer step):

- The loss is a sum over trained tokens, divided once by their number. So it is a true mean over tokens, also for
  micro-batches with rows of different lengths, for a shorter last window, and in the evaluation.
- A loss or a gradient that is not finite stops the run before the optimizer changes any weight. (With steps in the
  backward pass, weights whose gradients came before it have taken their steps.)
- A resumed run equals the uninterrupted one, bit for bit (``trainer/checkpoint.py``).
- Bytes, tokens and seconds of every step go into the history. Checkpoints keep it, so a resumed run reports all of it.
- A run of several processes is the same run: windows of the same rows in the same order, sums over all processes, one
  history (``processes/world.py``).

On the same rows transformers' ``Trainer`` has the same losses and the same weights (``tests/test_loop.py``).
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import set_seed

from cria_tricks.common.errors import Diverged
from cria_tricks.data.batches import trained_tokens
from cria_tricks.load.losses import LossSum
from cria_tricks.measure.memory import every_tensor
from cria_tricks.parallel import dtensor
from cria_tricks.trainer import checkpoint, forward, one_pass, optimizer, pipeline, random_state
from cria_tricks.trainer.evaluate import evaluate, evaluated
from cria_tricks.trainer.step_meter import StepMeter
from cria_tricks.trainer.steps import micro_batches_of_a_step
from cria_tricks.trainer.strategy import Spread
from cria_tricks.trainer.training import Batch, Training


def train(run: Training) -> None:
    """Train to the last step, or until something asks for the end; evaluate and save whenever that is due."""
    prepare(run)
    run.tell("on_train_begin")
    # Also if a resumed run stopped at a step whose evaluation was due, but is not in its checkpoint.
    if _evaluation_is_due(run) and not evaluated(run.state):
        evaluate(run)
    accumulate = accumulation(run)
    windows = _windows(run)
    run.model.zero_grad()
    while run.state.global_step < run.steps.total and not run.control.should_training_stop:
        _step(run, next(windows), accumulate)
        if run.control.should_evaluate:
            evaluate(run)
        if run.control.should_save:
            checkpoint.save(run)
            run.control.should_save = False
            run.tell("on_save")
    run.tell("on_train_end")


def prepare(run: Training) -> None:
    """Divide the model over the processes, make what updates it, and load the checkpoint to go on from."""
    set_seed(run.settings.seed)
    if run.world.draw:  # dropout must differ between processes; those with draw 0 keep a single process's numbers
        torch.manual_seed(run.settings.seed + run.world.draw)
    if run.start:
        run.state = checkpoint.load_state(run.start, run.steps.total)
        checkpoint.load_weights(run.model, run.start)
    gc.collect()  # what loading has left behind; on a card the allocator then has no cached blocks
    torch.cuda.empty_cache()
    loss_sum = forward.loss_sum(run.model, run.plan, run.device.type)
    run.spread = Spread(LossSum(run.model, loss_sum), run.plan, run.world)
    run.spread.over_processes()  # before the optimizer is given the parameters: sharding replaces them
    run.meter.track(every_tensor(run.model))
    run.optimizer = optimizer.make_optimizer(run.model, run.plan, run.settings)
    run.scheduler = optimizer.make_scheduler(run.optimizer, run.settings, run.steps.total)
    run.scaler = optimizer.make_scaler(run.plan, run.world.stage_group)
    run.in_backward = optimizer.steps_in_backward(run.plan, run.model, run.optimizer, run.limit, run.scaler)
    run.stage = pipeline.stage(run)
    run.step_meter = StepMeter(run.model, run.optimizer, run.meter, run.world)
    if run.start:
        checkpoint.load_optimizer(run, run.start)


Accumulate = Callable[[Training, list[Batch], torch.Tensor], torch.Tensor]
"""Adds up the gradients of a window, and returns its mean loss per trained token."""


def accumulation(run: Training) -> Accumulate:
    """Return how the micro-batches of a window are run."""
    if run.stage:
        return pipeline.accumulate
    return one_pass.accumulate if run.plan.streaming.get("layer_by_layer") else one_by_one


def one_by_one(run: Training, window: list[Batch], tokens: torch.Tensor) -> torch.Tensor:
    """Add up the gradients of a window's micro-batches, one by one, and return its mean loss per trained token."""
    total = torch.zeros((), device=run.device)
    for number, batch in enumerate(window, 1):
        run.look_at_the_first_batch(batch)
        last = number == len(window)
        with run.step_meter.watching(batch), run.spread.window(last=last):
            loss = run.loss(batch, tokens)
            run.scaler.scale(loss).backward()  # adds to the gradients of the window's earlier micro-batches
        loss = loss.detach()  # lets go of the graph, whose nodes may still hold activations (those of int8 do)
        run.refuse_infinite(loss)
        run.step_meter.count(batch)
        total += loss
        if not last:
            run.tell("on_substep_end")
    return total


def _step(run: Training, window: list[Batch], accumulate: Accumulate) -> None:
    """Take one optimizer step with the micro-batches of a window, and write its entry of the history."""
    tokens = run.world.sum(torch.stack([trained_tokens(batch) for batch in window]).sum())
    run.control.should_save = run.control.should_evaluate = False
    run.model.train()
    run.tell("on_step_begin")
    with run.step_meter.whole_step():
        loss = accumulate(run, window, tokens)
        run.moment = "optimizer step"
        norm = clip(run)
        run.tell("on_pre_optimizer_step")
        scale = run.scaler.get_scale()
        run.scaler.step(run.optimizer)  # calls optimizer.step(), unless a gradient overflowed
        run.scaler.update()
        skipped = run.scaler.get_scale() < scale  # after an overflow the scaler goes on with a smaller factor
        run.tell("on_optimizer_step")
        learning_rate = run.scheduler.get_last_lr()[0]
        if not skipped:
            run.scheduler.step()
        run.model.zero_grad()  # otherwise the next window would add to these gradients
        run.state.global_step += 1
        run.state.epoch = _epochs_done(run)
        _ask_for_what_is_due(run)
        measured = run.step_meter.measured(run.state, skipped=skipped)
    run.random_state = random_state.read()  # the next step changes it; if memory runs out there, it is needed
    run.position = run.stream.state() if run.stream else {}
    mean = run.world.sum(loss.double().cpu()).item() / run.world.data
    if run.stage:
        measured["idle_share"] = run.stage.idle_share
    run.log({"loss": mean, "grad_norm": norm.item(), "learning_rate": learning_rate, **measured})


def clip(run: Training) -> torch.Tensor:
    """Clip the gradients, and stop the run if their norm, which clipping needs anyway, is not finite.

    With a loss scaler (fp16) the run goes on, because the scaler finds such gradients itself and skips the step. If
    weights take their steps in the backward pass, the norm comes too late to clip anything.
    """
    done = "stopped before the optimizer touched any weight"
    run.scaler.unscale_(run.optimizer)  # before clipping, because the limit is meant for the true gradients
    if run.in_backward:
        done = f"stopped when {run.in_backward.steps} weights had taken their step, so resume from a checkpoint"
        norm = run.in_backward.norm()
    elif run.spread.in_pieces:
        norm = dtensor.clip(run.model.parameters(), run.limit, run.world.stage_group)
    else:
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.limit)
    if not run.scaler.is_enabled() and not torch.isfinite(norm):
        raise Diverged(
            f"the gradients are not finite at step {run.state.global_step + 1}; {done}. Try a lower train.learning_rate"
        )
    return norm


def _windows(run: Training) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each optimizer step, on the device, epoch after epoch without end.

    An epoch's last window has fewer micro-batches when the rows do not divide evenly. The random state of a
    checkpoint is restored where it was saved: before an epoch's loader begins, which draws a number, or after that.
    """
    size = run.plan.training["gradient_accumulation_steps"]
    epoch, done = (0, 0) if run.stream else divmod(run.state.global_step, run.steps.epoch)
    resumed = run.start
    while True:
        if resumed and not done:
            checkpoint.load_random_state(run, resumed)
        batches = iter(_loader(run, epoch, skip=done * size))
        if resumed and done:
            checkpoint.load_random_state(run, resumed)
        while window := [run.on_device(batch) for batch in itertools.islice(batches, size)]:
            yield window
        epoch, done, resumed = epoch + 1, 0, None


def _loader(run: Training, epoch: int, skip: int) -> DataLoader[Any]:
    """Return the loader of this process's micro-batches in an epoch, without the first ones.

    A stream's loader gets a generator of its own, because a loader draws a number when it begins: a resumed run
    begins once more, and would draw once more from the generator of dropout.
    """
    if run.stream:
        return run.data_loader(run.stream, batch_size=run.settings.batch_size, generator=torch.Generator())
    order = row_order(len(run.rows), run.settings.seed + epoch)
    return run.loader(run.rows, order, skip)


def _epochs_done(run: Training) -> float:
    """Count the epochs as one process would; a rank may have a filler micro-batch more (``trainer/training.py``).

    For a stream: how often all of its rows were given.
    """
    if run.stream:  # the minimum over the ranks
        return -run.world.max_over_ranks(-run.stream.passes)[0]
    micro_batches = math.ceil(len(run.rows) / run.settings.batch_size)
    window = micro_batches_of_a_step(run.plan)
    epochs, steps = divmod(run.state.global_step, run.steps.epoch)
    return epochs + min(steps * window, micro_batches) / micro_batches


def _evaluation_is_due(run: Training) -> bool:
    done = run.state.global_step
    return bool(run.steps.evaluate) and (done % run.steps.evaluate == 0 or done >= run.steps.total)


def _ask_for_what_is_due(run: Training) -> None:
    """Note what is due after this step, let callbacks ask for more, and make all processes agree."""
    done = run.state.global_step
    run.control.should_evaluate = _evaluation_is_due(run)
    run.control.should_save = done % run.steps.save == 0 or done >= run.steps.total
    run.tell("on_step_end")
    save, stop = run.world.max_over_ranks(run.control.should_save, run.control.should_training_stop)
    run.control.should_save = bool(save)
    run.control.should_training_stop = bool(stop)


def row_order(rows: int, seed: int) -> list[int]:
    """Shuffle the indices of the rows, as transformers' Trainer does for the same seed."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
