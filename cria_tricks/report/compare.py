"""Compare runs as plain data: what differs in their recipes, what they cost, and how the loss went."""

from collections.abc import Sequence
from typing import Any

from cria_tricks.report.runs import RunFolder

ABSENT = "not there"
"""The value of a recipe's field that the version of a run did not have."""


def compare(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Compare runs; each list of the result has an entry for each run, in their order.

    Returns:
        ``runs`` (name and folder), ``recipe`` (only the fields that differ), ``figures`` (losses, times and peaks;
        ``None`` where a run did not finish), ``bill`` (bytes of the parts of the predicted peak that differ) and
        ``same_eval_rows``, whether the evaluation losses are over the same rows and of the same tokenizer.
    """
    return {
        "runs": [{"name": run.name, "folder": str(run.folder)} for run in runs],
        "recipe": _recipe(runs),
        "figures": _figures(runs),
        "bill": _bill(runs),
        "same_eval_rows": _same_eval_rows(runs),
    }


def _recipe(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    fields: dict[str, None] = {}  # an ordered set
    for run in runs:
        fields |= dict.fromkeys(run.recipe)
    found = {}
    for field in fields:
        values = [run.recipe.get(field, ABSENT) for run in runs]
        # 1 == True in Python, but gradient_checkpointing=1 is one block and true is all blocks.
        different = {(type(value).__name__, str(value)) for value in values}
        if field != "name" and len(different) > 1:
            found[field] = values
    return found


def _figures(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    each = [_of_one(run) for run in runs]
    return {name: [figures[name] for figures in each] for name in each[0]}


def _of_one(run: RunFolder) -> dict[str, Any]:
    """Return the figures of one run; each is ``None`` if the run did not finish, or did not measure it."""
    report = run.report or {}
    losses = [entry["loss"] for entry in run.history if entry.get("loss") is not None]
    evaluations = [entry for entry in run.history if entry.get("eval_loss") is not None]
    best = min(evaluations, key=lambda entry: entry["eval_loss"], default={})
    estimate = report.get("estimate") or {}
    return {
        "finished": run.report is not None,
        "steps": report.get("steps"),
        "planned_steps": report.get("planned_steps"),
        "eval_loss_first": report.get("eval_loss_before"),
        "eval_loss_last": report.get("eval_loss_after"),
        "eval_loss_best": best.get("eval_loss"),
        "eval_loss_best_step": best.get("step"),
        "train_loss_first": next(iter(losses), None),
        "train_loss_last": next(reversed(losses), None),
        "seconds": report.get("seconds"),
        "step_seconds": (report.get("step_seconds") or {}).get("measured"),
        "tokens_per_second": report.get("tokens_per_second"),
        "predicted_peak_bytes": report.get("estimated_peak_bytes"),
        "measured_peak_bytes": estimate.get("measured_bytes"),
        "run_peak_bytes": report.get("peak_bytes"),
        "trainable_parameters": (report.get("parameters") or {}).get("trainable"),
        "device": report.get("device"),
        "warnings": len(report.get("warnings") or ()) if report else None,
    }


def _bill(runs: Sequence[RunFolder]) -> dict[str, list[int | None]]:
    """Return the bytes of each part of the predicted peak that is not the same in all runs with an estimate."""
    bills: list[dict[str, int] | None] = []
    for run in runs:
        estimate = (run.report or {}).get("estimate")
        if not estimate:
            bills.append(None)
            continue
        bills.append({line["name"]: line["bytes"] for line in estimate["lines"]})
    parts: dict[str, None] = {}  # an ordered set
    for bill in bills:
        parts |= dict.fromkeys(bill or ())
    found = {}
    for part in parts:
        # A part that a bill does not have takes no bytes; a run without a bill has no number at all.
        each = [None if bill is None else bill.get(part, 0) for bill in bills]
        if len({number for number in each if number is not None}) > 1:
            found[part] = each
    return found


def _same_eval_rows(runs: Sequence[RunFolder]) -> bool:
    """Tell whether all finished runs evaluated the same rows, cut into the same tokens."""
    about = set()
    for run in runs:
        if run.report:
            data = run.report["data"]
            tokenizer = (run.report.get("base") or {}).get("tokenizer") or {}
            rows = (data["eval"], data["eval_rows"], data["eval_tokens"], data["eval_trained_tokens"])
            about.add((*rows, *sorted(tokenizer.items())))
    return len(about) <= 1
