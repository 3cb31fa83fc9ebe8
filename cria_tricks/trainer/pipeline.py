"""The shared trainer for a pipeline: one schedule runs all micro-batches of a step, instead of a loop over them.

Everything around a step is the shared trainer's: rows and their order, clipping, optimizer, learning rates, history,
checkpoints and callbacks. A batch of this trainer is a window: all micro-batches that this pipeline computes in a step.
(With ``parallel.pipelines`` > 1 that is only its share of the step.) torch's schedule needs all of them at once,
because it decides which micro-batch runs its forward or its backward pass next.
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
    """The shared trainer in one process of a pipeline, which computes one stage.

    Attributes:
        stage: the stage of this process; it exists once :meth:`create_optimizer` has cut the model.
    """

    stage: Stage

    def create_accelerator_and_postprocess(self) -> None:
        """Replace fp16's loss scaler, so that all stages skip a step if one of them has an overflow."""
        super().create_accelerator_and_postprocess()
        if self.args.fp16:
            scaler = ShardedGradScaler(self.plan.device.kind, process_group=self.world.stage_group)
            # The first scale() creates the scaler's state. Stages without a loss never call it, but need the state.
            scaler.scale(torch.zeros((), device=self.args.device))
            self.accelerator.scaler = scaler

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """Make the optimizer, then the stage: by then the strategy has removed the other stages' blocks."""
        optimizer = super().create_optimizer(*arguments)
        self.stage = Stage(self.model, self.plan, self.world, self.around_a_pass, self.accelerator.scaler)
        return optimizer

    @contextlib.contextmanager
    def around_a_pass(self) -> Iterator[None]:
        """Enter autocast and the plan's contexts, around the forward pass of a micro-batch through this stage."""
        with self.accelerator.autocast(), self.contexts():
            yield

    def forward_and_backward(self, model, inputs, num_items_in_batch):
        """Run all passes of a step, and return its mean loss per trained token, the same in all processes."""
        self.moment = "forward and backward passes"  # the error names it if memory runs out (resumable.py)
        model.train()
        window = self._prepare_inputs(inputs)
        if self.attention_kernel:
            return self.stage.step(window, num_items_in_batch)
        return self._first_step(window, num_items_in_batch)

    def _first_step(self, window: dict[str, torch.Tensor], trained_tokens: torch.Tensor) -> torch.Tensor:
        """Run the first step of this process, and record which attention kernel runs."""
        if self.plan.compiled:  # compiled kernels cannot be watched, so run forward once more without compilation
            eager = torch.compiler.set_stance("force_eager")
            with torch.no_grad(), self.drawing_nothing(), eager, WatchAttention() as watch:
                self.stage.loss_sum(window)
            loss = self.stage.step(window, trained_tokens)
        else:
            with WatchAttention() as watch:
                loss = self.stage.step(window, trained_tokens)
        self.attention_kernel = watch.kernel
        return loss

    def loss_sum(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum the losses of a window's trained tokens, in forward passes only."""
        return self.stage.loss_sum(inputs)

    def log(self, logs, start_time=None):
        """Add ``idle_share``: the share of the last step that the stages spent waiting, on average."""
        if "loss" in logs:
            logs = {**logs, "idle_share": self.stage.idle_share}
        super().log(logs, start_time)
