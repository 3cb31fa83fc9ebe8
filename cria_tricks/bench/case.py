"""Run one case of a benchmark: a few optimizer steps, with random weights of a known shape.

One run measures memory and speed. Every case loads its model anew, and trains on the same rows in every step. The first
two steps are the warm-up: the first allocates the optimizer states, so the second is the first to reach the full peak.
(In fp16 the warm-up is longer, see :data:`HALVINGS`.) On a CPU the bytes are counted in the warm-up only, because
counting costs time. The trainer itself times the steps that follow, from the beginning of a step to its end; on a GPU
it waits until the GPU has finished.
"""

import datetime
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers import AutoConfig, TrainerCallback

from cria_tricks import models
from cria_tricks.bench.results import Case
from cria_tricks.bill.bill import Bill
from cria_tricks.bill.operation import TOKENS_PER_CHUNK
from cria_tricks.common.errors import BadInput, Interrupted, OutOfMemory, first_line, is_out_of_memory
from cria_tricks.common.version import versions
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import Device, this_device
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.configs import find_config
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import best_precision
from cria_tricks.resolve import resolve
from cria_tricks.run.allocator import keep_freed_memory
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.switches.folds import estimate
from cria_tricks.techniques import packing
from cria_tricks.trainer.fit import Run, fit, training

WARM_UP = 2
"""Steps before the timing begins."""
HALVINGS = 4
"""Additional warm-up steps in fp16. The loss scale may begin too large: each halving skips a step."""
LEAST_ROUNDS = 3
"""The least number of steps to time, however slow they are."""
SECONDS_OF_ROUNDS = 3
"""Once this much time has passed (seconds), ``LEAST_ROUNDS`` timed steps are enough, even if more were asked for."""
TRAINED_SHARE = 0.735
"""Share of the tokens of the real Kwanzaa rows that are trained."""

Rows = list[dict[str, list[int]]]


