"""Accumulate a window of streamed blocks: all its micro-batches go through each block together."""

import contextlib
import functools
from collections.abc import Iterator

import torch

from cria_tricks.measure.counting import WatchAttention
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.techniques.layer_by_layer import one_pass
from cria_tricks.trainer import forward
from cria_tricks.trainer.training import Batch, Training


def accumulate(run: Training, window: list[Batch], tokens: torch.Tensor) -> torch.Tensor:
    """Add up the gradients of a window in one pass over the blocks, and return its mean loss per trained token."""
    run.look_at_the_first_batch(window[0])
    watch = WatchAttention()
    known = run.attention_kernel

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with forward.contexts(run.model, run.plan), contextlib.nullcontext() if known else watch:
            yield

    def backward(loss: torch.Tensor) -> None:
        run.scaler.scale(loss).backward()

    with run.step_meter.watching(*window):
        runs = [functools.partial(run.loss, batch, tokens) for batch in window]
        losses = one_pass(blocks_of(run.model), runs, backward, around)
    run.attention_kernel = known or watch.kernel  # run.loss has seen no block run
    for number, (batch, loss) in enumerate(zip(window, losses, strict=True), 1):
        run.refuse_infinite(loss)
        run.step_meter.count(batch)
        if number < len(window):
            run.tell("on_substep_end")
    return sum(losses, torch.zeros((), device=run.device))
