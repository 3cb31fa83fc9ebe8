"""Measure the memory of an optimizer step without allocating it: the real model, loss and optimizer on fake tensors.

A fake tensor has a shape and a dtype but no data. So a model of any size can be built and trained for one step in
seconds, while ``LiveBytes`` counts the storages that a real step would allocate. Fake tensors pretend to be on a CPU,
because torch without CUDA cannot pretend anything else. Where a GPU would run another kernel than a CPU,
``fake_model.py`` chooses the kernel of the GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.operation import ANSWERS, EVALUATION, Line
from cria_tricks.load.model import quiet_libraries
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.models.configs import find_config
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.predict.fake_model import (
    fake_model,
    flash_attention_2,
    kernels_of,
    known_values,
    refuse_data_dependent_shapes,
)
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Train
from cria_tricks.step_plan import Plan
from cria_tricks.techniques.layer_by_layer import one_pass
from cria_tricks.techniques.optimizer_in_backward import StepInBackward
from cria_tricks.trainer import forward
from cria_tricks.trainer.optimizer import make_optimizer


@dataclass(frozen=True)
class DryRun:
    """The memory that a training step would need.

    Attributes:
        moments: the peak memory of the forward pass, the backward pass and the optimizer step, in this order, by their
            names [bytes].
        weights_bytes: the loaded model with its adapter [bytes].
    """

    moments: dict[str, int]
    weights_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the whole step [bytes]."""
        return max(self.moments.values())


def dry_run(
    plan: Plan, config: Any, rows: int, tokens: int, trained: int | None = None, evaluated: int | None = None
) -> DryRun:
    """Return the memory of one optimizer step on fake tensors: a later step, so the optimizer states exist already.

    Args:
        plan: the plan to measure, on its own device (``plan.device``).
        config: the model's config, from transformers.
        rows: the rows of a micro-batch.
        tokens: the tokens of each row.
        trained: the trained tokens of a micro-batch; only the chunked loss depends on them. None means all tokens but
            the first of each row, which no earlier token predicts.
        evaluated: the tokens of each row of an evaluation after the step; no evaluation when left out.

    Raises:
        BadInput: if the model is no decoder, if it does not fit the plan, or if the shapes of its activations depend
            on the values of tensors.
    """
    live = LiveBytes()
    peaks: dict[str, int] = {}
    with fake_training(plan, config, live) as training:
        weights_bytes = live.live
        parts = later_step(training, rows, tokens, trained, evaluated)
        part = next(parts, None)
        while part:
            live.peak = live.live  # the peak of a part is at least what is alive when it begins
            following = next(parts, None)
            peaks[part] = live.peak
            part = following
    return DryRun({part: peaks[part] for part in MOMENTS if part in peaks}, weights_bytes)


def lines_of_peak(recipe: Recipe, plan: Plan, memory: Bill, evaluated: int) -> tuple[tuple[Line, ...], str]:
    """Return the two lines of a dry run's bill, weights and all other bytes at the peak, and the moment of the peak.

    Generated answers cannot be counted without numbers. If they need most by formulas, their lines are returned.

    Args:
        recipe: what would run.
        plan: its plan.
        memory: its bill by formulas.
        evaluated: the tokens of the longest evaluation row; 0 for ``data.max_length``.
    """
    config = find_config(recipe.model)
    longest = recipe.data.max_length
    shape = AutoConfig.for_model(**config)
    run = dry_run(plan, shape, recipe.train.batch_size, longest, evaluated=evaluated or longest)
    for answers in memory.moments:
        if answers.name == ANSWERS and answers.bytes > run.peak_bytes:
            return tuple(line for line in answers.lines if line.bytes), answers.name
    moment = max(run.moments, key=lambda name: run.moments[name])  # the one with the highest peak
    lines = (
        Line("weights", run.weights_bytes, "the loaded model, with its adapter"),
        Line("everything else", run.peak_bytes - run.weights_bytes, f"counted in the {moment}"),
    )
    return lines, moment


FORWARD, BACKWARD, BOTH, OPTIMIZER = "forward pass", "backward pass", "forward and backward pass", "optimizer step"
MOMENTS = (FORWARD, BACKWARD, BOTH, OPTIMIZER, EVALUATION)
"""The parts of :func:`later_step` that are the step itself, and the evaluation after it."""


def later_step(
    training: "FakeTraining", rows: int, tokens: int, trained: int | None = None, evaluated: int | None = None
) -> Iterator[str]:
    """Run an optimizer step after a first one, part by part, and an evaluation if that is asked for.

    The arguments are those of :func:`dry_run`.

    Yields:
        The name of each part before it runs: ``"gradients"`` and ``"optimizer states"`` of the first step, ``"batch"``,
        and then :data:`MOMENTS`.
    """
    # An earlier step, only to allocate the optimizer states.
    yield "gradients"
    for weight in training.trainable:
        weight.grad = torch.empty_like(weight)
    yield "optimizer states"
    training.optimizer.step()
    # `live` has seen the states when they were allocated, but not the tables of 8-bit AdamW, which its constructor
    # made before `live` was active. Nothing is counted twice.
    training.live.track_all(tensors_of(training.optimizer))
    # With gradient accumulation the measured micro-batch is the last of its window. There the gradients of the
    # earlier micro-batches exist, so they stay.
    if training.plan.training["gradient_accumulation_steps"] == 1 or training.in_one_pass:
        training.optimizer.zero_grad()
    yield "batch"
    window = fake_window(training.plan, rows, tokens, trained)
    if training.in_one_pass:
        yield BOTH
        training.one_pass(window)
    else:
        yield FORWARD
        loss = training.forward(window[-1])
        yield BACKWARD
        loss.backward()
        del loss
    yield OPTIMIZER
    training.clip_and_step()
    if evaluated:
        training.optimizer.zero_grad()
        yield EVALUATION
        unpacked = replace(training.plan, collator={})  # evaluation rows never are
        training.evaluate(fake_window(unpacked, rows, evaluated)[-1])
    del window  # not earlier, because the loop holds the window in the optimizer step, too


