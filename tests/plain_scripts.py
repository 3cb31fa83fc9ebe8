"""Scripts of a reader: a plain text of code is run in one, under four conditions, and its step is measured."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from cria_tricks.data.batches import PadToLongest
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.measure.memory import LiveBytes, every_tensor

LAYERS, WIDTH, INNER, HEADS, SHARED, WORDS, RANK = 3, 128, 256, 4, 2, 512, 8
HEAD_DIM = WIDTH // HEADS
LENGTHS = (48, 33, 17, 40, 9, 26, 12, 5)
CONDITIONS = {
    "Trainer": [32] * 8,
    "own loop": [32] * 8,
    "padding": LENGTHS,
    "autocast": [32] * 8,
}


class Found(NamedTuple):
    """What a script's step came to.

    Attributes:
        loss: of all its micro-batches.
        gradients: by the name of the weight, before the optimizer's step.
        kept: bytes that the forward pass of a micro-batch left alive, and those of them inside the blocks.
        saved: bytes that autograd keeps, as its hooks see them.
        weights: bytes of all weights, with the scales of quantised ones.
        states: bytes of the optimizer's states.
        tokens: positions that the first block computed.
        known: the names of the script.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    kept: int
    in_blocks: int
    saved: int
    weights: int
    states: int
    tokens: int
    known: dict[str, Any]

    @property
    def of_gradients(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients.values())


class Watched:
    """Count what a forward pass leaves alive, in all and in the blocks, and what autograd's hooks see of it."""

    def __init__(self, model: torch.nn.Module, *, compiled: bool):
        self.model = model
        self.compiled = compiled  # under a dispatch mode, nothing would be compiled
        self.loss = 0.0
        self.kept = self.in_blocks = self.saved = self.tokens = 0
        self.alive: LiveBytes | None = None
        self.at_the_first = 0
        blocks = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
        if not compiled:
            blocks[0].register_forward_pre_hook(self._begin)
            blocks[-1].register_forward_hook(self._end)

    def _begin(self, block: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if self.alive is not None:
            self.at_the_first = self.alive.live
            self.tokens += given[0].shape[0] * given[0].shape[1]

    def _end(self, *_: Any) -> None:
        if self.alive is not None:
            self.in_blocks = max(self.in_blocks, self.alive.live - self.at_the_first)

    def __call__(self, compute: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor:
        saved = SavedBytes(every_tensor(self.model))
        if self.compiled:
            with saved:
                loss = compute(*arguments, **named)
        else:
            self.alive = LiveBytes()
            self.alive.track_all(every_tensor(self.model))
            before = self.alive.live
            with self.alive, saved:
                loss = compute(*arguments, **named)
            self.kept = max(self.kept, self.alive.live - before)
            self.alive = None
        self.saved = max(self.saved, saved.now)
        self.loss += loss.item()
        return loss


class Gradients(TrainerCallback):
    """Copy the gradients before the optimizer's step, and count its states after it."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.states = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = gradients(model)

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        values = [value for one in optimizer.optimizer.state.values() for value in one.values()]
        self.states = sum(value.nbytes for value in values if torch.is_tensor(value) and value.numel() > 1)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def rows_of(condition: str) -> list[dict[str, list[int]]]:
    """Rows whose first quarter is a prompt."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for length in CONDITIONS[condition]:
        ids = torch.randint(3, WORDS, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 4) + ids[length // 4 :]})
    return rows


def script(code: str, base: str, condition: str, **names: Any) -> dict[str, Any]:
    """Run a text where a reader would, and return its names. What it does not set is a plain script's."""
    bf16 = condition == "autocast"
    plain = TrainingArguments("plain", max_steps=1, bf16=bf16, **QUIET)
    known = {"base": base, "rows": rows_of(condition), "collate": PadToLongest(2), "arguments": plain, **names}
    known["model"] = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(0)
    if bf16:  # as the texts say of cards that have it
        code = code.replace('"float16"', '"bfloat16"')
    exec(compile(code, "PLAIN", "exec"), known)
    own = known["arguments"]
    if own is not plain:
        known["arguments"] = dataclasses.replace(own, bf16=own.bf16 or bf16, **QUIET)
    return known


QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "max_grad_norm": 0, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def step(code: str, base: str, condition: str, *, compiled: bool = False, new: bool = False) -> Found:
    """Take a step with what a text made.

    Args:
        code: the text.
        base: the model's folder.
        condition: one of ``CONDITIONS``.
        compiled: whether the blocks are compiled.
        new: whether adapters begin at zero, as they are made. If not, they get numbers, so that all gradients count.
    """
    known = script(code, base, condition)
    model = known["model"]
    draw = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name and not new:
            weight.data.normal_(0, 0.1, generator=draw)
    weights = LiveBytes()
    weights.track_all(every_tensor(model))
    watched, seen = Watched(model, compiled=compiled), Gradients()
    if condition == "own loop":
        batch = known["collate"](known["rows"])
        watched(lambda: model.train()(**batch).loss).backward()
        seen.found = gradients(model)
    else:
        given = {"train_dataset": known["rows"], "data_collator": known["collate"]}
        trainer = known.get("trainer") or Trainer(model, known["arguments"], **given)
        trainer.compute_loss = functools.partial(watched, trainer.compute_loss)
        trainer.add_callback(seen)
        trainer.train()
    counts = watched.kept, watched.in_blocks, watched.saved, weights.live, seen.states, watched.tokens
    return Found(watched.loss, seen.found, *counts, known)
