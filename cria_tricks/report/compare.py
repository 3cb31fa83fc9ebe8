"""Compare runs: what differs in their recipes, what they cost, how the loss went, and what ``cria eval`` found."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cria_tricks.common.units import duration, human
from cria_tricks.report.runs import RunFolder

ABSENT = "not there"
"""The value of a recipe's field that the version of a run did not have."""
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("optimizer steps", str),
    "eval_loss_first": ("evaluation loss, first", "{:.4f}".format),
    "eval_loss_last": ("evaluation loss, last", "{:.4f}".format),
    "eval_loss_best": ("evaluation loss, best", "{:.4f}".format),
    "train_loss_first": ("training loss, first step", "{:.4f}".format),
    "train_loss_last": ("training loss, last step", "{:.4f}".format),
    "seconds": ("time, with loading", duration),
    "step_seconds": ("seconds of a step", "{:.2f}".format),
    "tokens_per_second": ("tokens per second", "{:,.0f}".format),
    "predicted_peak_bytes": ("peak of a step, predicted", human),
    "measured_peak_bytes": ("peak of a step, measured", human),
    "run_peak_bytes": ("peak of the whole run", human),
    "trainable_parameters": ("trainable parameters", "{:,.0f}".format),
    "device": ("device", str),
}
"""The figures in their order, with the name and the format of each."""


def compare(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Compare runs; each list of the result has an entry for each run, in their order.

    Returns:
        ``verdict``, ``runs`` (name and folder), ``recipe`` (only the fields that differ), ``figures`` (losses, times
        and peaks; ``None`` where a run did not finish), ``bill`` (bytes of the parts of the predicted peak that
        differ), ``scores`` (those of the adapter with their intervals; ``None`` where a run was not evaluated), and
        ``same_eval_rows`` and ``same_scored_rows``, whether the losses and the scores are over the same rows.
    """
    evaluated = {(run.evaluation["data"], run.evaluation["rows"]) for run in runs if run.evaluation}
    recipe = _columns([run.recipe for run in runs], ABSENT)
    recipe.pop("name", None)
    found: dict[str, Any] = {
        "runs": [{"name": run.name, "folder": str(run.folder)} for run in runs],
        "recipe": {name: values for name, values in recipe.items() if _differ(values)},
        "figures": _columns([_figures(run) for run in runs]),
        "bill": _bill(runs),
        "scores": _columns([_scores(run) for run in runs]),
        "same_eval_rows": _same_eval_rows(runs),
        "same_scored_rows": len(evaluated) <= 1,
    }
    return {"verdict": _verdict(found), **found}


def _columns(each: Sequence[Mapping[str, Any]], absent: Any = None) -> dict[str, list[Any]]:
    """Return the values of all runs by name."""
    names: dict[str, None] = {}  # an ordered set
    for values in each:
        names |= dict.fromkeys(values)
    return {name: [values.get(name, absent) for values in each] for name in names}


def _differ(values: Sequence[Any]) -> bool:
    # 1 == True in Python, but gradient_checkpointing=1 is one block and true is all blocks.
    return len({(type(value).__name__, str(value)) for value in values}) > 1


def _figures(run: RunFolder) -> dict[str, Any]:
    """Return the figures of one run; none if it did not finish."""
    if run.report is None:
        return {}
    report = run.report
    losses = [entry["loss"] for entry in run.history if entry.get("loss") is not None]
    evaluations = [entry["eval_loss"] for entry in run.history if entry.get("eval_loss") is not None]
    return {
        "steps": f"{report.get('steps')} of {report.get('planned_steps')}",
        "eval_loss_first": report.get("eval_loss_before"),
        "eval_loss_last": report.get("eval_loss_after"),
        "eval_loss_best": min(evaluations, default=None),
        "train_loss_first": losses[0] if losses else None,
        "train_loss_last": losses[-1] if losses else None,
        "seconds": report.get("seconds"),
        "step_seconds": (report.get("step_seconds") or {}).get("measured"),
        "tokens_per_second": report.get("tokens_per_second"),
        "predicted_peak_bytes": report.get("estimated_peak_bytes"),
        "measured_peak_bytes": (report.get("estimate") or {}).get("measured_bytes"),
        "run_peak_bytes": report.get("peak_bytes"),
        "trainable_parameters": (report.get("parameters") or {}).get("trainable"),
        "device": report.get("device"),
    }


def _bill(runs: Sequence[RunFolder]) -> dict[str, list[int | None]]:
    """Return the bytes of each part of the predicted peak that is not the same in all runs with an estimate."""
    bills = []
    for run in runs:
        estimate = (run.report or {}).get("estimate") or {}
        bills.append({line["name"]: line["bytes"] for line in estimate.get("lines", ())})
    found = {}
    for part, sizes in _columns(bills, 0).items():  # a part that a bill does not have takes no bytes
        if _differ([size for size, bill in zip(sizes, bills, strict=True) if bill]):
            found[part] = [size if bill else None for size, bill in zip(sizes, bills, strict=True)]
    return found


def _scores(run: RunFolder) -> dict[str, Any]:
    """Return the scores of the adapter with their intervals; empty for a run that was not evaluated."""
    adapter = (run.evaluation or {}).get("systems", {}).get("adapter", {})
    return {name: found for name, found in adapter.items() if isinstance(found, dict) and "low" in found}


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


def _verdict(found: Mapping[str, Any]) -> str:
    """Say in one sentence which run has the lowest evaluation loss, or why that cannot be said."""
    names = [run["name"] for run in found["runs"]]
    last = found["figures"].get("eval_loss_last", [None] * len(names))
    losses = [(loss, name) for loss, name in zip(last, names, strict=True) if loss is not None]
    if len(losses) < 2:
        return f"{len(names)} runs; fewer than two of them finished with an evaluation loss"
    if not found["same_eval_rows"]:
        return f"{len(names)} runs; their evaluation losses are over different rows or tokens, so they do not compare"
    (loss, name), (next_loss, other), *_ = sorted(losses)
    if loss == next_loss:
        return f"{len(names)} runs; the lowest evaluation loss is {loss:.4f}, of {name} and {other} alike"
    return f"{len(names)} runs; {name} has the lowest evaluation loss at the end: {loss:.4f} ({other}: {next_loss:.4f})"


def table_lines(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Lay a comparison out as the lines of one table: a name, and a cell for each run (``-`` for a missing value)."""
    lines = [(field, *map(_setting, values)) for field, values in found["recipe"].items()]
    for key, (name, shown) in FIGURES.items():
        if key in found["figures"]:
            lines.append((name, *_cells(found["figures"][key], shown)))
    for part, sizes in found["bill"].items():
        lines.append((f"memory: {part}", *_cells(sizes, human)))
    for name, values in found["scores"].items():
        lines.append((f"cria eval: {name}", *_cells(values, _interval)))
    return lines


def _cells(values: Sequence[Any], shown: Callable[[Any], str]) -> list[str]:
    return ["-" if value is None else shown(value) for value in values]


def _setting(value: Any) -> str:
    """Write a recipe's value as a TOML file does, but a text without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "empty"


def _interval(score: Mapping[str, float]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
