"""Summarise a run as plain data: what was asked, what ran, what it cost."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step_time import ends
from cria_tricks.common.version import versions
from cria_tricks.data import counts as tally
from cria_tricks.data.stream import Stream
from cria_tricks.data.tokens import TokenRows
from cria_tricks.load.stages import parts_of
from cria_tricks.measure.memory import Meter
from cria_tricks.measure.utilisation import Utilisation
from cria_tricks.models.configs import beyond_context
from cria_tricks.parallel.pipeline import bubble
from cria_tricks.predict.toggles import Setting
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
    """Summarise a run as plain data that can be written as JSON.

    Args:
        recipe: what the user asked for.
        plan: what ran.
        run: what happened.
        meter: the seconds, and the peak bytes by phase.
        rows: the token rows of ``train`` and ``eval``. Of a stream, only the rows that were read are counted.
        descriptions: the sources of these two, in words.
        parameters: the number of ``trainable`` and ``total`` parameters.
        context: the length of the model's context [tokens]; 0 if it is not known.

    Returns:
        The data. ``cria train --json`` and ``report.json`` show its keys to users, so do not rename them.
    """
    seconds = _over_steps(run, "step_seconds")
    losses = [entry["eval_loss"] for entry in run.evaluations] or [None]
    phases = [phase["allocated_bytes"] for phase in meter.phases.values()]
    return {
        "eval_loss_before": losses[0],
        "eval_loss_after": losses[-1],
        "train_loss": _over_steps(run, "loss") / len(run.training),
        "tokens_per_second": _over_steps(run, "tokens") / seconds,
        "trained_tokens_per_second": _over_steps(run, "trained_tokens") / seconds,
        "peak_bytes": max(phases + _step_peaks(run)),
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
        "stopped_early": dict(run.stopped_early) or None,
        "memory": meter.phases,
        "parameters": dict(parameters),
        "data": {**descriptions, **_data(plan, run, rows)},
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "plan": plan.to_dict(),
        "history": [_finite(entry) for entry in run.history],
    }


def _over_steps(run: Run, key: str) -> Any:
    """Return the sum of one measured value over all training steps."""
    return sum(entry[key] for entry in run.training)


def _step_peaks(run: Run) -> list[int]:
    """Return the peak bytes of those steps in which they were measured.

    They come from the history, because a resumed run has the steps before its interruption there, too.
    """
    return [entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry]


def _data(plan: Plan, run: Run, rows: Mapping[str, TokenRows | Stream]) -> dict[str, Any]:
    """Return the counts of rows and tokens of both parts: as read and prepared, and as seen in training."""
    found: dict[str, Any] = {}
    for name, part in rows.items():
        found |= {
            f"{name}_rows": part.count,
            f"{name}_tokens": part.tokens,
            f"{name}_trained_tokens": part.trained_tokens,
            f"{name}_rows_cut": part.cut,
            f"{name}_rows_dropped": part.dropped,
            f"{name}_kinds": dict(part.tally.kinds),
        }
    return found | {
        "train_rows_packed_into": run.train_rows if plan.collator else None,
        "train_steps": rows["train"].tally.to_dict(),
        "tokens_seen": _over_steps(run, "tokens"),
        "trained_tokens_seen": _over_steps(run, "trained_tokens"),
    }


def compare(memory: Bill | None, run: Run, meter: Meter) -> dict[str, Any]:
    """Compare the estimated peak of a training step with the measured one.

    Args:
        memory: the bill of the largest micro-batch; ``None`` for a kind of model that cannot be estimated.
        run: what happened in the steps.
        meter: what was reserved, by phase.

    Returns:
        Two keys; both are ``None`` without an estimate. ``estimated_peak_bytes``: all that CUDA's allocator sees, so
        with cuBLAS' workspaces and without CUDA's context. ``estimate``: the ``lines`` of the bill, which sum to the
        estimated peak; ``measured_bytes``, the highest peak of a step; ``unexplained_bytes``, which is measured minus
        estimated; and ``ratio``, which is estimated divided by measured. The last three are ``None`` if no step was
        measured. ``reserved`` is ``None`` on a CPU; else it has ``estimated_bytes``, what torch's allocator
        may reserve, ``measured_bytes``, and ``expandable_segments``.
    """
    if memory is None:
        return {"estimated_peak_bytes": None, "estimate": None}
    lines = [asdict(line) for line in memory.lines]
    if memory.workspaces.bytes:
        lines.append(asdict(memory.workspaces))
    estimate: dict[str, Any] = {"lines": lines}
    estimate |= dict.fromkeys(("measured_bytes", "unexplained_bytes", "ratio", "reserved"))
    peaks = _step_peaks(run)
    if peaks:
        measured = max(peaks)
        estimate |= {
            "measured_bytes": measured,
            "unexplained_bytes": measured - memory.allocated_bytes,
            "ratio": memory.allocated_bytes / measured,
        }
    reserved = [phase["reserved_bytes"] for phase in meter.phases.values() if "reserved_bytes" in phase]
    if reserved:
        estimate["reserved"] = {
            "estimated_bytes": memory.reserved_bytes,
            "measured_bytes": max(reserved),
            "expandable_segments": memory.step.expandable_segments,
        }
    return {"estimated_peak_bytes": memory.allocated_bytes, "estimate": estimate}


def compare_seconds(predicted: Setting | None, run: Run) -> dict[str, Any]:
    """Compare the predicted time of an optimizer step with the measured one.

    The first steps are left out where there are more than four, because counting their bytes makes them slower.

    Returns:
        One key, ``step_seconds``: ``measured``, the mean over the steps [s]; ``predicted``, for as many tokens as these
        steps had, with the ``low`` and the ``high`` end of its range [s]; ``ratio``, predicted divided by measured; and
        ``by``, what backs the range. All but ``measured`` are ``None`` without an estimate, or without rates of this
        device.
    """
    steps = _timed(run)
    measured = sum(entry["step_seconds"] for entry in steps) / len(steps)
    found: dict[str, Any] = {"measured": measured, **dict.fromkeys(("predicted", "low", "high", "ratio", "by"))}
    if predicted and predicted.seconds is not None:
        seconds = predicted.seconds * sum(entry["tokens"] for entry in steps) / len(steps)
        low, high = ends(seconds, predicted.spread)
        found |= {"predicted": seconds, "low": low, "high": high, "ratio": seconds / measured, "by": predicted.by}
    return {"step_seconds": found}


def _timed(run: Run) -> list[Any]:
    """Return the steps whose time counts: none that was skipped, and not the first two where others follow."""
    steps = [entry for entry in run.training if not entry.get("skipped")] or run.training
    return steps[2:] if len(steps) > 4 else steps


def utilisation(counted: Utilisation | None, run: Run) -> dict[str, Any]:
    """Return which share of the peak rate of its cards the run reached.

    Returns:
        One key, ``utilisation``; ``None`` without a count. Else it has ``model_flops_per_token`` and
        ``hardware_flops_per_token``, ``peak_flops`` [operations/s], and ``mfu`` and ``hfu``, from 0 to 1. The last
        three are ``None`` where no datasheet has a rate for the device.
    """
    if counted is None:
        return {"utilisation": None}
    steps = _timed(run)
    speed = sum(entry["tokens"] for entry in steps) / sum(entry["step_seconds"] for entry in steps)
    return {
        "utilisation": {
            "model_flops_per_token": counted.model_flops,
            "hardware_flops_per_token": counted.hardware_flops,
            "peak_flops": counted.peak,
            "mfu": counted.mfu(speed),
            "hfu": counted.hfu(speed),
        }
    }


def of_the_pipeline(plan: Plan, run: Run, model: Any) -> dict[str, Any]:
    """Say how the model was cut into stages, and compare the idle time with that of equally slow stages.

    Returns:
        ``data`` (the number of pipelines), ``blocks`` (the first and the last block of each stage), ``schedule``,
        ``idle_share`` (the median over the steps, measured) and ``idle_share_of_equal_stages`` (computed).
    """
    # A resumed run may have made its first steps with another strategy, without an idle share.
    idle = [entry["idle_share"] for entry in run.training if "idle_share" in entry]
    blocks = parts_of(plan.parallel, model)
    return {
        "data": plan.parallel["data"],
        "blocks": [[part.start, part.stop - 1] for part in blocks],
        "schedule": plan.parallel["schedule"],
        # Without the first two steps: counting their bytes makes them slower.
        "idle_share": statistics.median(idle[2:] or idle or [0.0]),
        "idle_share_of_equal_stages": bubble(len(blocks), plan.parallel["micro_batches"]),
    }


def data_warnings(rows: Mapping[str, TokenRows | Stream], recipe: Recipe, context: int = 0) -> list[str]:
    """Warn of rows that were cut, dropped or longer than the model's context, and of what data preparation found."""
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
    """Warn of rows that are longer than the model's context.

    The rows of a stream are not known yet, so for them ``data.max_length`` is compared instead.
    """
    if isinstance(part, Stream):
        return beyond_context(context, recipe.data.max_length)
    if not context or part.longest <= context:
        return []
    longer = int((part.lengths > context).sum())
    return [
        f"{longer} of {part.count} {name} rows are longer than the model's context of {context} tokens "
        f"(max_position_embeddings in its config), the longest has {part.longest}, and a model does badly on positions "
        f"that it was not trained for; set data.max_length={context}, or take a model with a longer context"
    ]


def step_warnings(run: Run) -> list[str]:
    """Warn of steps that the loss scaler skipped, and of planned steps that an early end left out."""
    said = []
    if run.skipped_steps:
        said.append(
            f"the loss scaler skipped {run.skipped_steps} of {run.steps} steps, whose fp16 gradients overflowed"
        )
    if run.stopped_early:
        said.append(what_ran.stopped_early(run.stopped_early, run.planned_steps))
    elif run.steps < run.planned_steps and not run.goes_on:
        said.append(f"train.time_budget ended the run after step {run.steps} of {run.planned_steps}; --resume goes on")
    return said


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinite and NaN values, such as the gradient norm of a skipped step, by ``None``: JSON has neither."""
    return {key: None if _is_infinite(value) else value for key, value in entry.items()}


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
