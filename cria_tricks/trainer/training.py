"""Define a training: a model with its optimizer, the rows that its process reads, the history, and the callbacks."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState

from cria_tricks.common.errors import Diverged
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.stream import Stream
from cria_tricks.data.tokens import IGNORED
from cria_tricks.measure.counting import WatchAttention
from cria_tricks.measure.memory import Meter
from cria_tricks.models import Weights
from cria_tricks.processes.world import World
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoint, Checkpoints
from cria_tricks.switches.lean_preparation import UNCAST
from cria_tricks.techniques.optimizer_in_backward import StepInBackward
from cria_tricks.trainer import forward, random_state
from cria_tricks.trainer.headroom import LargestActivation, too_little_room
from cria_tricks.trainer.pipeline_stage import Stage
from cria_tricks.trainer.samples import Samples
from cria_tricks.trainer.step_meter import StepMeter
from cria_tricks.trainer.steps import Steps, micro_batches_at_once
from cria_tricks.trainer.stops import Patience, StopOnSignal
from cria_tricks.trainer.strategy import Spread

Rows = Sequence[dict[str, list[int]]]
"""Training examples as token ids: each has ``input_ids`` and ``labels``."""
Batch = dict[str, torch.Tensor]


@dataclass(eq=False)
class Training:
    """A model that is being trained in place, with all that its loop (``trainer/loop.py``) needs.

    Attributes:
        model: from :func:`cria_tricks.load.model.load`.
        weights: where the weights of its base are.
        plan: the plan by which it was loaded.
        settings: the recipe's ``train`` fields.
        rows: the training rows, packed if the plan says so; or a stream of rows.
        eval_rows: the rows to evaluate; if it is empty, nothing is evaluated.
        collate: makes a batch from rows.
        checkpoints: writes and finds the checkpoints of the run.
        meter: counts bytes and seconds.
        world: the processes of the run.
        stop: whether a signal has asked for the end.
        patience: ends the run when the evaluation loss no longer falls.
        callbacks: are told of each event, in their order, by the methods of transformers' ``TrainerCallback``; the
            ``args`` are here ``settings``, and ``model`` and ``optimizer`` are given by name. The events: train_begin,
            step_begin, substep_end, pre_optimizer_step, optimizer_step, step_end, log, prediction_step, evaluate, save
            and train_end.
        samples: the rows that are answered at each evaluation.
        start: the checkpoint to go on from.
        spread: the model with its loss, as the parallel strategy has wrapped it.
        optimizer: updates the weights.
        scheduler: sets the learning rate of each step.
        scaler: fp16's loss scaler; in other precisions each of its calls does nothing.
        step_meter: measures each step.
        in_backward: what lets weights take their steps in the backward pass, if the plan asks for it.
        stage: the stage of this process, in a pipeline.
        moment: what is being done now, for the error about memory.
        random_state: the random state after the last whole step of this process.
        position: the stream's position after that step.
        attention_kernel: the one that ran, as ``WatchAttention`` names it.
        warnings: sentences about what was found in the first batch.
        control: what is to be done after this step; callbacks may change it.
        state: the number of steps so far, and the history.
    """

    model: Any
    weights: Weights
    plan: Plan
    settings: Train
    rows: Any
    eval_rows: Rows
    collate: PadToLongest
    checkpoints: Checkpoints
    meter: Meter
    world: World
    stop: StopOnSignal
    patience: Patience
    callbacks: list[TrainerCallback]
    samples: Samples | None = None
    start: Checkpoint | None = None
    # `prepare` of trainer/loop.py makes these.
    spread: Spread = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: LRScheduler = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    step_meter: StepMeter = field(init=False)
    in_backward: StepInBackward | None = None
    stage: Stage | None = None
    # These change while it trains.
    moment: str = "forward pass"
    random_state: dict[str, torch.Tensor] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    attention_kernel: str = ""
    warnings: list[str] = field(default_factory=list)
    control: TrainerControl = field(default_factory=TrainerControl)
    state: TrainerState = field(init=False)

    def __post_init__(self) -> None:
        self.stream: Stream | None = None
        number = None  # nobody knows how many rows a stream has
        if isinstance(self.rows, Stream):
            self.stream = self.rows
        else:
            number = len(self.rows)
        self.steps = Steps.of(self.plan, self.settings, number, evaluates=bool(self.eval_rows))
        self.state = TrainerState(max_steps=self.steps.total, epoch=0)
        self.limit = self.settings.max_grad_norm or math.inf
        self.device = torch.device(self.plan.device.kind)
        # Only with lean preparation in fp16 is the residual stream itself in fp16.
        fp16 = bool(self.plan.training.get("fp16"))
        self.stream_may_overflow = fp16 and UNCAST in self.plan.after_load

    def loss(self, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Run the forward pass of a micro-batch: its part of the window's mean loss per trained token."""
        self.moment = "forward pass"
        with forward.contexts(self.model, self.plan):
            total = self.loss_sum if self.attention_kernel else self._first_loss_sum
            # Data-parallel strategies average gradients over the ranks. We need their sum, so multiply by their number.
            loss = total(batch) / tokens * self.world.data
        if self.in_backward:  # the backward pass updates weights, so a look after it would come too late
            self.refuse_infinite(loss)
        self.moment = "backward pass"
        return loss

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum the losses of a batch's trained tokens, by the model as the strategy has wrapped it."""
        if self.stage:
            return self.stage.loss_sum(batch)
        return self.spread.total(batch)

    def _first_loss_sum(self, batch: Batch) -> torch.Tensor:
        """Compute the first loss of this process, and record which attention kernel runs."""
        if self.plan.compiled:
            # A block would not be compiled if its first call were watched. So watch an additional call, which is not
            # compiled. What picks the kernel is the same there: mask, shapes, autocast, gradients.
            with self.drawing_nothing(), self.eager(), WatchAttention() as watch:
                self.loss_sum(batch)
            self.attention_kernel = watch.kernel
            return self.loss_sum(batch)
        with WatchAttention() as watch:
            loss = self.loss_sum(batch)
        self.attention_kernel = watch.kernel
        return loss

    def look_at_the_first_batch(self, batch: Batch) -> None:
        """Refuse a batch whose activations fp16 cannot hold, once in each process and only if the residual is in fp16.

        It runs a forward pass of its own, without gradients. This takes less memory than the step, and it leaves the
        random state as it was.
        """
        if not self.stream_may_overflow:
            return
        self.stream_may_overflow = False
        with torch.no_grad(), self.drawing_nothing(), self.eager(), LargestActivation(self.model) as found:
            self.loss_sum(batch)
        (found.value,) = self.world.max_over_ranks(found.value)  # so that all processes go on, or none does
        if said := too_little_room(found):
            self.warnings.append(said)
            self.checkpoints.say(f"warning: {said}")

    def refuse_infinite(self, loss: torch.Tensor) -> None:
        """Stop the run at a loss that is not finite."""
        if not torch.isfinite(loss):
            raise Diverged(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}; stopped before the optimizer "
                f"touched any weight. {self.what_to_try()}"
            )

    def what_to_try(self) -> str:
        """Say what may cure numbers that are not finite."""
        done = self.state.global_step
        if not self.scaler.is_enabled():
            if done:
                return "Try a lower train.learning_rate"
            return "No weight has moved yet: look at the model and its dtype"
        cure = "fp16 ends at 65,504: try tricks.precision=fp32"
        if self.plan.device.real_bf16:
            cure = "fp16 ends at 65,504: try tricks.precision=bf16 or fp32"
        if done:
            return f"{cure}, or a lower train.learning_rate"
        return f"No weight has moved yet. {cure}"

    def loader(self, rows: Rows, order: Sequence[int], skip: int = 0) -> DataLoader[Any]:
        """Return the loader of this process's micro-batches of some rows, without the first ones."""
        filled = with_filler(rows, self.collate.pad_id)
        share = (self.world.data_rank, self.world.data, len(rows), micro_batches_at_once(self.plan), skip)
        batches = Share(order, self.settings.batch_size, *share)
        return self.data_loader(filled, batch_sampler=batches)

    def data_loader(self, rows: Any, **how: Any) -> DataLoader[Any]:
        """Return a loader, whose batches are in pinned memory where they are copied to a GPU."""
        return DataLoader(rows, collate_fn=self.collate, pin_memory=self.device.type == "cuda", **how)

    def on_device(self, batch: Batch) -> Batch:
        """Move a batch to the device; on a GPU it is copied from pinned memory while the processor goes on."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def tell(self, event: str, **more: Any) -> None:
        """Call a method of each callback."""
        about = {"model": self.model, "optimizer": self.optimizer, **more}
        for callback in self.callbacks:
            getattr(callback, event)(self.settings, self.state, self.control, **about)

    def log(self, entry: dict[str, Any]) -> None:
        """Add an entry to the history."""
        entry = {**entry, "epoch": self.state.epoch}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.tell("on_log", logs=entry)

    @contextlib.contextmanager
    def drawing_nothing(self) -> Iterator[None]:
        """Leave the random state as it was."""
        before = random_state.read()
        try:
            yield
        finally:
            random_state.put_back(before)

    def eager(self) -> contextlib.AbstractContextManager[Any]:
        """Run nothing compiled inside: for what is watched, or for shapes that would be compiled again."""
        if self.plan.compiled:
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()


class Share(BatchSampler):
    """Yield the micro-batches of rank r of N: numbers r, r + N, r + 2 N, ... of those that one process would read.

    So each rank gets k / N of the k micro-batches of a window (an optimizer step), and a window holds the same rows for
    any N. All ranks must get equally many micro-batches, because they wait for each other. If the micro-batches do not
    divide evenly, the share of a rank ends with a filler: a micro-batch of one row in which nothing is trained.
    (accelerate's ``even_batches`` takes rows of the beginning again: the 107 Kwanzaa rows would become 108.)

    Args:
        sampler: the order of the rows.
        batch_size: rows of a micro-batch.
        share: r, the data-parallel rank.
        shares: N, the number of data-parallel ranks.
        filler: the index of the row in which nothing is trained.
        at_once: micro-batches that are yielded as one batch; a pipeline takes all of a step.
        skip: batches at the beginning that are left out, because a run is resumed after them.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        batch_size: int,
        share: int = 0,
        shares: int = 1,
        filler: int = -1,
        at_once: int = 1,
        skip: int = 0,
    ):
        super().__init__(sampler, batch_size, drop_last=False)
        self.share = share
        self.shares = shares
        self.filler = filler
        self.at_once = at_once
        self.skip = skip

    def __iter__(self) -> Iterator[list[int]]:
        mine = itertools.islice(self._micro_batches(), self.skip * self.at_once, None)
        while rows := list(itertools.chain.from_iterable(itertools.islice(mine, self.at_once))):
            # A filler only keeps a batch from being empty, so it is dropped beside real rows.
            yield [row for row in rows if row != self.filler] or rows

    def _micro_batches(self) -> Iterator[list[int]]:
        number = -1
        for number, batch in enumerate(super().__iter__()):
            if number % self.shares == self.share:
                yield batch
        if number % self.shares < self.share and number >= 0:  # the last round ended before it came to this rank
            yield [self.filler]

    def __len__(self) -> int:
        return math.ceil(super().__len__() / (self.shares * self.at_once))


def with_filler(rows: Sequence[dict[str, list[int]]], pad_id: int) -> Dataset[dict[str, Any]]:
    """Append a filler row, in which nothing is trained.

    It has two tokens, because only a token with another one before it can have a loss. The rows are not copied into a
    list, because those of a mapped file are read one by one.
    """
    filler = {"input_ids": [pad_id, pad_id], "labels": [IGNORED, IGNORED]}
    if rows and "position_ids" in rows[0]:
        filler["position_ids"] = [0, 1]
    return ConcatDataset([rows, [filler]])  # type: ignore[list-item]