@dataclass(frozen=True)
class FakeTraining:
    """A model and its optimizer on fake tensors, in a context where they can run training steps.

    Attributes:
        plan: what they follow.
        model: the model with its adapter.
        optimizer: the optimizer of its trained weights.
        loss_of: function from a batch to the loss.
        live: what counts their bytes.
        in_backward: what lets weights take their steps in the backward pass, if the plan asks for it.
    """

    plan: Plan
    model: Any
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[dict[str, Any]], torch.Tensor]
    live: LiveBytes
    in_backward: StepInBackward | None = None

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        """The weights that train."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Run the forward pass of a batch, and return its loss."""
        with forward.contexts(self.model, self.plan):
            return self.loss_of(batch)

    def evaluate(self, batch: dict[str, Any]) -> None:
        """Compute the loss of a batch as an evaluation does: in eval mode, and without gradients."""
        self.model.eval()
        with torch.no_grad():
            self.loss_of(batch)
        self.model.train()

    @property
    def in_one_pass(self) -> bool:
        """Whether all micro-batches of a window go through the blocks together."""
        return bool(self.plan.streaming.get("layer_by_layer"))

    def one_pass(self, window: list[dict[str, Any]]) -> None:
        """Run a window's micro-batches together, forward and backward; only the last one knows what is trained."""

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with forward.contexts(self.model, self.plan), forward.autocast(self.plan, "cpu"):
                yield

        runs = [functools.partial(self.forward, {**window[-1], **batch}) for batch in window]
        one_pass(blocks_of(self.model), runs, torch.Tensor.backward, around)

    def clip_and_step(self) -> None:
        """Clip the gradients and update the weights, as the trainer does after the last micro-batch of a window."""
        # On a GPU torch clips all gradients at once (foreach). Fake tensors pretend to be on a CPU, where it does not.
        # The norm of the run may be another than 1, which changes no bytes.
        torch.nn.utils.clip_grad_norm_(self.trainable, 1.0, foreach=self.plan.device.kind == "cuda")
        self.optimizer.step()


@contextlib.contextmanager
def fake_training(plan: Plan, config: Any, live: LiveBytes) -> Iterator[FakeTraining]:
    """Build a model and its optimizer on fake tensors, and enter the modes in which steps can run on them.

    ``live`` counts the tensors of the model first, and then whatever runs inside the context.

    Raises:
        BadInput: if the model is no decoder, if it does not fit the plan, or if the shapes of its activations depend
            on the values of tensors.
    """
    quiet_libraries()
    # Non-fake inputs are allowed, because the tables of 8-bit AdamW are real tensors: its constructor makes them.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(plan, config, fake)
    live.track_all(every_tensor(model))
    # The optimizer is made before ``fake`` is entered, because bitsandbytes reads numbers while it makes its tables,
    # and fake tensors have none.
    with (
        refuse_data_dependent_shapes(config.model_type),
        _optimizer(plan, model) as optimizer,
        fake,
        live,
        kernels_of(plan.device),
        known_values(plan),
    ):
        in_backward: StepInBackward | None = None
        if plan.optimizer.get("in_backward"):
            # A fake gradient has no value that could be finite or not. A limit would change no bytes.
            in_backward = StepInBackward(model, optimizer, finite=lambda norm: True)
        loss_of = functools.partial(forward.loss_sum(model, plan, "cpu"), model)
        yield FakeTraining(plan, model, optimizer, loss_of, live, in_backward)


def fake_window(plan: Plan, rows: int, tokens: int, trained: int | None = None) -> list[dict[str, Any]]:
    """Return the micro-batches of an accumulation window, with the same tensors as ``data/batches.py`` makes.

    All of them count, because the trainer holds the whole window before its first micro-batch runs. The dry run trains
    only on the last one, so only that one has ``trained``, the places of the trained tokens (``load/losses.py``).

    Call it inside the fake mode, so that the tensors are fake. The arguments are those of :func:`dry_run`.
    """
    mask_or_positions = "attention_mask"
    # Packed rows have positions instead of a mask. But the dry run counts flash_attention_2 by running sdpa, and sdpa
    # would make a mask from the positions, which flash_attention_2 does not. So there the batch has an attention mask
    # instead: it has as many bytes as the positions, and is ignored.
    if plan.collator and not flash_attention_2(plan):
        mask_or_positions = "position_ids"
    names = ("input_ids", mask_or_positions, "labels")
    window: list[dict[str, Any]] = []
    for _ in range(plan.training["gradient_accumulation_steps"]):
        window.append({name: torch.zeros(rows, tokens, dtype=torch.long) for name in names})
    if plan.loss["kind"] == "chunked":
        count = rows * (tokens - 1) if trained is None else trained
        # Three index tensors: row, column and label of each trained token.
        window[-1]["trained"] = tuple(torch.zeros(count, dtype=torch.long) for _ in range(3))
    return window


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizer states."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


@contextlib.contextmanager
def _optimizer(plan: Plan, model: Any) -> Iterator[torch.optim.Optimizer]:
    """Make the optimizer of a run, whose numbers do not matter, because they change no bytes.

    bitsandbytes has one manager for the whole process. A dry run must leave no overrides there, so it uses its own.
    """
    before = GlobalOptimManager._instance
    GlobalOptimManager._instance = None
    try:
        yield make_optimizer(model, plan, Train())
    finally:
        GlobalOptimManager._instance = before
