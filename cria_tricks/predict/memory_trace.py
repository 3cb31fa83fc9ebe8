"""Record every allocation of a short training run on fake tensors, and replay it through the allocator's model.

The short run is what a card meets first: the model is loaded, a window of shorter rows is trained, then one of the
longest rows, then the evaluation. The order matters: the segments that the first window left behind are too small for
the second one, and the longer row is where readers run out of memory. A checkpoint is not part of it, because saving
copies tensors to the host one by one and allocates nothing on the card.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cria_tricks.bill.bill import WORKSPACES
from cria_tricks.measure.memory import INSIDE, LiveBytes
from cria_tricks.predict.allocator import DEFAULT, Block, CachingAllocator, Settings
from cria_tricks.predict.dry_run import FakeTraining, fake_training, fake_window
from cria_tricks.step_plan import Plan

SHORTER = 0.75
"""How long the rows of the first window are, as a share of the longest ones. Half of the Kwanzaa rows are shorter."""


class Event(NamedTuple):
    """An allocation, or a release.

    Attributes:
        tensor: a number for the storage; the release of a storage has the same one as its allocation.
        size: bytes that it needs; 0 for its release.
        moment: when in the run, for example ``"backward pass of 2,048 tokens"``.
        line: what it is: weights, gradients, optimizer states, activations, logits, batch or workspace.
    """

    tensor: int
    size: int
    moment: str
    line: str


class Recorder(LiveBytes):
    """Count live bytes, and record each allocation and release in order.

    Attributes:
        events: all of them so far.
        moment: the moment that new events get.
        line: the line of the bill that new events get, where a tensor does not say it itself.
        vocabulary: a tensor whose last dimension is as long holds logits.
    """

    def __init__(self, vocabulary: int):
        super().__init__()
        self.events: list[Event] = []
        self.moment, self.line = "load", "weights"
        self.vocabulary = vocabulary
        self._numbers: dict[int, int] = {}  # address of a storage that is alive -> its number
        self._allocations: dict[int, int] = {}  # number of a storage -> the place of its allocation in events

    def track(self, tensor: torch.Tensor) -> None:
        """Count and record a tensor, if its storage is new."""
        before = len(self._known)
        super().track(tensor)
        if len(self._known) == before:
            return
        key, (_, size) = next(reversed(self._known.items()))
        logits = self.line == "activations" and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        self._numbers[key] = self.allocation(size, "logits" if logits else self.line)

    def allocation(self, size: int, line: str) -> int:
        """Record an allocation, and return its number."""
        number = len(self._allocations)
        self._allocations[number] = len(self.events)
        self.events.append(Event(number, size, self.moment, line))
        return number

    def release(self, number: int) -> None:
        """Record a release."""
        self.events.append(Event(number, 0, self.moment, self.events[self._allocations[number]].line))

    def _free(self, key: int) -> None:
        super()._free(key)
        self.release(self._numbers.pop(key))

    def relabel(self, tensors: Sequence[torch.Tensor], line: str) -> None:
        """Give the allocations of these tensors another line, which only later events could tell."""
        for tensor in tensors:
            place = self._allocations[self._numbers[tensor.untyped_storage()._cdata]]
            self.events[place] = self.events[place]._replace(line=line)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inside = INSIDE.get(func.name())
        if inside:  # memory that the operation needs and returns while it computes
            self.release(self.allocation(inside(*args), self.line))
        return out


def memory_trace(
    plan: Plan, config: Any, rows: int, tokens: int, trained_share: float = 1.0, shorter: float = SHORTER
) -> list[Event]:
    """Return all allocations and releases of a short run, in order.

    Args:
        plan: what would run, on its own device.
        config: the model's config, from transformers.
        rows: rows of a micro-batch.
        tokens: tokens of the longest rows.
        trained_share: the share of the tokens that is trained, which only the chunked loss depends on.
        shorter: the length of the rows of the first window, as a share of ``tokens``.

    Raises:
        BadInput: as :func:`cria_tricks.predict.dry_run.dry_run`.
    """
    recorder = Recorder(config.vocab_size)
    lengths = [max(2, round(shorter * tokens)), tokens]
    with fake_training(plan, config, recorder) as training:
        on_card = plan.device.kind == "cuda"
        if on_card:  # cuBLAS allocates one workspace for the forward pass, and the thread of the backward pass another
            recorder.moment = "first products"
            for _ in range(2):
                recorder.allocation(WORKSPACES // 2, "workspace")
        for length in lengths:
            _window(training, recorder, rows, length, trained_share)
        _evaluation(training, recorder, rows, tokens, trained_share)
    return list(recorder.events)  # a copy: when the model is freed, the recorder records that, too


def _window(training: FakeTraining, recorder: Recorder, rows: int, tokens: int, trained_share: float) -> None:
    """Run one window: of its micro-batches the first and, if there are more, a second one beside its gradients."""
    recorder.line = "batch"
    recorder.moment = f"batches of {tokens:,} tokens"
    window = fake_window(training.plan, rows, tokens, _trained(rows, tokens, trained_share))
    if training.in_one_pass:
        recorder.line = "activations"
        recorder.moment = f"forward and backward pass of {tokens:,} tokens"
        training.one_pass(window)
        _relabel_gradients(training, recorder)
    else:
        for batch in window[-2:]:
            _micro_batch(training, recorder, {**window[-1], **batch}, tokens)
            del batch
    del window
    recorder.line = "optimizer states"
    recorder.moment = f"optimizer step after {tokens:,} tokens"
    training.clip_and_step()
    training.optimizer.zero_grad()


def _micro_batch(training: FakeTraining, recorder: Recorder, batch: dict[str, Any], tokens: int) -> None:
    recorder.line = "activations"
    recorder.moment = f"forward pass of {tokens:,} tokens"
    loss = training.forward(batch)
    recorder.moment = f"backward pass of {tokens:,} tokens"
    loss.backward()
    _relabel_gradients(training, recorder)


def _relabel_gradients(training: FakeTraining, recorder: Recorder) -> None:
    recorder.relabel([weight.grad for weight in training.trainable if weight.grad is not None], "gradients")


def _evaluation(training: FakeTraining, recorder: Recorder, rows: int, tokens: int, trained_share: float) -> None:
    recorder.line = "activations"
    recorder.moment = f"evaluation of {tokens:,} tokens"
    training.evaluate(fake_window(training.plan, rows, tokens, _trained(rows, tokens, trained_share))[-1])


def _trained(rows: int, tokens: int, share: float) -> int:
    return max(1, round(rows * (tokens - 1) * share))


@dataclass(frozen=True)
class Replay:
    """What the allocator would have done.

    Attributes:
        allocated_bytes: the most bytes in blocks that were in use, rounded as the allocator rounds them.
        reserved_bytes: the most bytes that it had taken from the card.
        unused_bytes: of these, the bytes that no tensor was in when the last of them were taken (fragmentation).
        moment: when that was.
    """

    allocated_bytes: int
    reserved_bytes: int
    unused_bytes: int
    moment: str


def replay(events: Sequence[Event], settings: Settings = DEFAULT, limit: float = math.inf) -> Replay:
    """Carry out the events with the allocator's model.

    Args:
        events: from :func:`memory_trace`.
        settings: of the allocator.
        limit: the memory that it can get [bytes].

    Raises:
        OutOfMemory: if that is too little.
    """
    allocator = CachingAllocator(settings, limit)
    unused, moment = 0, ""
    for event, reserved_before in steps(events, allocator):
        if allocator.peak_reserved > reserved_before:
            unused = allocator.reserved - allocator.allocated
            moment = event.moment
    return Replay(allocator.peak_allocated, allocator.peak_reserved, unused, moment)


def steps(events: Sequence[Event], allocator: CachingAllocator) -> Iterator[tuple[Event, int]]:
    """Carry out one event after the other with the allocator's model.

    Yields:
        Each event after it was carried out, and the largest reserved bytes before it.

    Raises:
        OutOfMemory: if the allocator's limit is too little.
    """
    blocks: dict[int, Block] = {}
    for event in events:
        before = allocator.peak_reserved
        if event.size:
            blocks[event.tensor] = allocator.allocate(event.size)
        elif event.tensor in blocks:  # a storage of 0 bytes never had a block
            allocator.release(blocks.pop(event.tensor))
        yield event, before
