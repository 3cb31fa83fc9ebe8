"""One stage of a pipeline: the part of the model that it computes, and torch's schedules that run it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.losses import trained_places
from cria_tricks.parallel import dtensor, tensor
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.timetable import Slot
from cria_tricks.processes.world import World
from cria_tricks.step_plan import Plan
from cria_tricks.techniques.chunked_loss import chunked_cross_entropy

Window = dict[str, torch.Tensor]
"""All k micro-batches of a pipeline's step in one batch: ``input_ids``, ``labels`` and more, each of shape (k B, T)."""
Contexts = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context around each forward pass: autocast, and the contexts that the plan names."""

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
"""torch's schedules, by the values of ``parallel.pipeline_schedule``."""


class Part(nn.Module):
    """The part of a model that one stage computes; :func:`cria_tricks.load.stages.cut` has removed the rest.

    Args:
        model: peft's wrapper of the model.
        plan: names the loss.
        contexts: makes the context around each forward pass.
        first: whether this is the first stage: its inputs are token ids, those of the others hidden states.
        last: whether this is the last stage, which has the head.
    """

    def __init__(self, model: Any, plan: Plan, contexts: Contexts, *, first: bool, last: bool):
        super().__init__()
        self.model = model
        self.plan = plan
        self.contexts = contexts
        self.first = first
        self.last = last
        self.causal_lm = model.get_base_model()
        self.head = self.causal_lm.get_output_embeddings()

    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Compute hidden states (B, T, D) from token ids (B, T), or from hidden states.

        With the full loss the last stage returns logits (B, T, V) instead.
        """
        inputs = {"input_ids" if self.first else "inputs_embeds": x}
        with self.contexts():
            hidden_BTD = self.causal_lm.base_model(**inputs, **more).last_hidden_state
            return self.head(hidden_BTD) if self.last and self.plan.loss["kind"] == "full" else hidden_BTD

    def loss_sum(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Sum the losses of a micro-batch's trained tokens, from the output of the last stage; fp32."""
        with self.contexts():
            if self.plan.loss["kind"] == "full":
                # The labels are shifted, not the logits, because logits without their last position would be a copy.
                next_BT = F.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:]
                logits = output.float().flatten(0, 1)
                return F.cross_entropy(logits, next_BT.flatten(), ignore_index=IGNORED, reduction="sum")
            row_N, column_N, label_N = trained_places(labels_BT)
            chunk = self.plan.loss["tokens_per_chunk"]
            return chunked_cross_entropy(output[row_N, column_N], self.head.weight, label_N, chunk)


