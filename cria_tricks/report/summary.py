"""Summarise a run as plain data: what was asked, what ran, what it cost."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cria_tricks.bill.bill import Bill
from cria_tricks.common.version import versions
from cria_tricks.data import counts as tally
from cria_tricks.data.stream import Stream
from cria_tricks.data.tokens import TokenRows
from cria_tricks.load.stages import parts_of
from cria_tricks.measure.memory import Meter
from cria_tricks.models.configs import beyond_context
from cria_tricks.parallel.pipeline import bubble
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.trainer import what_ran
from cria_tricks.trainer.fit import Run


def summarise(
    recipe: Recipe,
    plan: Plan,
    run: Run,
    meter: Meter,
    rows: Mapping[str, TokenRows | Stream],
    descriptions: Mapping[str, str],
    parameters: Mapping[str, int],
    context: int = 0,
) -> dict[str, Any]:
    """Summarise a run.

    Args:
        recipe: what was asked.
        plan: what it was resolved to.
        run: what happened.
        meter: seconds, and peak bytes by phase.
        rows: the ``train`` and ``eval`` token rows; of a stream only the rows that were read count.
        descriptions: sources of the two, in words.
        parameters: number of ``trainable`` and ``total`` parameters.
        context: length of the model's context (tokens); 0 where it is not known.

    Returns:
        Plain JSON data; its keys are the command line's contract.
    """
    return {
        **_losses(run),
        **_speeds(run),
        "peak_bytes": _peak_bytes(run, meter),
        "seconds": meter.spent()["seconds"],
        "device": plan.device.name,
        "attention_kernel": run.attention_kernel,
        "warnings": [
            *plan.warnings,
            *data_warnings(rows, recipe, context),
            *run.warnings,
            *map(what_ran.lengthened, run.lengthened),
            *step_warnings(run),
        ],
        "steps": run.steps,
        "planned_steps": run.planned_steps,
        "skipped_steps": run.skipped_steps,
        "lengthened": list(run.lengthened),
        "memory": meter.phases,
        "parameters": dict(parameters),
        "data": {**descriptions, **_data(plan, run, rows["train"], rows["eval"])},
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "plan": plan.to_dict(),
        "history": [_finite(entry) for entry in run.history],
    }


def _losses(run: Run) -> dict[str, float | None]:
    before = after = None
    if run.evaluations:
        before = run.evaluations[0]["eval_loss"]
        after = run.evaluations[-1]["eval_loss"]
    return {
        "eval_loss_before": before,
        "eval_loss_after": after,
        "train_loss": _over_steps(run, "loss") / len(run.training),
    }


def _speeds(run: Run) -> dict[str, float]:
    seconds = _over_steps(run, "step_seconds")
    return {
        "tokens_per_second": _over_steps(run, "tokens") / seconds,
        "trained_tokens_per_second": _over_steps(run, "trained_tokens") / seconds,
    }


def _over_steps(run: Run, key: str) -> Any:
    """The sum of one reading over all training steps."""
    return sum(entry[key] for entry in run.training)


def _peak_bytes(run: Run, meter: Meter) -> int:
    """The highest peak of any phase or step."""
    phases = [phase["allocated_bytes"] for phase in meter.phases.values()]
    return max(phases + _step_peaks(run))


def _step_peaks(run: Run) -> list[int]:
    """The peak bytes of the steps in which they were measured.

    They come from the history because a resumed run has all of it there, also what ran before the stop.
    """
    return [entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry]


def _data(plan: Plan, run: Run, train: TokenRows | Stream, held_out: TokenRows | Stream) -> dict[str, Any]:
    """Count rows and tokens of both parts."""
    return {
        "train_rows": train.count,
        "train_rows_packed_into": run.train_rows if plan.collator else None,
        "train_tokens": train.tokens,
        "train_trained_tokens": train.trained_tokens,
        "train_rows_cut": train.cut,
        "train_rows_dropped": train.dropped,
        "train_steps": train.tally.to_dict(),
        "train_kinds": dict(train.tally.kinds),
        "eval_rows": held_out.count,
        "eval_tokens": held_out.tokens,
        "eval_trained_tokens": held_out.trained_tokens,
        "eval_rows_cut": held_out.cut,
        "eval_rows_dropped": held_out.dropped,
        "eval_kinds": dict(held_out.tally.kinds),
        "tokens_seen": _over_steps(run, "tokens"),
        "trained_tokens_seen": _over_steps(run, "trained_tokens"),
    }


def compare(memory: Bill | None, run: Run) -> dict[str, Any]:
    """Compare the estimated peak of a training step with the measured one.

    Args:
        memory: the bill of the largest micro-batch; ``None`` for a kind of model that cannot be estimated.
        run: what happened.

    Returns:
        ``estimated_peak_bytes``: all that CUDA's allocator sees, with cuBLAS' workspaces and without CUDA's context.
        ``estimate``: its ``rows``, which sum to it; the steps' ``measured_bytes``; ``unexplained_bytes``, which is
        measured minus estimated; and ``ratio``, which is estimated to measured. Both keys are ``None`` without an
        estimate, and the last three values where no step was measured.
    """
    if memory is None:
        return {"estimated_peak_bytes": None, "estimate": None}
    rows = [asdict(row) for row in memory.rows]
    if memory.workspaces.bytes:
        rows.append(asdict(memory.workspaces))
    measured = unexplained = ratio = None
    peaks = _step_peaks(run)
    if peaks:
        measured = max(peaks)
        unexplained = measured - memory.allocated_bytes
        ratio = memory.allocated_bytes / measured
    return {
        "estimated_peak_bytes": memory.allocated_bytes,
        "estimate": {
            "rows": rows,
            "measured_bytes": measured,
            "unexplained_bytes": unexplained,
            "ratio": ratio,
        },
    }


def of_the_pipeline(plan: Plan, run: Run, model: Any) -> dict[str, Any]:
    """Say how a pipeline was cut, and lay its idle time beside that of equally long stages.

    Args:
        plan: what ran.
        run: what happened.
        model: that was trained.
    """
    # The first steps of a run that was resumed may have been another strategy's.
    idle = [entry["idle_share"] for entry in run.training if "idle_share" in entry]
    blocks = parts_of(plan.parallel, model)
    return {
        "data": plan.parallel["data"],
        "blocks": [[part.start, part.stop - 1] for part in blocks],
        "schedule": plan.parallel["schedule"],
        "idle_share": statistics.median(idle[2:] or idle or [0.0]),  # the first steps are watched, which takes its time
        "idle_share_of_equal_stages": bubble(len(blocks), plan.parallel["micro_batches"]),
    }


def data_warnings(rows: Mapping[str, TokenRows | Stream], recipe: Recipe, context: int = 0) -> list[str]:
    """Say how many rows were cut, dropped or beyond the model's context, and what the filters found."""
    said = tally.warnings(rows["train"].tally, recipe.data)
    longer = f"rows were longer than data.max_length={recipe.data.max_length} tokens and"
    for name, part in rows.items():
        total = part.count + part.dropped
        if part.cut:
            said.append(f"{part.cut} of {total} {name} {longer} lost their end")
        if part.dropped:
            said.append(f"{part.dropped} of {total} {name} {longer} were dropped")
    for name, part in rows.items():
        said += _beyond_context(name, part, recipe, context)
    return said


