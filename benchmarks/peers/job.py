"""One training job, and the ways to do it: by our trainer, by a bare loop, by TRL."""

import itertools
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers import TrainerCallback, set_seed

from benchmarks.peers import bare_loop, trl_sft
from cria_tricks import models
from cria_tricks.bench.case import free_memory
from cria_tricks.common.errors import Interrupted
from cria_tricks.data.batches import trained_tokens
from cria_tricks.load.model import Loaded, load
from cria_tricks.measure.memory import LiveBytes, Meter, every_tensor
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training
from cria_tricks.trainer.loop import row_order

Rows = list[dict[str, list[int]]]
SHORT = 48
"""Tokens of the shortest row that warms up."""


class Clock(TrainerCallback):
    """When each optimizer step ended, the device's work included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def mark(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        self.mark()
        control.should_save = False  # our loop would save after the last step

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first, which warms up: whole periods with all that happens between two steps."""
        return [after - before for before, after in itertools.pairwise(self.ends)]


class Job:
    """Some optimizer steps on given rows.

    Args:
        recipe: what to train; its ``train.max_steps`` says how long.
        rows: with ``input_ids`` and ``labels``; taken in turn, again from the first when they run out.
        tokenizer: for TRL, which pads with it.
        short_first: whether the first step, which warms up, has the ends of its rows only, of many lengths.
    """

    def __init__(self, recipe: Recipe, rows: Rows, tokenizer: Any, short_first: bool = False):
        self.recipe, self.settings, self.plan = recipe, recipe.train, resolve(recipe)
        self.weights, self.tokenizer = models.find(recipe.model), tokenizer
        accumulation = recipe.tricks.gradient_accumulation
        wanted = recipe.train.max_steps * accumulation * recipe.train.batch_size
        self.rows = list(itertools.islice(itertools.cycle(rows), wanted))
        if short_first:
            order = row_order(wanted, self.settings.seed)
            for place, row in enumerate(order[: wanted // recipe.train.max_steps]):
                end = {name: values[-SHORT - place :] for name, values in self.rows[row].items()}
                self.rows[row] = end  # whose tokens are trained
        windows = bare_loop.windows(self.rows, self.settings, accumulation, tokenizer.pad_token_id)
        steps = itertools.islice(windows, recipe.train.max_steps)
        self.tokens = [sum(int(trained_tokens(batch)) for batch in window) for window in steps]

    def time(self, way: str, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Do the job on a freshly loaded model, with nobody counting bytes.

        Args:
            way: ``ours``, ``bare`` or ``trl``.
            flags: arguments of TRL's ``SFTConfig`` that differ from ours.

        Raises:
            RuntimeError: if it trained another number of tokens, and so was another job.
        """
        clock = Clock()
        losses, tokens = self._do(way, self._fresh(), clock, flags or {}, Meter(self.plan.device.kind, compiled=True))
        if tokens != sum(self.tokens) or len(losses) != self.settings.max_steps:
            raise RuntimeError(f"{way} trained {tokens} tokens in {len(losses)} steps, not {self.tokens}")
        seconds = sum(clock.seconds)
        return {
            "seconds": seconds,
            "step_seconds": clock.seconds,
            "trained_tokens_per_second": sum(self.tokens[1:]) / seconds,
            "losses": losses,
        }

    def weigh(self, way: str, flags: Mapping[str, Any] | None = None) -> int:
        """Peak bytes of the job, of any way counted alike: all live storages on a CPU, CUDA's allocator on a card.

        Two steps of the longest row, in two micro-batches where there are several: then states and earlier gradients
        are alive, and nothing can come that is larger.
        """
        flags = dict(flags or {})
        batch = flags.get("per_device_train_batch_size", self.settings.batch_size)
        windows = flags.pop("gradient_accumulation_steps", self.recipe.tricks.gradient_accumulation)
        accumulation = min(2, windows)
        steps = ["train.max_steps=2", f"train.batch_size={batch}", f"tricks.gradient_accumulation={accumulation}"]
        longest = max(self.rows, key=lambda row: len(row["input_ids"]))
        small = Job(with_settings(self.recipe, steps), [longest], self.tokenizer)
        loaded = small._fresh()
        if self.plan.device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            meter = Meter("cuda")  # ours resets the peak at every step, and keeps the largest
            small._do(way, loaded, Clock(), flags, meter)
            return max(torch.cuda.max_memory_allocated(), meter.phases.get("train", {}).get("allocated_bytes", 0))
        with LiveBytes() as live:
            live.track_all(every_tensor(loaded.model))
            small._do(way, loaded, Clock(), flags, Meter("cpu", compiled=True))
        return live.peak

    def _fresh(self) -> Loaded:
        free_memory()
        GlobalOptimManager.get_instance().initialize()  # what an earlier run registered is not for this one
        set_seed(self.settings.seed)
        return load(self.plan, self.weights)

    def _do(
        self, way: str, loaded: Loaded, clock: Clock, flags: Mapping[str, Any], meter: Meter
    ) -> tuple[list[float], int]:
        job, pad_id = (loaded, self.plan, self.settings, self.rows), self.tokenizer.pad_token_id
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if way == "ours":
                try:
                    run = fit(training(*job, [], Checkpoints(folder), pad_id=pad_id, meter=meter, callbacks=[clock]))
                except Interrupted:
                    raise KeyboardInterrupt from None
                steps = run.training
                return [step["loss"] for step in steps], sum(step["trained_tokens"] for step in steps)
            if way == "bare":
                steps = bare_loop.train(*job, pad_id=pad_id, after_step=clock.mark)
                return [step["loss"] for step in steps], sum(step["trained_tokens"] for step in steps)
            return trl_sft.train(*job, folder, tokenizer=self.tokenizer, callback=clock, flags=flags)
