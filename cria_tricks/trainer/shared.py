"""The one shared trainer (Loaded -> Run): a thin layer over ``transformers.Trainer``.

What we change, and why (a window is the micro-batches of one optimizer step):

- The loss is a sum over trained tokens, divided once by their number. So it is a true mean over tokens, also for
  micro-batches with rows of different lengths, for a shorter last window, and in the evaluation.
- If the residual stream is in fp16, the first batch's activations are checked before anything is trained.
- A loss or a gradient that is not finite stops the run before the optimizer changes any weight. (With steps in the
  backward pass, weights whose gradients came before it have taken their steps.)
- The loss scaler works on a CPU too, and its skipped steps are counted.
- A second run in one process does not inherit bitsandbytes' settings from the first.
- An evaluation does not change the random state, and one that a stop has cut off is repeated after a resume. With the
  checkpoints of ``trainer/resumable.py`` a resumed run equals the uninterrupted one, bit for bit.
- Bytes, tokens and seconds of every step go into the log history. Checkpoints keep it, so a resumed run reports the
  whole of it.
- A run of several processes is the same run: windows of the same rows in the same order, sums over all processes, one
  history. transformers and accelerate do not know of the other processes; see ``processes/world.py``.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import TrainerControl

from cria_tricks.common.errors import Diverged
from cria_tricks.hardware.attention_kernels import WatchAttention
from cria_tricks.load import losses, overlapped_offload
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.parallel import dtensor
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.arguments import (
    leave_skipping_to_the_scaler,
    loss_scaler,
    micro_batches_at_once,
    micro_batches_of_a_step,
    steps_in_backward,
)
from cria_tricks.trainer.callbacks import StepMeter, StopOnSignal, sizes
from cria_tricks.trainer.headroom import LargestActivation, too_little_room
from cria_tricks.trainer.resumable import ResumableTrainer
from cria_tricks.trainer.samples import Samples
from cria_tricks.trainer.shares import Share
from cria_tricks.trainer.strategy import Spread
from cria_tricks.tricks.activation_offload import Offloaded

CONTEXTS: dict[str, Callable[[Any, Plan], contextlib.AbstractContextManager[Any]]] = {
    "activation_offload": lambda model, plan: Offloaded(every_tensor(model)),
    "overlapped_offload": overlapped_offload.overlapped,
}
"""For each name in ``Plan.step_context``: makes, from a model, the context around its forward pass."""


class SharedTrainer(ResumableTrainer):
    """``transformers.Trainer`` whose losses are true means over tokens. See the module's docstring."""

    def __init__(
        self, *, plan: Plan, meter: Meter, stop: StopOnSignal, samples: Samples | None = None, **arguments: Any
    ):
        self.plan = plan
        self.samples = samples
        self.meter = meter
        self.stop = stop
        self.control: TrainerControl  # for the type checker
        super().__init__(spent=meter.spent, **arguments, processing_class=None)
        # transformers then counts the window's trained tokens, and leaves it to compute_loss to divide by them.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        loss_sum = losses.find(plan, self.accelerator.autocast)
        self.spread = Spread(losses.LossSum(self.model, loss_sum), plan, self.world)
        self.attention_kernel = ""
        self.warnings: list[str] = []
        # Only with lean preparation in fp16 is the residual stream itself in fp16.
        self.stream_may_overflow = self.args.fp16 and "adapter_inputs_uncast" in plan.after_load
        self.step = StepMeter(self)
        self.add_callback(self.step)

    def create_accelerator_and_postprocess(self) -> None:
        """Enable autocast and the loss scaler for fp16 where accelerate's own do not do: on a CPU, and in backward."""
        super().create_accelerator_and_postprocess()
        if self.args.fp16 and (self.plan.device.kind == "cpu" or self.plan.optimizer.get("in_backward")):
            self.accelerator.native_amp = True
            self.accelerator.scaler = loss_scaler(self.plan)

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """Make the optimizer, without what bitsandbytes remembers of an earlier run in this process.

        transformers asks bitsandbytes to keep the states of embeddings in 32 bits. bitsandbytes has one manager per
        process. It remembers the request by the parameter's place in the optimizer, (0, 0), so the first matrix of the
        next run would get 32 bits too. It would also keep the embedding of the earlier model in memory.
        """
        manager: Any = None
        if not self.plan.steps_by_torch:
            # Imported here, because only bitsandbytes' own optimizers need it.
            from bitsandbytes.optim import GlobalOptimManager

            manager = GlobalOptimManager.get_instance()
            manager.initialize()
        self.spread.over_processes()  # after a checkpoint is loaded, and before the optimizer is given the parameters
        self.meter.track(every_tensor(self.model))
        optimizer = super().create_optimizer(*arguments)
        if manager:  # bitsandbytes asks each embedding for its weight, but a pipeline's stage may have removed one
            manager.module_weight_config_triple = [
                entry for entry in manager.module_weight_config_triple if getattr(entry[0], entry[1]) is not None
            ]
        dtensor.group_apart(optimizer)
        leave_skipping_to_the_scaler(optimizer)
        scaler = self.accelerator.scaler
        self.in_backward = steps_in_backward(self.plan, self.model, optimizer, self.args.max_grad_norm, scaler)
        return optimizer

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of this process's micro-batches; accelerate seeds their order by the epoch, alike in all.

        A stream's loader is not given to accelerate, which would read one batch ahead of the position in a checkpoint.
        It also gets a generator of its own, because a loader draws a number when it begins: a resumed run begins once
        more, and would draw once more from the generator of dropout.
        """
        if self.stream:
            return DataLoader(
                self.stream,
                batch_size=self.args.train_batch_size,
                collate_fn=self.data_collator,
                pin_memory=self.args.dataloader_pin_memory,
                generator=torch.Generator(),
            )
        return self._share(self.train_dataset, RandomSampler, self.args.train_batch_size)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """Return the loader of this process's share of the rows to evaluate, in their order."""
        return self._share(eval_dataset or self.eval_dataset, SequentialSampler, self.args.eval_batch_size)

    def _share(self, rows: Any, order: Callable[[Any], Any], batch_size: int) -> DataLoader:
        filler = len(rows) - 1  # with_filler has put it at the end
        at_once = micro_batches_at_once(self.plan)
        batches = Share(order(range(filler)), batch_size, self.world.data_rank, self.world.data, filler, at_once)
        loader = DataLoader(
            rows, batch_sampler=batches, collate_fn=self.data_collator, pin_memory=self.args.dataloader_pin_memory
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Return a window's micro-batches of this process, and its trained tokens in all processes together."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self.world.sum(tokens)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the micro-batch's part of the window's mean loss per trained token."""
        assert not return_outputs, "evaluate() is overridden, so nobody asks for outputs"
        self.moment = "forward pass"
        with self.contexts():
            total = self.loss_sum if self.attention_kernel else self._first_loss_sum
            # Data-parallel strategies average gradients over the ranks. We need their sum, so multiply by their number.
            loss = total(model, inputs) / num_items_in_batch * self.world.data
        if self.in_backward:  # the backward pass updates weights, so a look after it would come too late
            self._refuse_infinite(loss)
        self.moment = "backward pass"
        return loss

    @contextlib.contextmanager
    def contexts(self) -> Iterator[None]:
        """Enter the contexts that the plan names, around a forward pass."""
        with contextlib.ExitStack() as contexts:
            for name in self.plan.step_context:
                contexts.enter_context(CONTEXTS[name](self.model, self.plan))
            yield

    def floating_point_ops(self, inputs):
        """Return 0: nobody reads this count, and transformers would walk all parameters at every micro-batch for it."""
        return 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Run one forward and backward pass, and stop the run at a loss that is not finite."""
        self._look_at_the_first_batch(inputs)
        with self.step.watching(inputs), self.spread.window(last=self.accelerator.sync_gradients):
            loss = self.forward_and_backward(model, inputs, num_items_in_batch)
        self._refuse_infinite(loss)
        self.step.count(inputs)
        self.moment = "optimizer step"
        return loss

    def _refuse_infinite(self, loss: torch.Tensor) -> None:
        """Stop the run at a loss that is not finite."""
        if not torch.isfinite(loss):
            raise Diverged(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}; stopped before the optimizer "
                f"touched any weight. {self._what_to_try()}"
            )

    def _what_to_try(self) -> str:
        """Say what may cure numbers that are not finite."""
        done = self.state.global_step
        if self.args.fp16:
            instead = "bf16 or fp32" if self.plan.device.real_bf16 else "fp32"
            cure = f"fp16 ends at 65,504: try tricks.precision={instead}"
            return f"{cure}, or a lower train.learning_rate" if done else f"No weight has moved yet. {cure}"
        return "Try a lower train.learning_rate" if done else "No weight has moved yet: look at the model and its dtype"

    def forward_and_backward(self, model, inputs, num_items_in_batch):
        """Compute a micro-batch's loss and its gradients, as transformers does; a pipeline does it in another way."""
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Compute the mean loss over all trained tokens of all rows, whatever the batch size.

        A loader draws a random number when it begins. The random state is restored afterwards, so that evaluating more
        often, or once more after a resume, changes nothing in the training. The metrics come back with the answers of
        ``eval.samples``, and empty if a signal has cut the evaluation off.
        """
        began = time.perf_counter()
        self.moment = "evaluation"
        loader = self.get_eval_dataloader(eval_dataset)
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        tokens = 0
        with self.meter.phase("evaluate"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for batch in loader:
                if any(self.world.max_over_ranks(self.stop.requested)):
                    return self._cut_off()
                batch = self._prepare_inputs(batch)
                self._look_at_the_first_batch(batch)
                padded, trained = sizes(batch)
                peak = self.meter.may_set_a_peak("evaluate", padded, trained)
                with self.meter.watch() if peak else contextlib.nullcontext():
                    total += self.loss_sum(self.model_wrapped, batch).double().cpu()
                tokens += trained
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        tokens = int(self.world.sum(torch.tensor(tokens)).item())
        loss = self.world.sum(total).item() / tokens
        if not math.isfinite(loss):
            raise Diverged(f"the evaluation loss is {loss} at step {self.state.global_step}. {self._what_to_try()}")
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_tokens": tokens,
            f"{metric_key_prefix}_seconds": time.perf_counter() - began,
        }
        if self.samples:
            metrics |= self._answers(self.samples)
            if self.stop.requested:  # the answers are not whole
                return self._cut_off()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _cut_off(self) -> dict[str, float]:
        """End the training at an evaluation that a signal has cut off; the resumed run evaluates here first."""
        self.control.should_training_stop = True
        self.control.should_evaluate = False
        self.control.should_save = self.state.global_step > 0
        return {}

    def _answers(self, samples: Samples) -> dict[str, Any]:
        """Answer the rows of ``eval.samples``, in the compute dtype of training, and leave the random state alone."""
        began = time.perf_counter()
        caches = self.plan.peft.get("kind") != "side_network"
        # Each new token has another shape, for which a compiled block would be compiled again.
        eager = torch.compiler.set_stance("force_eager") if self.plan.compiled else contextlib.nullcontext()
        watch = self.meter.watch() if self.meter.may_set_a_peak("answers", 0) else contextlib.nullcontext()
        # accelerate has put autocast around the model's forward, but peft's generate calls the model below it.
        with self.meter.phase("answers"), self.drawing_nothing(), eager, self.accelerator.autocast(), watch:
            found = samples.answered(self.model, self.args.eval_batch_size, caches, lambda: self.stop.requested)
        return {"eval_answers": found, "eval_answers_seconds": time.perf_counter() - began}

    def log(self, logs, start_time=None):
        """Add the step's bytes, tokens and seconds to its entry, and average its loss over the data-parallel ranks."""
        if "loss" in logs:
            loss = self.world.sum(torch.tensor(logs["loss"], dtype=torch.float64)).item() / self.world.data
            logs = {**logs, "loss": loss, **self.step.take()}
            self.state.epoch = self._epochs_done()
        super().log(logs)

    def _epochs_done(self) -> float:
        """Count the epochs as one process would; a rank may have a filler micro-batch more (``trainer/shares.py``).

        For a stream: how often all of its rows were given.
        """
        if self.stream:  # the minimum over the ranks
            return -self.world.max_over_ranks(-self.stream.passes)[0]
        micro_batches = math.ceil((len(self.train_dataset) - 1) / self.args.train_batch_size)
        window = micro_batches_of_a_step(self.plan)
        epochs, steps = divmod(self.state.global_step, math.ceil(micro_batches / window))
        return epochs + min(steps * window, micro_batches) / micro_batches

    def _clip_grad_norm(self, model):
        """Clip the gradients, and stop the run if their norm, which clipping needs anyway, is not finite.

        With a loss scaler (fp16) the run goes on, because the scaler finds such gradients itself and skips the step. If
        weights take their steps in the backward pass, the norm comes too late to clip anything.
        """
        done = "stopped before the optimizer touched any weight"
        if self.in_backward:
            done = f"stopped when {self.in_backward.steps} weights had taken their step, so resume from a checkpoint"
            norm = self.in_backward.norm()
        elif self.spread.in_pieces:
            self.accelerator.unscale_gradients()
            norm = dtensor.clip(self.model.parameters(), self.args.max_grad_norm, self.world.stage_group)
        else:
            norm = super()._clip_grad_norm(model)
        if self.accelerator.scaler is None and not torch.isfinite(norm):
            raise Diverged(
                f"the gradients are not finite at step {self.state.global_step + 1}; {done}. Try a lower "
                "train.learning_rate"
            )
        return norm

    def loss_sum(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum the losses of a batch's trained tokens, by the model that the strategy has wrapped, not by ``model``."""
        return self.spread.total(inputs)

    def drawing_nothing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context after which the random state is as it was before."""
        return torch.random.fork_rng([0] if self.plan.device.kind == "cuda" else [])

    def _look_at_the_first_batch(self, inputs: Any) -> None:
        """Refuse activations that fp16 cannot hold, once in each process and only if the residual stream is in fp16.

        It runs a forward pass of its own, without gradients. This takes less memory than the step, and it leaves the
        random state as it was.
        """
        if not self.stream_may_overflow:
            return
        self.stream_may_overflow = False
        eager = torch.compiler.set_stance("force_eager") if self.plan.compiled else contextlib.nullcontext()
        with torch.no_grad(), self.drawing_nothing(), eager, LargestActivation(self.model) as found:
            self.loss_sum(self.model, self._prepare_inputs(inputs))
        (found.value,) = self.world.max_over_ranks(found.value)  # so that all processes go on, or none does
        if said := too_little_room(found):
            self.warnings.append(said)
            self.checkpoints.say(f"warning: {said}")

    def _first_loss_sum(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the first loss of this process, and record which attention kernel runs."""
        if self.plan.compiled:
            # A block would not be compiled if its first call were watched. So watch an additional call, which is not
            # compiled. What picks the kernel is the same there: mask, shapes, autocast, gradients.
            with self.drawing_nothing(), torch.compiler.set_stance("force_eager"), WatchAttention() as watch:
                self.loss_sum(model, inputs)
            self.attention_kernel = watch.kernel
            return self.loss_sum(model, inputs)
        with WatchAttention() as watch:
            loss = self.loss_sum(model, inputs)
        self.attention_kernel = watch.kernel
        return loss
