"""Run -> report.json, report.md and a figure: what was asked, what ran, what it cost."""

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
    """Put a run's numbers together.

    Args:
        recipe: what was asked.
        plan: what it was resolved to.
        run: what happened.
        meter: seconds, and peak bytes by phase.
        rows: the ``train`` and ``eval`` token rows; of a stream those count that were given.
        descriptions: where the two came from.
        parameters: ``trainable`` and ``total``.
        context: of the model, in tokens; 0 where it is not known.

    Returns:
        Plain JSON data; its keys are the command line's contract.
    """
    steps, evaluations = run.training, run.evaluations
    in_steps = sum(entry["step_seconds"] for entry in steps)
    tokens, trained = (sum(entry[key] for entry in steps) for key in ("tokens", "trained_tokens"))
    return {
        "eval_loss_before": evaluations[0]["eval_loss"] if evaluations else None,
        "eval_loss_after": evaluations[-1]["eval_loss"] if evaluations else None,
        "train_loss": sum(entry["loss"] for entry in steps) / len(steps),
        "tokens_per_second": tokens / in_steps,
        "trained_tokens_per_second": trained / in_steps,
        # The steps' own peaks are in the history, which a resumed run has from its first step on.
        "peak_bytes": max(
            *(phase["allocated_bytes"] for phase in meter.phases.values()),
            *(entry["peak_bytes"] for entry in steps if "peak_bytes" in entry),
        ),
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
        "data": {
            **descriptions,
            "train_rows": rows["train"].count,
            "train_rows_packed_into": run.train_rows if plan.collator else None,
            "train_tokens": rows["train"].tokens,
            "train_trained_tokens": rows["train"].trained_tokens,
            "train_rows_cut": rows["train"].cut,
            "train_rows_dropped": rows["train"].dropped,
            "train_steps": rows["train"].tally.to_dict(),
            "train_kinds": dict(rows["train"].tally.kinds),
            "eval_rows": rows["eval"].count,
            "eval_tokens": rows["eval"].tokens,
            "eval_trained_tokens": rows["eval"].trained_tokens,
            "eval_rows_cut": rows["eval"].cut,
            "eval_rows_dropped": rows["eval"].dropped,
            "eval_kinds": dict(rows["eval"].tally.kinds),
            "tokens_seen": tokens,
            "trained_tokens_seen": trained,
        },
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "plan": plan.to_dict(),
        "history": [{key: _finite(value) for key, value in entry.items()} for entry in run.history],
    }


def compare(memory: Bill | None, run: Run) -> dict[str, Any]:
    """Lay the estimate beside what the training steps were measured to take.

    Args:
        memory: the bill of the largest micro-batch; none for a model of a kind that cannot be estimated.
        run: what happened.

    Returns:
        ``estimated_peak_bytes``, of all that CUDA's allocator sees (cuBLAS' workspaces are among it, the context is
        not), and ``estimate``: its ``rows``, which sum to it, the steps' ``measured_bytes``, what no row explains
        (``unexplained_bytes``, below zero where less came than was estimated) and ``ratio``, estimated to measured.
        Both are ``None`` without an estimate; what is measured is, where nobody could watch.
    """
    if memory is None:
        return {"estimated_peak_bytes": None, "estimate": None}
    measured = max((entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry), default=None)
    rows = (*memory.rows, memory.workspaces) if memory.workspaces.bytes else memory.rows
    return {
        "estimated_peak_bytes": memory.allocated_bytes,
        "estimate": {
            "rows": [asdict(row) for row in rows],
            "measured_bytes": measured,
            "unexplained_bytes": None if measured is None else measured - memory.allocated_bytes,
            "ratio": None if measured is None else memory.allocated_bytes / measured,
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
    longer = f"rows were longer than data.max_length={recipe.data.max_length} tokens and"
    said = tally.warnings(rows["train"].tally, recipe.data)
    return (
        said
        + [
            f"{number} of {part.count + part.dropped} {name} {longer} {fate}"
            for name, part in rows.items()
            for number, fate in ((part.cut, "lost their end"), (part.dropped, "were dropped"))
            if number
        ]
        + [sentence for name, part in rows.items() for sentence in _beyond_context(name, part, recipe, context)]
    )


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


def _finite(value: Any) -> Any:
    """JSON has no infinity; the gradient norm of a step that the loss scaler skipped is one."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