class ClockedStage(PipelineStage):
    """torch's stage, with a record of the times at which it computed.

    Attributes:
        slots: the passes since the list was last cleared, with times in seconds of ``time.perf_counter``.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.slots: list[Slot] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Run the forward pass of one micro-batch, and record its time."""
        with self._clock("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Run the backward pass of one micro-batch, and record its time."""
        with self._clock("B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def _prepare_forward_infra(self, *arguments: Any, **options: Any) -> Any:
        # Before its first step torch runs a micro-batch, to see shapes. In older versions dropout's draws change the
        # random state, so a resumed run would draw other numbers than one that was not stopped.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return super()._prepare_forward_infra(*arguments, **options)

    @contextlib.contextmanager
    def _clock(self, what: str, number: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.slots.append(Slot(what, number, begin, self.now()))

    def now(self) -> float:
        """Wait until the device has finished its queued work, and return the time [s]."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Stage:
    """Run the passes of one stage: each process of a pipeline has one.

    Args:
        model: a ``PeftModel`` of which only this stage's part is left.
        plan: the plan by which it was loaded.
        world: the processes as a grid with the axes ``data`` and ``stage``.
        contexts: makes the context around each forward pass.
        scaler: the loss scaler for fp16; ``None`` in other precisions.

    Attributes:
        part: this stage's modules.
        divisor: what losses are divided by: trained tokens of the whole step, or 1 in an evaluation.
        idle_share: share of their time in the last step that the stages spent waiting, mean over all stages.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        world: World,
        contexts: Contexts = contextlib.nullcontext,
        scaler: torch.amp.GradScaler | None = None,
    ):
        self.world = world
        self.scaler = scaler
        self.device = torch.device(plan.device.kind)
        self.micro_batches: int = plan.parallel["micro_batches"]
        self.part = Part(model, plan, contexts, first=world.stage == 0, last=world.stage == world.stages - 1)
        self.stage = self._torchs(ClockedStage)
        schedule = SCHEDULES[plan.parallel["schedule"]]
        # scale_grads=False, because _loss divides by the tokens of the whole step already.
        self.schedule = schedule(self.stage, self.micro_batches, loss_fn=self._loss, scale_grads=False)
        self.evaluation: ScheduleGPipe | None = None
        self.divisor: Any = 1
        self.idle_share = 0.0

    def step(self, window: Window, divisor: Any) -> torch.Tensor:
        """Run all passes of an optimizer step, and sum the gradients over all pipelines.

        Args:
            window: this pipeline's micro-batches.
            divisor: trained tokens of the whole step, in all pipelines together.

        Returns:
            The loss per trained token of the whole step, the same in every process.
        """
        self.evaluation = None  # frees its receive buffers
        self.stage.slots.clear()
        self.divisor = divisor
        began = time.perf_counter()
        loss = self._through(self.schedule.step, window)
        if self.scaler is not None:
            loss /= self.scaler.get_scale()  # _loss has multiplied by it
        seconds = self.stage.now() - began
        self._add_up_pipelines(loss)
        worked = sum(slot.end - slot.begin for slot in self.stage.slots)
        # Only the last stage has a loss, and the others add 0 to it.
        totals = torch.tensor([loss.item(), worked], dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.world.stage_group)
        mean, worked = totals.tolist()
        self.idle_share = 1 - worked / (seconds * self.world.stages)
        return torch.tensor(mean, device=self.device)

    def loss_sum(self, window: Window) -> torch.Tensor:
        """Sum the losses of a window's trained tokens, forward only; all stages return the same sum."""
        if self.evaluation is None:
            # A second stage object, because one of torch's prepares its buffers once: with gradients, or without.
            self.evaluation = ScheduleGPipe(self._torchs(PipelineStage), self.micro_batches, loss_fn=self._loss)
        self.divisor = 1
        total = self._through(self.evaluation.eval, window)
        dist.all_reduce(total, group=self.world.stage_group)
        return total

    def _torchs(self, kind: type[PipelineStage]) -> Any:
        """Make torch's stage object for this process's part."""
        return kind(self.part, self.world.stage, self.world.stages, self.device, group=self.world.stage_group)

    def _through(self, run: Any, window: Window) -> torch.Tensor:
        """Run a schedule over a window, and return the sum of its losses; 0 in a stage that has none."""
        # The mask is left out: padding is at the right, so with causal attention no real token sees it.
        inputs = {name: tensor for name, tensor in window.items() if name not in ("labels", "attention_mask")}
        ids = inputs.pop("input_ids")
        first_stage = (ids,) if self.part.first else ()
        # Without outputs: they would keep the logits of all micro-batches.
        if not self.part.last:
            run(*first_stage, return_outputs=False, **inputs)
            return torch.zeros((), device=self.device)
        losses: list[torch.Tensor] = []
        run(*first_stage, target=window["labels"], losses=losses, return_outputs=False, **inputs)
        return torch.stack(losses).sum().detach()

    def _loss(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        loss = self.part.loss_sum(output, labels_BT) / self.divisor
        if not torch.is_grad_enabled():
            return loss  # an evaluation
        if self.stage.slots:  # torch computes the loss after the clocked forward pass; add its time to that pass
            self.stage.slots[-1] = self.stage.slots[-1]._replace(end=self.stage.now())
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _add_up_pipelines(self, loss: torch.Tensor) -> None:
        """Sum gradients and the loss over the pipelines, in place; before that, what a stage's processes have in parts.

        A sum and not a mean, because each loss was divided by the trained tokens of all pipelines.
        """
        if self.world.tensor > 1:
            assert self.world.mesh is not None
            tensor.add_up_partial(self.part.model.parameters(), self.world.mesh.get_group("tensor"))
        if self.world.data > 1:
            assert self.world.mesh is not None
            gradients = [dtensor.own(p.grad) for p in self.part.model.parameters() if p.grad is not None]
            add_up([*gradients, loss], self.world.mesh.get_group("data"))
