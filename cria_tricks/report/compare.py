"""Compare runs: what differs in their recipes, what they cost, how the loss went, and what ``cria eval`` found.

Everything comes from the folders as ``cria train`` and ``cria eval`` left them. A run need not have finished.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.fields import flat, repeated
from cria_tricks.common.units import duration, human
from cria_tricks.store.checkpoints import RUN

REPORT = "report.json"
EVALUATION = Path("eval") / "eval.json"
"""Where ``cria eval`` writes beside an adapter, seen from the run's folder."""
ABSENT = "not there"
"""The value of a recipe's field that the version of a run did not have."""
_LOSS = "{:.4f}".format
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("optimizer steps", str),
    "planned_steps": ("planned steps", str),
    "eval_loss_before": ("evaluation loss, first", _LOSS),
    "eval_loss_after": ("evaluation loss, last", _LOSS),
    "eval_loss_best": ("evaluation loss, best", _LOSS),
    "train_loss": ("training loss, mean over steps", _LOSS),
    "seconds": ("time, with loading", duration),
    "step_seconds.measured": ("seconds of a step", "{:.2f}".format),
    "tokens_per_second": ("tokens per second", "{:,.0f}".format),
    "estimated_peak_bytes": ("peak of a step, predicted", human),
    "estimate.measured_bytes": ("peak of a step, measured", human),
    "peak_bytes": ("peak of the whole run", human),
    "parameters.trainable": ("trainable parameters", "{:,.0f}".format),
    "device": ("device", str),
}
"""Where each figure stands in report.json, its name and its format. The best loss is of the report's history."""


@dataclass(frozen=True)
class RunFolder:
    """A run, as its folder describes it.

    Attributes:
        name: what tables call it.
        folder: its folder.
        recipe: the fields of its recipe, by dotted name.
        report: the content of ``report.json``; empty if the run did not finish.
        evaluation: the content of ``eval/eval.json``; empty if the adapter was not evaluated.
    """

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    report: Mapping[str, Any]
    evaluation: Mapping[str, Any]


def read_all(folders: Sequence[str | Path]) -> list[RunFolder]:
    """Read the folders of at least two runs.

    Raises:
        BadInput: if a folder is no run, is named twice, or a file in it is broken.
    """
    if len(folders) < 2:
        raise BadInput("name the folders of at least two runs, for instance runs/smoke runs/smoke-2")
    places = [usable_path("the run", folder) for folder in folders]
    twice = repeated([str(place.absolute()) for place in places])
    if twice:
        raise BadInput(f"{twice}: is named twice; name each run once")
    short = [place.absolute().name for place in places]
    runs = []
    for place, name in zip(places, short, strict=True):
        # Runs of the same name in different folders are told apart by their whole path.
        runs.append(_read(place, str(place) if short.count(name) > 1 else name))
    return runs


def _read(folder: Path, name: str) -> RunFolder:
    if not folder.is_dir():
        raise BadInput(f"{folder}: there is no such folder; name the folder of a run, for instance runs/smoke")
    if not (folder / RUN).is_file() and not (folder / REPORT).is_file():
        above = folder.parent
        hint = f"did you mean {above}?" if (above / RUN).is_file() else "name a folder that cria train wrote"
        raise BadInput(f"{folder}: holds neither {RUN} nor {REPORT}, so it is no run; {hint}")
    report = _json(folder / REPORT, ("history", "data"))
    evaluation = _json(folder / EVALUATION, ("data", "rows", "systems"))
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no TOML, or not UTF-8
        raise BadInput(f"{folder / 'recipe.toml'}: cannot be read as TOML: {error}") from None
    return RunFolder(name, folder, flat(recipe), report, evaluation)


def _json(file: Path, needed: Sequence[str]) -> dict[str, Any]:
    """Read a JSON object that has some keys; empty if the file is not there."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{file}: must hold a JSON object, not {type(found).__name__}")
    lacking = [key for key in needed if key not in found]
    if lacking:
        raise BadInput(f"{file}: lacks {', '.join(lacking)}, so another version or program wrote it; write it again")
    return found


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
        "figures": _columns([_figures(run.report) for run in runs]),
        "bill": _bill(runs),
        "scores": _columns([_scores(run.evaluation) for run in runs]),
        "same_eval_rows": len({_evaluated_rows(run.report) for run in runs if run.report}) <= 1,
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


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of one run; none if it did not finish."""
    if not report:
        return {}
    found = {}
    for place in FIGURES:
        group, _, key = place.rpartition(".")
        found[place] = (report.get(group) or {}).get(key) if group else report.get(key)
    losses = [entry["eval_loss"] for entry in report["history"] if entry.get("eval_loss") is not None]
    return found | {"eval_loss_best": min(losses, default=None)}


def _bill(runs: Sequence[RunFolder]) -> dict[str, list[int | None]]:
    """Return the bytes of each part of the predicted peak that is not the same in all runs with an estimate."""
    bills = []
    for run in runs:
        estimate = run.report.get("estimate") or {}
        bills.append({line["name"]: line["bytes"] for line in estimate.get("lines", ())})
    found = {}
    for part, sizes in _columns(bills, 0).items():  # a part that a bill does not have takes no bytes
        if _differ([size for size, bill in zip(sizes, bills, strict=True) if bill]):
            found[part] = [size if bill else None for size, bill in zip(sizes, bills, strict=True)]
    return found


def _scores(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the adapter with their intervals; empty for a run that was not evaluated."""
    adapter = evaluation.get("systems", {}).get("adapter", {})
    return {name: found for name, found in adapter.items() if isinstance(found, dict) and "low" in found}


def _evaluated_rows(report: Mapping[str, Any]) -> str:
    """Return what tells evaluation rows apart: the source, its counts, and the tokenizer that cut them into tokens."""
    data = report["data"]
    rows = [data["eval"], data["eval_rows"], data["eval_tokens"], data["eval_trained_tokens"]]
    return json.dumps([rows, (report.get("base") or {}).get("tokenizer")], sort_keys=True)


def _verdict(found: Mapping[str, Any]) -> str:
    """Say in one sentence which run has the lowest evaluation loss, or why that cannot be said."""
    names = [run["name"] for run in found["runs"]]
    last = found["figures"].get("eval_loss_after", [None] * len(names))
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
    for place, values in found["figures"].items():
        name, shown = FIGURES[place]
        lines.append((name, *_cells(values, shown)))
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
