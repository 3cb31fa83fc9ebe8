"""Run one case of a benchmark: some optimizer steps of the shared trainer on random weights of a known shape.

Memory and speed share one run. Every case begins with a freshly loaded model and trains the same rows at every step.
The first two steps warm up: the first allocates the optimizer states, the second sets the peak. On a CPU all storages
are watched in these two steps only, because watching costs time. The trainer itself times the rounds that follow, from
a step's begin to its end, with the GPU's work.
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
from transformers import TrainerCallback

from cria_tricks import models
from cria_tricks.bench.results import Case
from cria_tricks.bill.constants import TOKENS_PER_CHUNK
from cria_tricks.common.errors import BadInput, Interrupted, OutOfMemory, first_line, is_out_of_memory
from cria_tricks.common.version import versions
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import Device, this_device
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import best_precision
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import Run, fit
from cria_tricks.tricks.folds import estimate

WARM_UP = 2
"""Steps before the timing begins."""
HALVINGS = 4
"""More steps of warm-up in fp16, in which the loss scaler may look for its scale, and skip."""
LEAST_ROUNDS = 3
"""Timed steps that are always done."""
SECONDS_OF_ROUNDS = 3
"""Time after which the least rounds are enough (seconds)."""
TRAINED_SHARE = 0.735
"""Share of the tokens of the real Kwanzaa rows that are trained."""

Rows = list[dict[str, list[int]]]


@dataclass(frozen=True)
class Setup:
    """What stays the same in all cases of a session.

    Attributes:
        shape: the model's shape, as ``random:SHAPE`` names it.
        tokens: length of a row (tokens).
        rounds: number of steps that are timed.
    """

    shape: str
    tokens: int
    rounds: int

    @property
    def chunks(self) -> int:
        """Length of a row whose logits come in several chunks (tokens); a CPU's rows are too short for that."""
        return max(self.tokens, 2 * TOKENS_PER_CHUNK)

    def documents(self, lengths: Sequence[int]) -> Rows:
        """Draw random token ids for rows of these lengths; their first quarter, a prompt's share, is not trained."""
        draw = torch.Generator().manual_seed(0)
        rows = []
        for length in lengths:
            ids = torch.randint(3, CONFIGS[self.shape]["vocab_size"], (length,), generator=draw).tolist()
            prompt = length - round(length * TRAINED_SHARE)
            rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
        return rows

    def ragged(self, rows: int) -> list[int]:
        """List different lengths for so many rows, so that every batch needs padding; the longest is ``tokens``."""
        return [self.tokens - row * self.tokens // 16 for row in range(rows)]


def default_setup() -> Setup:
    """Choose the two-layer model on a CPU, Llama-3.2-1B's shape at full length on a GPU."""
    if this_device().kind == "cuda":
        return Setup("llama-3.2-1b", 2048, 5)
    return Setup("tiny", 128, 5)


def measure(bench: str, name: str, words: str, setup: Setup, against: str = "", lengths: Sequence[int] = ()) -> Case:
    """Run one case; that it is refused or runs out of memory is a result, too.

    Args:
        bench: the BENCH of ``bench_BENCH.py``.
        name: the case's name.
        words: its settings, as :func:`settings_of` reads them.
        setup: what is not the case's own.
        against: the case of the same bench that it is to be held against.
        lengths: tokens of the rows of an optimizer step. When left out: one full row, or several ragged ones where the
            micro-batches of a step need several.

    Returns:
        The case: ``refused`` with the reason, if a toggle cannot work here; ``oom``, with what it was doing, if memory
        ran out.
    """
    device = this_device()
    settings = settings_of(words, device)
    recipe = with_settings(
        Recipe(), [f"model=random:{setup.shape}", f"data.max_length={setup.tokens}", "train.save_minutes=0", *settings]
    )
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
        about |= {"warnings": plan.warnings, "estimated_bytes": _estimated(recipe, plan, rows)}
        return Case(**about, **_measured(recipe, plan, rows, setup.rounds), status="ok")
    except BadInput as refused:
        return Case(**about, status="refused", why=str(refused))
    except (RuntimeError, MemoryError) as error:
        return Case(**about, status="oom", why=out_of_memory(error))


def out_of_memory(error: BaseException) -> str:
    """Say what was being done when memory ran out.

    Raises:
        BaseException: the error itself, if it says anything else.
    """
    if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
        raise error
    return first_line(error).partition(";")[0]  # after it comes the folder that holds the state


def _measured(recipe: Recipe, plan: Plan, rows: Rows, rounds: int) -> dict[str, Any]:
    """Measure bytes, seconds and tokens of a case."""
    free_memory()
    meter = Meter(plan.device.kind, compiled=plan.compiled)
    counts = meter.counts or meter.cuda  # else there is only the whole process's memory
    run, warm = _train(recipe, plan, rows, rounds, meter)
    timed = [entry for entry in run.training[warm:] if not entry["skipped"]]  # a skipped step costs less
    assert timed, "the loss scaler still skips every step after the warm-up"
    peak = None
    if counts:
        watched = run.training if meter.cuda else run.training[:warm]
        peak = max(entry["peak_bytes"] for entry in watched if "peak_bytes" in entry)
    return {
        "tokens": timed[0]["tokens"],
        "trained_tokens": timed[0]["trained_tokens"],
        "seconds": [entry["step_seconds"] for entry in timed],
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": meter.phases["train"].get("reserved_bytes"),
        "attention_kernel": run.attention_kernel,
    }


class _Rounds(TrainerCallback):
    """Stop watching storages after the warm-up, and stop a slow machine before all rounds are done; save nothing."""

    def __init__(self, meter: Meter, warm: int):
        self.meter = meter
        self.warm = warm
        self.began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.warm:
            self.meter.counts = False
            self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = False  # the Trainer would, after the last step
        enough = state.global_step >= self.warm + LEAST_ROUNDS
        if enough and time.perf_counter() - self.began > SECONDS_OF_ROUNDS:
            control.should_training_stop = True


def _train(recipe: Recipe, plan: Plan, rows: Rows, rounds: int, meter: Meter) -> tuple[Run, int]:
    """Train for some steps, each over all the rows; and say how many of them warmed up."""
    warm = WARM_UP
    if plan.training.get("fp16"):
        warm += HALVINGS
    settings = recipe.train.model_copy(update={"max_steps": warm + rounds})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            job: Any = (load(plan, models.find(recipe.model)), plan, settings, rows, [], Checkpoints(Path(folder)))
            return fit(*job, pad_id=0, meter=meter, callbacks=[_Rounds(meter, warm)]), warm
        except Interrupted:
            raise KeyboardInterrupt from None


def _estimated(recipe: Recipe, plan: Plan, rows: Rows) -> int:
    """Estimate the peak of the largest micro-batch that may come (bytes)."""
    shape = find_shape(recipe.model)
    if "packed_length" in plan.collator:  # packed sequences are full, and all of their tokens may be trained
        return estimate(recipe, shape, plan.device, recipe.data.max_length).allocated_bytes
    longest = max(len(row["input_ids"]) for row in rows)
    counts = sorted(_trained_tokens(row["labels"]) for row in rows)
    most = sum(counts[-recipe.train.batch_size :])
    return estimate(recipe, shape, plan.device, longest, most).allocated_bytes


def _trained_tokens(labels: Sequence[int]) -> int:
    """Count the tokens with a loss; the first token has none, because nothing before it predicts it."""
    return sum(label != IGNORED for label in labels[1:])


def settings_of(words: str, device: Device | None = None) -> list[str]:
    """Read a toggle set as settings: words of the command line, where ``tricks.`` may be left out.

    Two words depend on the device: ``precision=best`` is what the named recipes take (bf16 where it is real, fp16 on
    other GPUs, fp32 on other CPUs), ``attention=best`` is torch's kernels, with ``expand_kv`` where those need it.
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
    """Let go of what an earlier case has left, so that the next begins clean."""
    gc.collect()  # a finished Trainer is a cycle
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # compiled blocks of all cases would share one limit
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def stamp(recipe: Recipe | None = None) -> dict[str, Any]:
    """Describe a run: date, device, versions, and the recipe if all cases share one."""
    about: dict[str, Any] = {}
    if recipe:
        about["recipe"] = recipe.model_dump(mode="json")
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about["device"] = this_device().name
    about["versions"] = versions()
    return about
