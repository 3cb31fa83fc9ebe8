"""Loaded -> Run: the one shared trainer, thin over ``transformers.Trainer``.

What is ours, and why:

- the loss is a sum over trained tokens, divided once: so a window of ragged micro-batches, a partial last
  window and the evaluation are all true means over tokens;
- a loss or a gradient that is not finite stops the run before the optimizer touches the adapter;
- the loss scaler works on a CPU too, and its skipped steps are counted;
- a second run in one process does not inherit bitsandbytes' settings from the first;
- bytes, tokens and seconds of every step go into the log history, which checkpoints keep: a resumed run
  reports the whole of it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from cria_tricks.callbacks import StepMeter, StopOnSignal
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.tokens import IGNORED
from cria_tricks.errors import Diverged, Interrupted
from cria_tricks.load import Loaded
from cria_tricks.measure import Meter
from cria_tricks.plan import Plan
from cria_tricks.recipe import Train
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

OPTIMIZERS = {
    (32, False): "adamw_torch",
    (32, True): "paged_adamw_32bit",
    (8, False): "adamw_8bit",
    (8, True): "paged_adamw_8bit",
}
"""(bits, paged) -> the name that ``TrainingArguments(optim=...)`` takes."""


@dataclass(frozen=True)
class Run:
    """What a finished training run has to say.

    Attributes:
        history: one entry per optimizer step (``step``, ``loss``, ``peak_bytes``, ``tokens``,
            ``trained_tokens``, ``step_seconds``, ...) and per evaluation (``step``, ``eval_loss``, ...).
        steps: optimizer steps, those that the loss scaler skipped included.
        skipped_steps: steps whose fp16 gradients overflowed, so that nothing was updated.
    """

    history: list[dict[str, Any]]
    steps: int
    skipped_steps: int

    @property
    def training(self) -> list[dict[str, Any]]:
        """The entries of the optimizer steps."""
        return [entry for entry in self.history if "loss" in entry]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The entries of the evaluations."""
        return [entry for entry in self.history if "eval_loss" in entry]


