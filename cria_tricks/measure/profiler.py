"""Record where a step's time and bytes go: a trace of a few steps, and on CUDA a snapshot of the allocator.

torch's profiler writes the trace in the Chrome trace format, which Perfetto reads. Besides the operators the trace has
spans that we add: ``step 3``, in it one for each micro-batch and one for the optimizer step, and ``between steps`` for
reading the next rows, logging, saving and evaluating. docs/guide/monitoring.md explains how to read both files.
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
"""How many operators the report shows."""
MOST_EVENTS = 100_000
"""How many allocator events (allocations, frees) a snapshot keeps: about three steps of a small model."""


def windows(steps: int) -> dict[str, int]:
    """Choose the steps to trace: up to three, after the first steps, which choose kernels and make optimizer states.

    The profiler starts one step earlier, because its own first step is slow.

    Args:
        steps: optimizer steps that this process is going to take.

    Returns:
        Arguments of ``torch.profiler.schedule``: steps without the profiler (``wait``), steps whose trace is discarded
        (``warmup``), and steps that are traced (``active``).

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
    """Trace a few optimizer steps, inside ``with profile:``, and switch tracing off after them or when the run ends.

    Args:
        folder: where to write the files.
        cuda: whether to trace the card, too.
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
        """Start the profiler with its schedule. The number of steps is not known before."""
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
        """Open the span of a step, and that of its first micro-batch."""
        if self._profiler:
            if self.cuda and state.global_step + 1 == self._first:
                torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
            self._spans.close()
            self._micro_batches = 0
            self._span(f"step {state.global_step + 1}")
            self._next_micro_batch()

    def on_substep_end(self, args, state, control, **kwargs):
        """End the span of a micro-batch that is not the last of its step, and open the next one."""
        if self._profiler:
            self._inner.close()
            self._next_micro_batch()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """End the span of the last micro-batch, which includes clipping, and open that of the optimizer step."""
        if self._profiler:
            self._inner.close()
            self._inner.enter_context(record_function("optimizer step"))

    def on_optimizer_step(self, args, state, control, **kwargs):
        """End the span of the optimizer step."""
        if self._profiler:
            self._inner.close()

    def on_step_end(self, args, state, control, **kwargs):
        """End the span of the whole step."""
        self._spans.close()

    def on_log(self, args, state, control, logs, **kwargs):
        """Tell the profiler that a step is over, and write the files after the last traced one.

        This is called after the time of the step was measured, so that writing is not part of it.
        """
        if not self._profiler or "loss" not in logs:
            return
        self._profiler.step()
        self._done += 1
        if self._done == sum(self._window.values()):
            self._write()
        else:
            self._between_steps()

    def _span(self, name: str) -> None:
        """Open a span, and an empty stack for the spans inside it."""
        self._spans.enter_context(record_function(name))
        self._inner = self._spans.enter_context(contextlib.ExitStack())

    def _between_steps(self) -> None:
        self._span("between steps")

    def _next_micro_batch(self) -> None:
        self._micro_batches += 1
        self._inner.enter_context(record_function(f"micro-batch {self._micro_batches}"))

    def _write(self) -> None:
        """Stop tracing, and write the trace, the snapshot and the table of operators."""
        found = self._profiler
        assert found is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / SNAPSHOT))  # before _close, which ends the recording
        self._close()
        found.export_chrome_trace(str(self.folder / TRACE))
        about = self.summarise(found)
        (self.folder / OPERATORS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    def _close(self) -> None:
        """Stop tracing, whether or not it is complete; a second call does nothing."""
        self._spans.close()
        self._running.close()
        if self.cuda and self._profiler:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = None

    def summarise(self, found: profile) -> dict[str, Any]:
        """List the operators by their own time, without that of the operators that they call; the slowest first.

        Args:
            found: the profiler, after it was stopped.

        Returns:
            ``steps`` (first and last traced), ``device``, ``seconds`` of all operators together, and ``operators``: for
            each its ``name``, ``calls``, ``seconds`` and ``share`` of all seconds.
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
    """Read the slowest operators that :class:`Profile` has written, and the names of its files.

    Returns:
        As :meth:`Profile.summarise`, with ``files`` and at most :data:`SHOWN` operators; ``None`` if there is no trace.
    """
    try:
        about = json.loads((folder / OPERATORS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    files = [f"{folder.name}/{name}" for name in (TRACE, SNAPSHOT) if (folder / name).exists()]
    return {**about, "files": files, "operators": about["operators"][:SHOWN]}
