r"""Layer by layer: all micro-batches of a window (an optimizer step) go through a block before the next block runs.

Saves    PCIe traffic of streamed layers: each pass fetches a block once for the whole window, and not once for each of
         its k micro-batches, so 1 / k of the fetches remain
Costs    activations: the block inputs of all k micro-batches are saved at once, k L s, and the gradient of the last
         block's output for each micro-batch
Claim    exact: against the same gradient accumulation without it, a gradient is the same sum in the same order. With
         dropout the micro-batches draw other masks
Needs    stream_layers and gradient_accumulation above 1; without them it has no effect
Breaks   activation_offload=overlapped, which is refused. Accumulation then saves less memory: only the logits and the
         open block (the one that is being recomputed) are those of one micro-batch
Sources  Pudipeddi et al. 2020, arXiv:2002.05645 (L2L), sec. 3.2; Lamy-Poirier 2022, arXiv:2211.05953 (breadth-first)
Ours     a few functions around an unchanged model: a first run of each micro-batch only notes the arguments of its
         blocks, and a second one only computes the loss, from the last block's output

Shapes: s = B T D elements, a block's input; k micro-batches; L blocks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

REFERENCE = ("one_pass",)
PLAIN = """
import torch
from transformers import AutoModelForCausalLM
from cria_tricks.techniques.layer_by_layer import (
    one_pass,
)  # no library has it for a model of transformers

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
ids = torch.arange(3, 19)[None]
one_pass(
    model.model.layers, [lambda: model(ids, labels=ids).loss] * 2, torch.Tensor.backward
)
"""


class _NotedAll(Exception):
    """The last block was called."""


def one_pass(
    blocks: Sequence[torch.nn.Module],
    runs: Sequence[Callable[[], torch.Tensor]],
    backward: Callable[[torch.Tensor], Any],
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[torch.Tensor]:
    """Run a window's micro-batches through the blocks together, forward and backward.

    Args:
        blocks: of a model, in their order; each maps (B, T, D) to (B, T, D).
        runs: for each micro-batch a function that runs the whole model, and returns the loss.
        backward: runs the backward pass of a loss, which may be scaled.
        around: makes the context around a block. A run's own autocast is there anyway.

    Returns:
        The losses, detached. The gradients are added to ``.grad``.
    """
    calls = [_noted(blocks, run) for run in runs]
    hidden = [first for first, *_ in calls]
    for number, block in enumerate(blocks):
        # The backward pass goes the other way, so it adds up the gradients in the order of the micro-batches.
        for each in reversed(range(len(runs))):
            _, given, autocast = calls[each]
            with around(), autocast():
                hidden[each] = block(hidden[each], **given[number])
    del calls
    losses = []
    ends = []
    for run, output in zip(runs, hidden, strict=True):
        # Cut here, so that only one micro-batch has logits at a time.
        end = output.detach().requires_grad_(output.requires_grad)
        with _instead(blocks, functools.partial(_give, len(blocks) - 1, end)):
            loss = run()
        backward(loss)
        losses.append(loss.detach())
        ends.append(end)
    if ends[0].requires_grad:
        torch.autograd.backward(hidden, [end.grad for end in ends])
    return losses


def _noted(
    blocks: Sequence[torch.nn.Module], run: Callable[[], Any]
) -> tuple[torch.Tensor, list[dict[str, Any]], Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Return the first block's input, the further arguments of each block, and the autocast of a run."""
    given: list[dict[str, Any]] = []
    first: list[torch.Tensor] = []
    autocasts: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [contextlib.nullcontext]

    def note(number: int, x: torch.Tensor, /, **more: Any) -> torch.Tensor:
        first[:] = [x]
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            autocasts[:] = [functools.partial(torch.autocast, kind, torch.get_autocast_dtype(kind))]
        given.append(more)
        if number == len(blocks) - 1:
            raise _NotedAll
        return x

    with _instead(blocks, note), contextlib.suppress(_NotedAll):
        run()
    return first[0], given, autocasts[0]


def _give(last: int, end: torch.Tensor, number: int, x: torch.Tensor, /, **more: Any) -> torch.Tensor:
    """Stand in for a block: the last one gives ``end``, and the others what they get."""
    return end if number == last else x


@contextlib.contextmanager
def _instead(blocks: Sequence[Any], forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let the blocks run another function, which also gets the block's number."""
    checkpointing = [block.__dict__.get("gradient_checkpointing") for block in blocks]
    for number, block in enumerate(blocks):
        block.forward = functools.partial(forward, number)
        block.gradient_checkpointing = False  # up to transformers 5.22 the call of a block is checkpointed, not forward
    try:
        yield
    finally:
        for block, before in zip(blocks, checkpointing, strict=True):
            del block.forward, block.gradient_checkpointing
            if before is not None:
                block.gradient_checkpointing = before
