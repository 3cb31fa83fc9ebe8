"""The loop beside the trainer: one stage of a model, torch's schedule over it, its optimizer.

transformers' Trainer has no pipelining. What a step is stays the same here: a loss summed over the window's trained
tokens and divided once, gradients clipped by the norm of all of them, the schedule of ``arguments.py``.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import Trainer, TrainingArguments, get_scheduler

from cria_tricks.callbacks import SKIPS_IN_A_ROW
from cria_tricks.data.tokens import IGNORED
from cria_tricks.errors import BadInput, Diverged
from cria_tricks.losses import trained_places
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.pipeline import Slot
from cria_tricks.plan import Plan
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Models whose hidden states go from block to block as they are. (Gemma scales what comes in, and would do it again in
every stage.)"""
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def blocks_of(layers: int, stages: int) -> list[range]:
    """Which blocks each stage has: equally many, and one more in the first ones, as the last has the head."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


class Part(nn.Module):
    """What one stage computes of a model. The rest of the model is emptied, in place.

    The model's own forward pass runs, with its masks and rotary angles; blocks that are elsewhere hand on what they are
    given. So every parameter keeps its name, and an adapter put together again is one of the whole model.

    Args:
        model: a ``PeftModel`` of one of :data:`KINDS`, whole.
        plan: its precision and loss.
        blocks: this stage's.
    """

    def __init__(self, model: Any, plan: Plan, blocks: range):
        super().__init__()
        self.model, self.loss = model, plan.loss
        self.causal_lm = model.get_base_model()
        backbone, self.head = self.causal_lm.base_model, self.causal_lm.get_output_embeddings()
        self.first, self.last = blocks.start == 0, blocks.stop == len(backbone.layers)
        own = [*backbone.layers[blocks.start : blocks.stop]]
        own += [self.causal_lm.get_input_embeddings()] if self.first else []
        own += [backbone.norm, self.head] if self.last else []
        for module in (*backbone.layers, backbone.norm):
            if module not in own:
                module.forward = _hand_on
        _empty(model, {id(p) for module in own for p in module.parameters()})
        dtype = torch.float16 if plan.training.get("fp16") else torch.bfloat16
        reduced = bool(plan.training.get("fp16") or plan.training.get("bf16"))
        self.autocast = lambda: torch.autocast(plan.device.kind, dtype, enabled=reduced)

    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) or hidden states (B, T, D) -> hidden states; logits where the last stage has a full loss."""
        inputs = {"input_ids" if self.first else "inputs_embeds": x}
        with self.autocast():
            hidden_BTD = self.causal_lm.base_model(**inputs, **more).last_hidden_state
            return self.head(hidden_BTD) if self.last and self.loss["kind"] == "full" else hidden_BTD

    def loss_sum(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """The losses of the trained tokens of a micro-batch, from the last stage's output, fp32."""
        if self.loss["kind"] == "full":
            logits, labels = output[:, :-1].float().flatten(0, 1), labels_BT[:, 1:].flatten()
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        row_N, column_N, label_N = trained_places(labels_BT)
        with self.autocast():
            return chunked_cross_entropy(
                output[row_N, column_N], self.head.weight, label_N, self.loss["tokens_per_chunk"]
            )


def _hand_on(hidden_BTD: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_BTD


def _empty(model: nn.Module, own: set[int]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in own:
                if parameter.requires_grad:
                    parameter.requires_grad = False  # an adapter of another stage: at the end it is filled from there
                else:
                    module._parameters[name] = None


@dataclass(frozen=True)
class Window:
    """One pipeline's rows of an optimizer step, all of one length.

    Attributes:
        inputs: ``input_ids``, and ``position_ids`` of packed rows; shape (k B, T).
        labels: the same shape.
        trained: tokens with a label in the whole step, other pipelines' included.
        tokens: real tokens in the whole step.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    trained: int
    tokens: int


def windows(
    rows: Sequence[dict[str, list[int]]],
    length: int,
    batch_size: int,
    micro_batches: int,
    pad_id: int,
    share: int = 0,
    shares: int = 1,
) -> Iterator[Window]:
    """Cut rows into optimizer steps, and take from each the micro-batches of one pipeline.

    The last window is filled up with rows in which nothing is trained. There is no attention mask: in a causal model
    no token sees the padding to its right.

    Args:
        rows: in the order of the epoch.
        length: T, at least the longest row's.
        batch_size: B, rows of a micro-batch.
        micro_batches: k, of all pipelines together.
        pad_id: token id that fills up.
        share: this pipeline's number: it takes the micro-batches share, share + shares, ...
        shares: how many pipelines there are.
    """
    fill = {"input_ids": pad_id, "labels": IGNORED, "position_ids": 0}
    padded_k = -(-micro_batches // shares) * shares
    for start in range(0, len(rows), batch_size * micro_batches):
        window = rows[start : start + batch_size * micro_batches]
        made = {}
        for name in rows[0]:
            matrix = torch.full((padded_k * batch_size, length), fill[name])
            for index, row in enumerate(window):
                matrix[index, : len(row[name])] = torch.tensor(row[name])
            made[name] = matrix.unflatten(0, (padded_k, batch_size))[share::shares].flatten(0, 1)
        real = sum(len(row["input_ids"]) for row in window)
        labels = sum(label != IGNORED for row in window for label in row["labels"][1:])
        yield Window(made, made.pop("labels"), labels, real)


class ClockedStage(PipelineStage):
    """torch's stage, which remembers when it computed.

    Attributes:
        slots: the passes since they were last cleared, in seconds of ``time.perf_counter``.
    """

    slots: list[Slot]

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._clock("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
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
        model: whole; this stage's part is left of it.
        plan: what was loaded.
        arguments: of transformers: optimizer, learning rate, schedule, norm to clip at.
        mesh: the processes as a grid of (data, stage).
        micro_batches: a pipeline's, in each step.
        schedule: of :data:`SCHEDULES`.
        blocks: each stage's; equally many when left out.

    Attributes:
        part: this stage's modules.
        stage: torch's view of it, with its last step's slots.
        skipped: steps that the loss scaler skipped.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        arguments: TrainingArguments,
        mesh: DeviceMesh,
        micro_batches: int,
        schedule: str = "1f1b",
        blocks: Sequence[range] = (),
    ):
        self.mesh, self.group = mesh, mesh["stage"].get_group()
        number, stages = mesh.get_local_rank("stage"), mesh["stage"].size()
        blocks = blocks or blocks_of(model.config.num_hidden_layers, stages)
        self.part = Part(model, plan, blocks[number])
        self.device = torch.device(plan.device.kind)
        self.stage = ClockedStage(self.part, number, stages, self.device, group=self.group)
        self.stage.slots = []
        self.schedule = SCHEDULES[schedule](self.stage, micro_batches, loss_fn=self._loss, scale_grads=False)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        self.optimizer = optimizer(self.trained.values(), weight_decay=arguments.weight_decay, **options)
        self.rate = get_scheduler(
            arguments.lr_scheduler_type, self.optimizer, arguments.warmup_steps, arguments.max_steps
        )
        self.max_norm, self.skipped, self.skipped_in_a_row = arguments.max_grad_norm, 0, 0
        self.scaler = ShardedGradScaler(
            plan.device.kind, enabled=bool(plan.training.get("fp16")), process_group=self.group
        )
        self.scaler.scale(torch.zeros((), device=self.device))  # only the last stage has a loss to begin with
        self.divisor = 1

    def step(self, window: Window) -> dict[str, float]:
        """One optimizer step.

        Returns:
            ``loss`` per trained token, ``grad_norm``, ``learning_rate``, ``idle_share`` of all stages, and whether the
            loss scaler ``skipped`` it; the same in every process.

        Raises:
            Diverged: in every process, if the gradients are not finite; no weight was touched.
        """
        self.part.train()
        self.stage.slots.clear()
        began, self.divisor = time.perf_counter(), window.trained
        loss = self._through(self.schedule.step, window) / self.scaler.get_scale()
        seconds = self.stage.now() - began
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        if self.mesh["data"].size() > 1:
            add_up([*gradients, loss], self.mesh["data"].get_group())
        self.scaler.unscale_(self.optimizer)
        worked = sum(slot.end - slot.begin for slot in self.stage.slots)
        squares = self.squares(gradients)
        totals = torch.tensor([squares, loss.item(), worked], dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.group)
        norm = totals[0].sqrt().item()
        rate = self.rate.get_last_lr()[0]
        skipped = self._update(norm)
        idle = 1 - totals[2].item() / (seconds * self.mesh["stage"].size())
        return {
            "loss": totals[1].item(), "grad_norm": norm, "learning_rate": rate, "idle_share": idle, "skipped": skipped,
        }  # fmt: skip

    def evaluate(self, rows: Sequence[Window]) -> float:
        """Mean loss over all trained tokens; the same in every process."""
        self.part.eval()
        self.divisor, total = 1, torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for window in rows:
                total += self._through(self.schedule.eval, window)
        dist.all_reduce(total)  # the last stages have a loss, all others have 0
        return total.item() / sum(window.trained for window in rows)

    def _through(self, run: Any, window: Window) -> torch.Tensor:
        """Run a schedule over a window; the sum of its losses, 0 where there are none."""
        ids, *more = (tensor.to(self.device) for tensor in window.inputs.values())
        names = [name for name in window.inputs if name != "input_ids"]
        losses: list[torch.Tensor] = []
        run(
            *([ids] if self.part.first else []),
            target=window.labels.to(self.device) if self.part.last else None,
            losses=losses if self.part.last else None,
            return_outputs=False,  # they would keep all logits
            **dict(zip(names, more, strict=True)),
        )
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)

    def _loss(self, output: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        loss = self.scaler.scale(self.part.loss_sum(output, labels_BT) / self.divisor)
        if self.stage.slots:  # torch takes the loss after the forward pass, of which it is a part
            self.stage.slots[-1] = self.stage.slots[-1]._replace(end=self.stage.now())
        return loss

    def squares(self, gradients: Sequence[torch.Tensor]) -> float:
        """The square of the norm of this stage's gradients."""
        return sum(gradient.square().sum(dtype=torch.float64) for gradient in gradients).item()

    def _update(self, norm: float) -> bool:
        """Clip and update, or skip the step if the loss scaler found that its gradients overflowed."""
        skipped = not math.isfinite(norm)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped and not (self.scaler.is_enabled() and self.skipped_in_a_row < SKIPS_IN_A_ROW):
            raise Diverged(
                f"the gradients are not finite at step {self.rate.last_epoch + 1}; stopped before the optimizer touched "
                "any weight. Try a lower train.learning_rate, or bf16 where it is fp16"
            )
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, self.max_norm / (norm + 1e-6)))
        self.scaler.step(self.optimizer)  # which does nothing where any stage's gradients overflowed
        self.scaler.update()
        if not skipped:
            self.rate.step()
        self.optimizer.zero_grad()
        return skipped