def fit(
    loaded: Loaded,
    plan: Plan,
    settings: Train,
    train_rows: Sequence[dict[str, list[int]]],
    eval_rows: Sequence[dict[str, list[int]]],
    checkpoints: Path,
    *,
    pad_id: int,
    meter: Meter | None = None,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> Run:
    """Train the loaded model in place, evaluating before, during and after.

    Args:
        loaded: from :func:`cria_tricks.load.load`.
        plan: the same plan.
        settings: the recipe's ``train`` fields.
        train_rows: with ``input_ids`` and ``labels``.
        eval_rows: the same; may be empty, then nothing is evaluated.
        checkpoints: folder for checkpoints.
        pad_id: token id that fills up shorter rows.
        meter: counts bytes; made here when left out.
        resume: go on from the newest checkpoint, when there is one.
        callbacks: more callbacks, e.g. a progress bar.

    Raises:
        Diverged: if the loss or the gradients are not finite; the trained weights are those before that step.
        Interrupted: if SIGINT came; a checkpoint was written.
    """
    meter = meter or Meter(plan.device.kind)
    newest = get_last_checkpoint(str(checkpoints)) if resume and checkpoints.is_dir() else None
    stop = StopOnSignal()
    trainer = SharedTrainer(
        plan=plan,
        meter=meter,
        model=loaded.model,
        args=_arguments(plan, settings, len(train_rows), bool(eval_rows), checkpoints, resumed=bool(newest)),
        train_dataset=list(train_rows),
        eval_dataset=list(eval_rows) or None,
        data_collator=PadToLongest(pad_id),
        callbacks=[stop, *callbacks],
    )
    trainer.remove_callback(PrinterCallback)  # our own progress bar prints
    meter.track(loaded.model)
    with stop, meter.watch():
        with meter.phase("train"):
            trainer.train(resume_from_checkpoint=newest)
        step = trainer.state.global_step
        if stop.requested:
            raise Interrupted(f"interrupted after step {step}; its state is in {checkpoints}")
        history = trainer.state.log_history
        if eval_rows and not any("eval_loss" in entry and entry["step"] == step for entry in history):
            trainer.evaluate()
    # Without the Trainer's closing entry, whose averages cover only the part after a resume.
    history = [entry for entry in history if "loss" in entry or "eval_loss" in entry]
    return Run(history, step, sum(entry.get("skipped", 0) for entry in history))


class SharedTrainer(Trainer):
    """``transformers.Trainer`` with token-true losses. See the module's docstring."""

    def __init__(self, *, plan: Plan, meter: Meter, **arguments: Any):
        self.plan, self.meter = plan, meter
        self.control: TrainerControl  # for the type checker
        self.loss_sum = {"full": self._full_loss_sum, "chunked": self._chunked_loss_sum}[plan.loss["kind"]]
        super().__init__(**arguments, processing_class=None)
        # compute_loss divides by the window's tokens itself, whatever the model's forward takes.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.step = StepMeter(self)
        self.add_callback(self.step)

    def create_accelerator_and_postprocess(self) -> None:
        """Make fp16 on a CPU real: accelerate accepts it there, and then neither autocasts nor scales."""
        super().create_accelerator_and_postprocess()
        if self.args.fp16 and self.plan.device.kind == "cpu":
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu")

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """Begin with no memory of an earlier run in this process.

        transformers asks bitsandbytes to keep embeddings in 32 bits. Its manager, one per process, remembers that by
        the parameter's place, (0, 0), so the next run's first matrix gets 32 bits too; and it keeps the earlier
        model's embedding alive.
        """
        if self.plan.optimizer != {"bits": 32, "paged": False}:
            from bitsandbytes.optim import GlobalOptimManager

            GlobalOptimManager.get_instance().initialize()
        return super().create_optimizer(*arguments)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The micro-batch's share of the window's mean loss per trained token."""
        assert not return_outputs, "evaluate() is overridden, so nobody asks for outputs"
        return self.loss_sum(model, inputs) / num_items_in_batch

    def training_step(self, model, inputs, num_items_in_batch=None):
        """One forward and backward pass; stops at a loss that is not finite."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise Diverged(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}; stopped before the optimizer "
                "touched any weight. Try a lower train.learning_rate" + (", or bf16" if self.args.fp16 else "")
            )
        self.step.count(inputs)
        return loss

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Mean loss over all trained tokens of all rows, whatever the batch size."""
        began = time.perf_counter()
        loader = self.get_eval_dataloader(eval_dataset)
        self.model.eval()
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        with self.meter.phase("evaluate"), torch.no_grad():
            for batch in loader:
                batch = self._prepare_inputs(batch)
                total += self.loss_sum(self.model_wrapped, batch).double().cpu()  # wrapped by train(): autocast
                tokens += int((batch["labels"][:, 1:] != IGNORED).sum())
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss = total.item() / tokens
        if not math.isfinite(loss):
            raise Diverged(f"the evaluation loss is {loss} at step {self.state.global_step}")
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_tokens": tokens,
            f"{metric_key_prefix}_seconds": time.perf_counter() - began,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs, start_time=None):
        """Add the step's bytes, tokens and seconds to its entry."""
        super().log({**logs, **self.step.take()} if "loss" in logs else logs)

    def _full_loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # transformers divides its summed loss by num_items_in_batch: 1 leaves the sum.
        return model(**batch, num_items_in_batch=1).loss.float()

    def _chunked_loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        causal_lm = self.accelerator.unwrap_model(model).get_base_model()
        with self.accelerator.autocast():
            hidden_BTD = causal_lm.base_model(  # all but the head
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).last_hidden_state
            labels_BT = batch["labels"][:, 1:]  # hidden state t predicts token t + 1
            wanted = labels_BT != IGNORED
            return chunked_cross_entropy(
                hidden_BTD[:, :-1][wanted],
                causal_lm.get_output_embeddings().weight,
                labels_BT[wanted],
                self.plan.loss["tokens_per_chunk"],
            )


def steps_per_epoch(settings: Train, accumulation: int, rows: int) -> int:
    """Optimizer steps of one epoch, the partial last window included."""
    return math.ceil(math.ceil(rows / settings.batch_size) / accumulation)


def _arguments(
    plan: Plan, settings: Train, rows: int, evaluates: bool, checkpoints: Path, *, resumed: bool
) -> TrainingArguments:
    training = dict(plan.training)
    known = {field.name for field in fields(TrainingArguments)}
    if "activation_checkpointing" in known:  # its name since transformers 5.2x, the only one in 6
        training = {k.replace("gradient_checkpointing", "activation_checkpointing"): v for k, v in training.items()}
    epoch = steps_per_epoch(settings, plan.training["gradient_accumulation_steps"], rows)
    total = settings.max_steps or math.ceil(epoch * settings.epochs)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        use_cpu=plan.device.kind == "cpu",
        optim=OPTIMIZERS[plan.optimizer["bits"], plan.optimizer["paged"]],
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        max_steps=total,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=int(total * settings.warmup_ratio),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=settings.eval_steps or epoch,
        eval_on_start=evaluates and not resumed,
        save_strategy="steps",
        save_steps=settings.save_steps or epoch,
        save_total_limit=2,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would log a NaN as 0.0
        seed=settings.seed,
        dataloader_pin_memory=plan.device.kind == "cuda",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        **training,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process, one card: DataParallel cannot copy 4-bit weights
    return arguments
