"""A loaded model -> Run, over a pipeline: epochs, evaluations and a history as the shared trainer keeps it."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cria_tricks.hardware.attention_kernels import WatchAttention
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.processes.world import World, grid
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.arguments import training_arguments
from cria_tricks.trainer.fit import Run
from cria_tricks.trainer.pipeline_loop import Loop
from cria_tricks.trainer.pipeline_part import Window, cut_windows
from cria_tricks.tricks.packing import pack

Rows = Sequence[dict[str, list[int]]]


def fit(
    model: Any,
    plan: Plan,
    recipe: Recipe,
    rows: Mapping[str, Rows],
    parts: Sequence[range],
    world: World,
    *,
    pad_id: int,
    meter: Meter | None = None,
    schedule: str = "1f1b",
    folder: Path = Path("checkpoints"),
    say: Callable[[str], None] = lambda line: None,
    mesh: DeviceMesh | None = None,
    kind: type[Loop] = Loop,
) -> tuple[Loop, Run]:
    """Train one stage of a loaded model in place, evaluating before, during and after.

    Args:
        model: a ``PeftModel``, whole; this process's stage is left of it.
        plan: by which it was loaded.
        recipe: what to train.
        rows: token rows, ``train`` and ``eval``.
        parts: the blocks of every stage.
        world: the processes; ``world.data`` pipelines of them.
        pad_id: token id that fills up shorter rows.
        meter: counts this process's bytes and seconds; made here when left out.
        schedule: ``1f1b`` or ``gpipe``.
        folder: what transformers takes for the folder of the checkpoints; none are written.
        say: takes a line for each step.
        mesh: a grid with the axes ``data`` and ``stage``; made here when left out.
        kind: the loop.

    Raises:
        Diverged: if the gradients are not finite.
    """
    settings, k = recipe.train, recipe.tricks.gradient_accumulation
    train_rows = pack(rows["train"], plan.collator["packed_length"]) if plan.collator else rows["train"]
    arguments = training_arguments(plan, settings, len(train_rows), True, folder, None)
    mesh = mesh or grid(plan.device.kind, data=world.data, stage=len(parts))
    loop = kind(model, plan, arguments, mesh, k // world.data, parts, schedule)
    meter = meter or Meter(plan.device.kind, compiled=plan.compiled)
    meter.track(every_tensor(model))
    length, share = max(len(row["input_ids"]) for row in (*train_rows, *rows["eval"])), mesh.get_local_rank("data")

    def cut(some: Rows) -> Iterator[Window]:
        return cut_windows(some, length, settings.batch_size, k, pad_id, share, world.data)

    def evaluate(step: int) -> dict[str, Any]:
        with meter.phase("evaluate"):
            loss = loop.evaluate(evaluation)
        say(f"step {step}: evaluation loss {loss:.4f}")
        return {"step": step, "eval_loss": loss}

    evaluation, total, watch = list(cut(rows["eval"])), arguments.max_steps, WatchAttention()
    history = [evaluate(0)]
    windows = itertools.chain.from_iterable(map(cut, epochs(train_rows, settings.seed)))
    for step, window in enumerate(itertools.islice(windows, total), 1):
        began = time.perf_counter()
        with meter.phase("train"), ExitStack() as watching:
            if step <= 2:  # from the second on the optimizer's states are there, and all steps are alike
                watching.enter_context(meter.watch())
            if step == 1 and not plan.compiled:
                watching.enter_context(watch)
            entry: dict[str, Any] = {"step": step, **loop.step(window)}
            [peak] = map(int, world.highest(meter.lap()))
        if step <= 2 or not meter.counts:
            entry["peak_bytes"] = peak
        entry |= {"tokens": window.tokens, "trained_tokens": window.trained}
        history.append(entry | {"step_seconds": time.perf_counter() - began})
        say(
            f"step {step} of {total}: loss {entry['loss']:.4f}, gradient norm {entry['grad_norm']:.3f}, learning rate "
            f"{entry['learning_rate']:.2e}, idle {entry['idle_share']:.0%}"
        )
        if step % arguments.eval_steps == 0 or step == total:
            history.append(evaluate(step))
    skipped = sum(entry.get("skipped", 0) for entry in history)
    return loop, Run(history, total, skipped, total, len(train_rows), watch.kernel)


def epochs(rows: Rows, seed: int) -> Iterator[Rows]:
    """The rows of one epoch after the other, in the order in which the shared trainer reads them."""
    for epoch in itertools.count():
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
        yield [rows[index] for index in order.tolist()]
