"""The loop beside the trainer: one stage of a model, torch's schedule over it, its optimizer.

transformers' Trainer has no pipelining. What a step is stays the same here: a loss summed over the window's trained
tokens and divided once, gradients clipped by the norm of all of them, the learning rates of ``trainer/arguments.py``.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import Trainer, TrainingArguments, get_scheduler

from cria_tricks.common.errors import Diverged
from cria_tricks.parallel import dtensor
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.pipeline import Slot
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.arguments import leave_skipping_to_the_scaler
from cria_tricks.trainer.callbacks import SKIPS_IN_A_ROW
from cria_tricks.trainer.pipeline_part import Part, Window

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
"""torch's, by name."""


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


class Loop:
    """One process of a pipeline.

    Args:
        model: a ``PeftModel``, whole; this stage's part is left of it.
        plan: by which it was loaded.
        arguments: of transformers: optimizer, learning rates, norm to clip at.
        mesh: the processes as a grid of (data, stage).
        micro_batches: of one pipeline, in each step.
        blocks: every stage's.
        schedule: of :data:`SCHEDULES`.

    Attributes:
        part: this stage's modules.
        trained: its parameters that train, by the names that they have in the whole model.
        stage: torch's view of it, with the slots of its last step.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        arguments: TrainingArguments,
        mesh: DeviceMesh,
        micro_batches: int,
        blocks: Sequence[range],
        schedule: str = "1f1b",
    ):
        self.mesh, self.group, self.device = mesh, mesh["stage"].get_group(), torch.device(plan.device.kind)
        number, self.stages = mesh.get_local_rank("stage"), mesh["stage"].size()
        self.part = Part(model, plan, blocks[number])
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.stage = ClockedStage(self.part, number, self.stages, self.device, group=self.group)
        self.schedule = SCHEDULES[schedule](self.stage, micro_batches, loss_fn=self._loss, scale_grads=False)
        # A stage of its own to evaluate: torch's prepare their buffers once for passes with gradients, or without.
        forward_only = PipelineStage(self.part, number, self.stages, self.device, group=self.group)
        self.evaluation = ScheduleGPipe(forward_only, micro_batches, loss_fn=self._loss)
        optimizer, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        self.optimizer = optimizer(self.trained.values(), weight_decay=arguments.weight_decay, **options)
        dtensor.group_apart(self.optimizer)
        leave_skipping_to_the_scaler(self.optimizer)
        self.rate = get_scheduler(
            arguments.lr_scheduler_type, self.optimizer, arguments.warmup_steps, arguments.max_steps
        )
        scales = bool(plan.training.get("fp16"))
        self.scaler = ShardedGradScaler(plan.device.kind, enabled=scales, process_group=self.group)
        self.scaler.scale(torch.zeros((), device=self.device))  # awake in the stages that have no loss, too
        self.max_norm, self.skipped_in_a_row, self.divisor = arguments.max_grad_norm, 0, 1

    def step(self, window: Window) -> dict[str, float]:
        """One optimizer step.

        Returns:
            ``loss`` per trained token, ``grad_norm``, ``learning_rate``, ``idle_share`` of all stages' time, and
            whether the loss scaler ``skipped`` the update; the same in every process but for the idle share, which is
            each pipeline's own.

        Raises:
            Diverged: in every process, if the gradients are not finite; no weight was touched.
        """
        self.part.train()
        self.stage.slots.clear()
        self.divisor, began = window.trained, time.perf_counter()
        loss = self._through(self.schedule.step, window) / self.scaler.get_scale()
        seconds = self.stage.now() - began
        gradients = self.gradients()
        if self.mesh["data"].size() > 1:
            add_up([*gradients, loss], self.mesh["data"].get_group())
        self.scaler.unscale_(self.optimizer)
        worked = sum(slot.end - slot.begin for slot in self.stage.slots)
        totals = torch.tensor([self.square(), loss.item(), worked], dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.group)
        square, mean, worked = totals.tolist()
        rate = self.optimizer.param_groups[0]["lr"]
        return {
            "loss": mean,
            "skipped": self._update(gradients, math.sqrt(square)),
            "grad_norm": math.sqrt(square),
            "learning_rate": rate,
            "idle_share": 1 - worked / (seconds * self.stages),
        }

    def evaluate(self, windows: Sequence[Window]) -> float:
        """Mean loss over all trained tokens, the same in every process."""
        self.part.eval()
        self.divisor, total = 1, torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for window in windows:
                total += self._through(self.evaluation.eval, window)
        dist.all_reduce(total, group=self.mesh["data"].get_group())
        dist.all_reduce(total, group=self.group)
        return total.item() / sum(window.trained for window in windows)

    def _through(self, run: Any, window: Window) -> torch.Tensor:
        """Run a schedule over a window; the sum of its losses, 0 in a stage that has none."""
        inputs = {name: tensor.to(self.device) for name, tensor in window.inputs.items()}
        ids, losses = inputs.pop("input_ids"), list[torch.Tensor]()
        run(
            *([ids] if self.part.first else []),
            target=window.labels.to(self.device) if self.part.last else None,
            losses=losses if self.part.last else None,
            return_outputs=False,  # they would keep the logits of all micro-batches
            **inputs,
        )
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    def _loss(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        loss = self.part.loss_sum(output, labels_BT) / self.divisor
        if not torch.is_grad_enabled():
            return loss
        if self.stage.slots:  # torch asks for the loss after the forward pass, but it is a part of it
            self.stage.slots[-1] = self.stage.slots[-1]._replace(end=self.stage.now())
        return self.scaler.scale(loss)

    def gradients(self) -> list[torch.Tensor]:
        """What the backward passes left."""
        return [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]

    def square(self) -> float:
        """The square of the norm of this stage's gradients."""
        return sum(gradient.double().square().sum().item() for gradient in self.gradients())

    def _update(self, gradients: Sequence[torch.Tensor], norm: float) -> bool:
        """Clip and update; whether it was skipped, as the loss scaler found gradients that overflowed."""
        skipped = not math.isfinite(norm)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped and not (self.scaler.is_enabled() and self.skipped_in_a_row < SKIPS_IN_A_ROW):
            raise Diverged(
                f"the gradients are not finite at step {self.rate.last_epoch + 1}; stopped before the optimizer "
                f"touched any weight. Try a lower train.learning_rate{', or bf16' if self.scaler.is_enabled() else ''}"
            )
        for gradient in gradients:
            gradient.mul_(min(1.0, self.max_norm / (norm + 1e-6)))
        self.scaler.step(self.optimizer)  # nothing, in all stages, if one of them has an overflow
        self.scaler.update()
        if not skipped:
            self.rate.step()
        self.optimizer.zero_grad()
        return skipped


class CubeLoop(Loop):
    """The pipeline's loop over matrices of which each process holds a piece."""

    def gradients(self) -> list[torch.Tensor]:
        """This process's own pieces, and the gradients of what is whole."""
        return [dtensor.own(gradient) for gradient in super().gradients()]

    def square(self) -> float:
        """Of a stage: what is whole counts once, pieces are added up over the processes that share a matrix."""
        return dtensor.square(super().gradients()).item()
