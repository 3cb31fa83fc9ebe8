"""One stage of a pipeline: what it computes of the model, and torch's schedules over it."""

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
from cria_tricks.parallel import dtensor
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.timetable import Slot
from cria_tricks.processes.world import World
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

Window = dict[str, torch.Tensor]
"""A step's micro-batches of one pipeline, one after the other: ``input_ids``, ``labels`` and more, each (k B, T)."""
Contexts = Callable[[], contextlib.AbstractContextManager[Any]]
"""What is laid around each forward pass: autocast, and what the plan names."""

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
"""torch's, by name."""


class Part(nn.Module):
    """What one stage computes of a model that :func:`cria_tricks.load.stages.cut` has emptied.

    Args:
        model: peft's wrapper of it.
        plan: names the loss.
        contexts: laid around each forward pass.
        first: whether token ids go in, or hidden states.
        last: whether it has the head.
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
        """Token ids (B, T) or hidden states (B, T, D) -> hidden states; the last stage's logits for the full loss."""
        inputs = {"input_ids" if self.first else "inputs_embeds": x}
        with self.contexts():
            hidden_BTD = self.causal_lm.base_model(**inputs, **more).last_hidden_state
            return self.head(hidden_BTD) if self.last and self.plan.loss["kind"] == "full" else hidden_BTD

    def loss_sum(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """The losses of a micro-batch's trained tokens, from what the last stage put out; fp32."""
        with self.contexts():
            if self.plan.loss["kind"] == "full":
                # Labels are shifted and logits are not: a part of their columns would be a copy.
                next_BT = F.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:]
                logits = output.float().flatten(0, 1)
                return F.cross_entropy(logits, next_BT.flatten(), ignore_index=IGNORED, reduction="sum")
            row_N, column_N, label_N = trained_places(labels_BT)
            chunk = self.plan.loss["tokens_per_chunk"]
            return chunked_cross_entropy(output[row_N, column_N], self.head.weight, label_N, chunk)


class ClockedStage(PipelineStage):
    """torch's stage, which remembers when it computed.

    Attributes:
        slots: the passes since they were last cleared, in seconds of ``time.perf_counter``.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.slots: list[Slot] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """One micro-batch forward."""
        with self._clock("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """One micro-batch backward."""
        with self._clock("B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    @contextlib.contextmanager
    def _clock(self, what: str, number: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.slots.append(Slot(what, number, begin, self.now()))

    def now(self) -> float:
        """Now, when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Stage:
    """One process of a pipeline at work.

    Args:
        model: a ``PeftModel`` of which this stage's part is left.
        plan: by which it was loaded.
        world: the processes as a grid with the axes ``data`` and ``stage``.
        contexts: laid around each forward pass.
        scaler: of fp16's losses; none for other numbers.

    Attributes:
        part: this stage's modules.
        idle_share: of all stages' time in the last step, what they spent waiting.
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
        self.schedule = schedule(self.stage, self.micro_batches, loss_fn=self._loss, scale_grads=False)
        self.evaluation: ScheduleGPipe | None = None
        self.divisor: Any = 1
        self.idle_share = 0.0

    def step(self, window: Window, divisor: Any) -> torch.Tensor:
        """Do all passes of an optimizer step; the gradients are those of all pipelines then, added up.

        Args:
            window: this pipeline's micro-batches.
            divisor: trained tokens of the whole step, of the other pipelines too.

        Returns:
            The loss per trained token of the whole step, the same in every process.
        """
        self.evaluation = None  # its buffers for what comes in are not needed now
        self.stage.slots.clear()
        self.divisor = divisor
        began = time.perf_counter()
        loss = self._through(self.schedule.step, window)
        if self.scaler is not None:
            loss /= self.scaler.get_scale()
        seconds = self.stage.now() - began
        self._add_up_pipelines(loss)
        worked = sum(slot.end - slot.begin for slot in self.stage.slots)
        totals = torch.tensor([loss.item(), worked], dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.world.stage_group)
        mean, worked = totals.tolist()
        self.idle_share = 1 - worked / (seconds * self.world.stages)
        return torch.tensor(mean, device=self.device)

    def loss_sum(self, window: Window) -> torch.Tensor:
        """Sum the losses of a window's trained tokens, forward only; the same in every stage."""
        if self.evaluation is None:
            # A stage of its own: torch's prepare their buffers once for passes with gradients, or without.
            self.evaluation = ScheduleGPipe(self._torchs(PipelineStage), self.micro_batches, loss_fn=self._loss)
        self.divisor = 1
        total = self._through(self.evaluation.eval, window)
        dist.all_reduce(total, group=self.world.stage_group)
        return total

    def _torchs(self, kind: type[PipelineStage]) -> Any:
        return kind(self.part, self.world.stage, self.world.stages, self.device, group=self.world.stage_group)

    def _through(self, run: Any, window: Window) -> torch.Tensor:
        """Run a schedule over a window; the sum of its losses, 0 in a stage that has none."""
        # No mask: no token sees the padding, which is to its right.
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
            return loss
        if self.stage.slots:  # torch asks for the loss after the forward pass, but it is a part of it
            self.stage.slots[-1] = self.stage.slots[-1]._replace(end=self.stage.now())
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _add_up_pipelines(self, loss: torch.Tensor) -> None:
        """Sum gradients and the loss over the pipelines, in place; losses were divided by all pipelines' tokens."""
        if self.world.data > 1:
            assert self.world.mesh is not None
            gradients = [dtensor.own(p.grad) for p in self.part.model.parameters() if p.grad is not None]
            add_up([*gradients, loss], self.world.mesh.get_group("data"))
