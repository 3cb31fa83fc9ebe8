"""Record where a step's time and bytes go: a trace of a few steps, and on CUDA a snapshot of the allocator.

torch's profiler writes the trace, in the format of Chrome's tracing that Perfetto reads. The spans that it has beside
the operators are ours: ``step 3``, and in it each micro-batch, the optimizer step, and between two steps what is read,
logged, saved and evaluated. docs/guide/monitoring.md says how both are read.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import TrainerCallback

TRACE = "trace.json.gz"
SNAPSHOT = "snapshot.pickle"
OPERATORS = "operators.json"
SHOWN = 10
"""Operators in the report."""
MOST_EVENTS = 100_000
"""Allocations that a snapshot remembers; some three steps of a small model."""


def windows(steps: int) -> dict[str, int]:
    """Choose the steps to trace: three after the first ones, in which kernels are chosen and optimizer states made.

    The profiler itself starts one step earlier, as its own first step is slow.

    Args:
        steps: optimizer steps that this process is going to take.

    Examples:
        >>> windows(42)
        {'wait': 2, 'warmup': 1, 'active': 3}
        >>> windows(2)
        {'wait': 0, 'warmup': 1, 'active': 1}
    """
    active = min(3, max(1, steps - 1))
    warmup = min(1, steps - active)
    return {"wait": min(2, steps - active - warmup), "warmup": warmup, "active": active}


class Profile(TrainerCallback):
    """Trace a few optimizer steps, inside ``with profile:``; then it is off, as it is when the run ends early.

    Args:
        folder: to write to.
        cuda: whether there is a card.
    """

    def __init__(self, folder: Path, *, cuda: bool = False):
        self.folder = folder
        self.cuda = cuda
        self._running = contextlib.ExitStack()
        self._spans = contextlib.ExitStack()
        self._profiler: profile | None = None

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def on_train_begin(self, args, state, control, **kwargs):
        """Make the schedule; now it is known how many steps there are."""
        steps = state.max_steps - state.global_step
        if steps <= 0:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself on standard error
        self._window = windows(steps)
        self._done = 0
        self._first = state.global_step + self._window["wait"] + self._window["warmup"] + 1
        self._profiler = self._running.enter_context(
            profile(
                activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda],
                schedule=schedule(**self._window, repeat=1),
            )
        )
        self._between_steps()

    def on_step_begin(self, args, state, control, **kwargs):
        """Begin a step's span, and its first micro-batch's."""
        if self._profiler:
            if self.cuda and state.global_step + 1 == self._first:
                torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
            self._spans.close()
            self._micro_batches = 0
            self._span(f"step {state.global_step + 1}")
            self._next_micro_batch()

    def on_substep_end(self, args, state, control, **kwargs):
        """A micro-batch is done, and not the last."""
        if self._profiler:
            self._inner.close()
            self._next_micro_batch()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """All micro-batches are done, and the gradients clipped."""
        if self._profiler:
            self._inner.close()
            self._inner.enter_context(record_function("optimizer step"))

    def on_optimizer_step(self, args, state, control, **kwargs):
        """The weights have moved."""
        if self._profiler:
            self._inner.close()

    def on_step_end(self, args, state, control, **kwargs):
        """End the step's span."""
        self._spans.close()

    def on_log(self, args, state, control, logs, **kwargs):
        """After the step's time was taken, tell the profiler, and write when it has seen enough."""
        if not self._profiler or "loss" not in logs:
            return
        self._profiler.step()
        self._done += 1
        if self._done == sum(self._window.values()):
            self._write()
        else:
            self._between_steps()

    def _span(self, name: str) -> None:
        self._spans.enter_context(record_function(name))
        self._inner = self._spans.enter_context(contextlib.ExitStack())

    def _between_steps(self) -> None:
        self._span("between steps")

    def _next_micro_batch(self) -> None:
        self._micro_batches += 1
        self._inner.enter_context(record_function(f"micro-batch {self._micro_batches}"))

    def _write(self) -> None:
        """Stop, and write what was seen."""
        found = self._profiler
        assert found is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / SNAPSHOT))
        self._close()
        found.export_chrome_trace(str(self.folder / TRACE))
        about = self.summarise(found)
        (self.folder / OPERATORS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    def _close(self) -> None:
        """Stop tracing, whatever happened."""
        self._spans.close()
        self._running.close()
        if self.cuda and self._profiler:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = None

    def summarise(self, found: profile) -> dict[str, Any]:
        """List the operators, the most costly first, by their own time, without that of the operators they call.

        Args:
            found: the profiler, stopped.
        """
        device, own = ("cuda", "self_device_time_total") if self.cuda else ("cpu", "self_cpu_time_total")
        operators = []
        for event in found.key_averages():
            microseconds = getattr(event, own)
            if microseconds > 0 and not event.is_user_annotation:
                operators.append({"name": event.key, "calls": event.count, "seconds": microseconds / 1e6})
        operators.sort(key=lambda operator: -operator["seconds"])
        seconds = sum(operator["seconds"] for operator in operators)
        for operator in operators:
            operator["share"] = operator["seconds"] / seconds
        return {
            "steps": [self._first, self._first + self._window["active"] - 1],
            "device": device,
            "seconds": seconds,
            "operators": operators,
        }


def read(folder: Path) -> Mapping[str, Any] | None:
    """Read what :class:`Profile` has written about a run, with the names of its files; ``None`` if there was none."""
    try:
        about = json.loads((folder / OPERATORS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    files = [f"{folder.name}/{name}" for name in (TRACE, SNAPSHOT) if (folder / name).exists()]
    return {**about, "files": files, "operators": about["operators"][:SHOWN]}
