"""Evaluate during a run: the mean loss over all trained tokens of the evaluation rows, and answers to a few of them."""

import contextlib
import math
import time
from typing import Any

import torch
from transformers import TrainerState

from cria_tricks.common.errors import Diverged
from cria_tricks.trainer import forward
from cria_tricks.trainer.samples import Samples
from cria_tricks.trainer.step_meter import sizes
from cria_tricks.trainer.training import Training


def evaluated(state: TrainerState) -> bool:
    """Whether there was an evaluation after the last step."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def evaluate(run: Training) -> None:
    """Compute the mean loss over all trained tokens of all rows, whatever the batch size, and write its entry.

    A loader draws a random number when it begins. The random state is restored afterwards, so that evaluating more
    often, or once more after a resume, changes nothing in the training. There is no entry if a signal has cut the
    evaluation off; then the resumed run evaluates here first.
    """
    began = time.perf_counter()
    run.moment = "evaluation"
    run.control.should_evaluate = False
    run.model.eval()
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    loader = run.loader(run.eval_rows, range(len(run.eval_rows)))
    with run.meter.phase("evaluate"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for batch in map(run.on_device, loader):
            if any(run.world.max_over_ranks(run.stop.requested)):
                return _cut_off(run)
            run.look_at_the_first_batch(batch)
            padded, trained = sizes(batch)
            peak = run.meter.may_set_a_peak("evaluate", padded, trained)
            with run.meter.watch() if peak else contextlib.nullcontext():
                total += run.loss_sum(batch).double().cpu()
            tokens += trained
            run.tell("on_prediction_step")
    tokens = int(run.world.sum(torch.tensor(tokens)).item())
    loss = run.world.sum(total).item() / tokens
    if not math.isfinite(loss):
        raise Diverged(f"the evaluation loss is {loss} at step {run.state.global_step}. {run.what_to_try()}")
    metrics = {"eval_loss": loss, "eval_tokens": tokens, "eval_seconds": time.perf_counter() - began}
    if run.samples:
        metrics |= _answers(run, run.samples)
        if run.stop.requested:  # the answers are not whole
            return _cut_off(run)
    run.log(metrics)
    run.tell("on_evaluate", metrics=metrics)
    return None


def _cut_off(run: Training) -> None:
    """End the training at an evaluation that a signal has cut off."""
    run.control.should_training_stop = True
    run.control.should_save = run.state.global_step > 0


def _answers(run: Training, samples: Samples) -> dict[str, Any]:
    """Answer the rows of ``eval.samples``, in the compute dtype of training, and leave the random state alone."""
    began = time.perf_counter()
    caches = run.plan.peft.get("kind") != "side_network"
    watch = run.meter.watch() if run.meter.may_set_a_peak("answers", 0) else contextlib.nullcontext()
    # The autocast of training is around the model's own forward, but peft's generate calls the model below it. And each
    # new token has another shape, for which a compiled block would be compiled again.
    autocast = forward.autocast(run.plan, run.device.type)
    with run.meter.phase("answers"), run.drawing_nothing(), run.eager(), autocast, watch:
        found = samples.answered(run.model, run.settings.batch_size, caches, lambda: run.stop.requested)
    return {"eval_answers": found, "eval_answers_seconds": time.perf_counter() - began}