@dataclass(frozen=True)
class Setup:
    """The settings that all cases of a benchmark session share.

    Attributes:
        shape: the model's shape, as ``random:SHAPE`` names it.
        tokens: length of the longest row (tokens).
        rounds: how many steps are timed at most; with 0 only the bytes are measured, in two steps.
    """

    shape: str
    tokens: int
    rounds: int

    @property
    def chunks(self) -> int:
        """A row length for which the chunked loss needs several chunks (tokens); the rows for a CPU are shorter."""
        return max(self.tokens, 2 * TOKENS_PER_CHUNK)

    def documents(self, lengths: Sequence[int]) -> Rows:
        """Draw random token ids for rows of these lengths; the first part of each row, its prompt, is not trained."""
        draw = torch.Generator().manual_seed(0)
        rows = []
        for length in lengths:
            ids = torch.randint(3, CONFIGS[self.shape]["vocab_size"], (length,), generator=draw).tolist()
            prompt = length - round(length * TRAINED_SHARE)
            rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
        return rows

    def ragged(self, rows: int) -> list[int]:
        """List the lengths of so many rows: each differs, so every batch needs padding; the longest is ``tokens``."""
        return [self.tokens - row * self.tokens // 16 for row in range(rows)]


def default_setup() -> Setup:
    """Choose a two-layer model on a CPU, and Llama-3.2-1B's shape with rows of full length on a GPU."""
    if this_device().kind == "cuda":
        return Setup("llama-3.2-1b", 2048, 5)
    return Setup("tiny", 128, 5)


def measure(bench: str, name: str, words: str, setup: Setup, against: str = "", lengths: Sequence[int] = ()) -> Case:
    """Run one case of a benchmark. A refusal is a result, too, and so is running out of memory.

    Args:
        bench: the technique, or what else is compared.
        name: the case's name.
        words: its settings, as :func:`settings_of` reads them.
        setup: the settings that all cases share.
        against: the name of the baseline, a case of the same bench; empty if there is none.
        lengths: lengths of the rows of an optimizer step (tokens). When left out: as many rows as a step needs, of
            different lengths if it needs several.

    Returns:
        The case. Its status is ``ok``; or ``refused``, with the reason, if a switch cannot work here; or ``oom``, with
        what was being done, if memory ran out.
    """
    device = this_device()
    settings = settings_of(words, device)
    recipe = recipe_of(settings, setup)
    lengths = lengths or setup.ragged(recipe.rows_per_step)
    about: dict[str, Any] = {
        "bench": bench,
        "name": name,
        "against": against,
        "settings": settings,
        "model": recipe.model,
        "rows": len(lengths),
        "tokens_per_row": max(lengths),
        "kind": device.kind,
        **stamp(),
    }
    try:
        plan = resolve(recipe)
        rows = setup.documents(lengths)
        about |= {"warnings": plan.warnings, "estimated_bytes": estimated(recipe, plan, rows).allocated_bytes}
        with keep_freed_memory(device):
            return Case(**about, **_measured(recipe, plan, rows, setup.rounds), status="ok")
    except BadInput as refused:
        return Case(**about, status="refused", why=str(refused))
    except (RuntimeError, MemoryError) as error:
        return Case(**about, status="oom", why=out_of_memory(error))


def prepared(words: str, setup: Setup, lengths: Sequence[int] = ()) -> tuple[Recipe, Plan, Rows]:
    """Return what a case would train; the arguments are those of :func:`measure`.

    Raises:
        BadInput: if a switch cannot work here.
    """
    recipe = recipe_of(settings_of(words, this_device()), setup)
    return recipe, resolve(recipe), setup.documents(lengths or setup.ragged(recipe.rows_per_step))


def recipe_of(settings: Sequence[str], setup: Setup) -> Recipe:
    """Make the recipe of a case."""
    fixed = [f"model=random:{setup.shape}", f"data.max_length={setup.tokens}", "train.save_minutes=0"]
    return with_settings(Recipe(), [*fixed, *settings])


def bytes_by_dry_run(recipe: Recipe, plan: Plan, rows: Rows) -> int:
    """Count the peak of a step by a dry run, with the workspaces that CUDA's allocator counts, too (bytes)."""
    config = AutoConfig.for_model(**find_config(recipe.model))
    counted = dry_run(plan, config, recipe.train.batch_size, *_largest(recipe, plan, rows))
    return counted.peak_bytes + estimated(recipe, plan, rows).workspaces.bytes


def full_lengths(recipe: Recipe, plan: Plan) -> list[int]:
    """List the lengths of the rows of a step whose micro-batches take what ``data.max_length`` in all rows would.

    Packed sequences are of two documents. Of several rows each is a token shorter than the one before, so that every
    micro-batch needs padding, and a mask, however the rows are drawn.
    """
    tokens = recipe.data.max_length
    if plan.collator:
        return [tokens // 2] * 2 * recipe.rows_per_step
    return [tokens - row for row in range(recipe.rows_per_step)]


def out_of_memory(error: BaseException) -> str:
    """Say what was being done when memory ran out.

    Raises:
        BaseException: the error itself, if it has another reason than memory.
    """
    if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
        raise error
    return first_line(error).partition(";")[0]  # the rest says where the run was saved


def _measured(recipe: Recipe, plan: Plan, rows: Rows, rounds: int) -> dict[str, Any]:
    """Measure bytes, seconds and tokens of a case."""
    free_memory()
    meter = Meter(plan.device.kind, compiled=plan.compiled)
    counts = meter.counts or meter.cuda  # neither: a compiled model on a CPU
    run, warm = _train(recipe, plan, rows, rounds, meter)
    timed = [entry for entry in run.training[warm:] if not entry["skipped"]]  # a skipped step is faster
    assert timed or not rounds, "the loss scaler still skips every step after the warm-up"
    one = (timed or run.training)[-1]
    peak = None
    if counts:
        watched = run.training if meter.cuda else run.training[:warm]
        peak = max(entry["peak_bytes"] for entry in watched if "peak_bytes" in entry)
    return {
        "tokens": one["tokens"],
        "trained_tokens": one["trained_tokens"],
        "seconds": [entry["step_seconds"] for entry in timed],
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": meter.phases["train"].get("reserved_bytes"),
        "attention_kernel": run.attention_kernel,
    }


class _Rounds(TrainerCallback):
    """Stop counting bytes after the warm-up, end the run early on a slow machine, and prevent the last checkpoint."""

    def __init__(self, meter: Meter, warm: int):
        self.meter = meter
        self.warm = warm
        self.began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.warm:
            self.meter.counts = False
            self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = False  # the loop would save after the last step
        enough = state.global_step >= self.warm + LEAST_ROUNDS
        if enough and time.perf_counter() - self.began > SECONDS_OF_ROUNDS:
            control.should_training_stop = True


def _train(recipe: Recipe, plan: Plan, rows: Rows, rounds: int, meter: Meter) -> tuple[Run, int]:
    """Train on all rows in each of some steps, and return the run with the number of warm-up steps."""
    warm = WARM_UP
    if rounds and plan.training.get("fp16"):
        warm += HALVINGS
    settings = recipe.train.model_copy(update={"max_steps": warm + rounds})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            job: Any = (load(plan, models.find(recipe.model)), plan, settings, rows, [], Checkpoints(Path(folder)))
            return fit(training(*job, pad_id=0, meter=meter, callbacks=[_Rounds(meter, warm)])), warm
        except Interrupted:
            # Ctrl-C must end all benchmarks. After an Interrupted pytest would only count a failure and go on.
            raise KeyboardInterrupt from None


def estimated(recipe: Recipe, plan: Plan, rows: Rows) -> Bill:
    """Estimate by hand the largest micro-batch that these rows can make."""
    return estimate(recipe, find_shape(recipe.model), plan.device, *_largest(recipe, plan, rows))


def _largest(recipe: Recipe, plan: Plan, rows: Rows) -> tuple[int, int]:
    """Return the length of the longest sequence and the trained tokens of a micro-batch, in the worst case.

    The worst case is that the rows, or the packed sequences, with the most trained tokens come together.
    """
    packed: int | None = plan.collator.get("packed_length")
    sequences = packing.PackedRows(rows, packed) if packed else rows
    counts = sorted(_trained_tokens(row["labels"]) for row in sequences)
    longest = packed or max(len(row["input_ids"]) for row in rows)
    return longest, sum(counts[-recipe.train.batch_size :])


def _trained_tokens(labels: Sequence[int]) -> int:
    """Count the tokens with a loss; the first token has none, because no token before it predicts it."""
    return sum(label != IGNORED for label in labels[1:])


def settings_of(words: str, device: Device | None = None) -> list[str]:
    """Turn the words of a switch set into settings, as ``--set`` takes them; ``tricks.`` may be left out.

    Two words depend on the device. ``precision=best`` is what the built-in recipes take: bf16 if the hardware computes
    it natively, else fp16 on a GPU and fp32 on a CPU. ``attention=best`` is ``sdpa``, torch's attention kernels, with
    ``expand_kv`` if they need it on this device.
    """
    if device:
        expand = " expand_kv=true" if device.needs_expand_kv else ""
        words = words.replace("precision=best", f"precision={best_precision(device)}")
        words = words.replace("attention=best", f"attention=sdpa{expand}")
    settings = []
    for word in words.split():
        field, _, _ = word.partition("=")
        settings.append(word if "." in field else f"tricks.{word}")
    return settings


def free_memory() -> None:
    """Free the memory that an earlier case has left."""
    GlobalOptimManager.get_instance().initialize()  # an 8-bit optimizer's entries hold the embedding of each model
    gc.collect()  # an optimizer and its scheduler refer to each other, so only the collector frees them
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else all cases would share torch.compile's limit of compiled versions
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def stamp(recipe: Recipe | None = None) -> dict[str, Any]:
    """Return date, device and versions of a run, and the recipe if all its cases share one."""
    about: dict[str, Any] = {}
    if recipe:
        about["recipe"] = recipe.model_dump(mode="json")
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about["device"] = this_device().name
    about["versions"] = versions()
    return about