def _beyond_context(name: str, part: TokenRows | Stream, recipe: Recipe, context: int) -> list[str]:
    """Warn about rows that are longer than the model's context; how long a stream's rows are is not known yet."""
    if isinstance(part, Stream):
        return beyond_context(context, recipe.data.max_length)
    longer = sum(len(row["input_ids"]) > context for row in part.rows)
    if not context or not longer:
        return []
    return [
        f"{longer} of {part.count} {name} rows are longer than the model's context of {context} tokens "
        f"(max_position_embeddings in its config), the longest has {part.longest}, and a model does badly on positions "
        f"that it was not trained for; set data.max_length={context}, or take a model with a longer context"
    ]


def step_warnings(run: Run) -> list[str]:
    """Say how many steps updated nothing, and how many are still to do."""
    said = []
    if run.skipped_steps:
        said.append(
            f"the loss scaler skipped {run.skipped_steps} of {run.steps} steps, whose fp16 gradients overflowed"
        )
    if run.steps < run.planned_steps:
        said.append(f"train.time_budget ended the run after step {run.steps} of {run.planned_steps}; --resume goes on")
    return said


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinities by ``None``: JSON has none, and the gradient norm of a skipped step is one."""
    return {key: None if _is_infinite(value) else value for key, value in entry.items()}


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
