"""The shared trainer over a pipeline: a step is one schedule of passes over its micro-batches, and not a loop of them.

Everything around a step is the shared trainer's: rows and their order, clipping, optimizer, learning rates, history,
checkpoints and callbacks. A batch of this trainer holds all micro-batches of a step, because torch's schedule
decides which of them comes next, forward or backward.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cria_tricks.hardware.attention_kernels import WatchAttention
from cria_tricks.trainer.pipeline_stage import Stage
from cria_tricks.trainer.shared import SharedTrainer


class PipelineTrainer(SharedTrainer):
    """The shared trainer of one stage.

    Attributes:
        stage: what it computes, from the moment on at which the model has been cut.
    """

    stage: Stage

    def create_accelerator_and_postprocess(self) -> None:
        """Let all stages skip a step if one of them has an overflow."""
        super().create_accelerator_and_postprocess()
        if self.args.fp16:
            scaler = ShardedGradScaler(self.plan.device.kind, process_group=self.world.stage_group)
            scaler.scale(torch.zeros((), device=self.args.device))  # awake in the stages that have no loss, too
            self.accelerator.scaler = scaler

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """Take up work as a stage: the strategy has just left this stage's blocks of the model."""
        optimizer = super().create_optimizer(*arguments)
        self.stage = Stage(self.model, self.plan, self.world, self.around_a_pass, self.accelerator.scaler)
        return optimizer

    @contextlib.contextmanager
    def around_a_pass(self) -> Iterator[None]:
        """Around the forward pass of a micro-batch through this stage."""
        with self.accelerator.autocast(), self.contexts():
            yield

    def forward_and_backward(self, model, inputs, num_items_in_batch):
        """All passes of a step: the mean loss of its trained tokens, the same in all processes."""
        self.moment = "forward and backward passes"
        model.train()
        window = self._prepare_inputs(inputs)
        if self.attention_kernel:
            return self.stage.step(window, num_items_in_batch)
        return self._first_step(window, num_items_in_batch)

    def _first_step(self, window: dict[str, torch.Tensor], trained: torch.Tensor) -> torch.Tensor:
        """Once a process, see which attention kernel runs."""
        if self.plan.compiled:  # nobody can watch compiled kernels, so it runs once more as it was before
            eager = torch.compiler.set_stance("force_eager")
            with torch.no_grad(), self.drawing_nothing(), eager, WatchAttention() as watch:
                self.stage.loss_sum(window)
            loss = self.stage.step(window, trained)
        else:
            with WatchAttention() as watch:
                loss = self.stage.step(window, trained)
        self.attention_kernel = watch.kernel
        return loss

    def loss_sum(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """A window's losses, summed over its trained tokens, forward only."""
        return self.stage.loss_sum(inputs)

    def log(self, logs, start_time=None):
        """Add how much of their time the stages waited."""
        if "loss" in logs:
            logs = {**logs, "idle_share": self.stage.idle_share}
        super().log(logs, start_time)
