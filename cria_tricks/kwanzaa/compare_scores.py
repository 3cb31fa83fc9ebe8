"""Compare the evaluations of several runs: scores with intervals, paired differences, and answers side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cria_tricks.kwanzaa.bootstrap import mean, ratio
from cria_tricks.kwanzaa.page import NAMES
from cria_tricks.kwanzaa.scores import SCORERS
from cria_tricks.kwanzaa.summary import difference

Evaluation = Mapping[str, Any]
"""The content of an ``eval.json``."""


def compare(evaluations: Sequence[Evaluation | None], folders: Sequence[Path]) -> dict[str, Any]:
    """Compare the answers of the runs' adapters.

    Args:
        evaluations: the evaluation of each run; ``None`` for a run that was not evaluated.
        folders: the folders of the evaluations, in the same order.

    Returns:
        ``rows``, ``data`` and ``scores`` with an entry for each run; ``kinds``, the same by kind of row; ``same_rows``,
        whether all evaluated runs answered the same rows; ``differences``, each run minus the first evaluated one, over
        the same rows, with a paired interval (``None`` where they do not compare); and ``answers``, the rows that all
        evaluations show.
    """
    adapters = [_adapter(evaluation) for evaluation in evaluations]
    evaluated = [number for number, adapter in enumerate(adapters) if adapter]
    same = len({_rows(evaluations[number]) for number in evaluated}) <= 1
    answers: list[dict[str, Any]] = []
    if same and len(evaluated) > 1:
        answers = _answers(evaluations, evaluated)
    return {
        "evaluated": [bool(adapter) for adapter in adapters],
        "data": [(evaluation or {}).get("data") for evaluation in evaluations],
        "rows": [(evaluation or {}).get("rows") for evaluation in evaluations],
        "same_rows": same,
        "scores": {name: [(adapter or {}).get(name) for adapter in adapters] for name in NAMES},
        "kinds": _kinds(evaluations),
        "differences": _differences(evaluations, folders, evaluated, same),
        "answers": answers,
    }


def _adapter(evaluation: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the adapter's part of an evaluation, of a kind of row or of an example; ``None`` if there is none."""
    return (evaluation or {}).get("systems", {}).get("adapter")


def _rows(evaluation: Evaluation | None) -> tuple[Any, ...]:
    """Return what names the rows of an evaluation: the data's description, which has a hash or a version, and n."""
    assert evaluation
    return (evaluation["data"], evaluation["rows"])


def _kinds(evaluations: Sequence[Evaluation | None]) -> dict[str, Any]:
    """Return for each kind of row its number and its scores in each run."""
    kinds: dict[str, None] = {}  # an ordered set
    for evaluation in evaluations:
        kinds |= dict.fromkeys((evaluation or {}).get("kinds") or ())
    found = {}
    for kind in kinds:
        each = [((evaluation or {}).get("kinds") or {}).get(kind) for evaluation in evaluations]
        adapters = [_adapter(entry) for entry in each]
        found[kind] = {
            "rows": [(entry or {}).get("rows") for entry in each],
            "scores": {name: [(adapter or {}).get(name) for adapter in adapters] for name in SCORERS},
        }
    return found


def _differences(
    evaluations: Sequence[Evaluation | None], folders: Sequence[Path], evaluated: Sequence[int], same: bool
) -> dict[str, list[dict[str, float] | None]]:
    """Return for each score the difference of each run from the first evaluated one; empty if no two compare."""
    if len(evaluated) < 2 or not same:
        return {}
    first = _columns(evaluations[evaluated[0]], folders[evaluated[0]])
    found: dict[str, list[dict[str, float] | None]] = {}
    for number, evaluation in enumerate(evaluations):
        columns = _columns(evaluation, folders[number]) if number in evaluated[1:] else {}
        for name, mine in first.items():
            theirs = columns.get(name)
            apart = None
            if theirs and _comparable(name, theirs, mine):
                statistic = ratio if name == "loss" else mean
                apart = difference((statistic, theirs), (statistic, mine))
            found.setdefault(name, []).append(apart)
    return {name: each for name, each in found.items() if any(each)}


def _comparable(name: str, one: list[list[float]], other: list[list[float]]) -> bool:
    """Tell whether two columns have the same rows; a loss per token also needs the same tokens in each row."""
    if len(one[0]) != len(other[0]):
        return False
    return name != "loss" or one[1] == other[1]


def _columns(evaluation: Evaluation | None, folder: Path) -> dict[str, list[list[float]]]:
    """Return the numbers of each row: of each score one column, of the loss its sum and the trained tokens."""
    assert evaluation
    rows = evaluation["answers"].get("adapter", [])
    found = {name: [[row[name]["value"] for row in rows]] for name in SCORERS if all(name in row for row in rows)}
    losses = _losses(folder / "answers-adapter.jsonl", len(rows))
    if losses:
        found["loss"] = losses
    return found


def _losses(file: Path, rows: int) -> list[list[float]]:
    """Read the loss and the trained tokens of each row from the saved answers; empty if they cannot be read."""
    try:
        _, *lines = file.read_text(encoding="utf-8").strip().split("\n")
        saved = {entry["row"]: entry for entry in map(json.loads, lines)}
        return [[float(saved[row][key]) for row in range(rows)] for key in ("loss", "trained")]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the file is for going on after a stop; the evaluation itself is whole without it


def _answers(evaluations: Sequence[Evaluation | None], evaluated: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows that the evaluations show as examples, with the answer of each run."""
    found = []
    examples = [(evaluation or {}).get("examples", []) for evaluation in evaluations]
    # Evaluations of the same rows pick the same examples.
    for place, example in enumerate(examples[evaluated[0]]):
        answers: list[Mapping[str, Any] | None] = []
        for each in examples:
            shown_there = each[place : place + 1]  # empty if that run was not evaluated
            answers += [_adapter(entry) for entry in shown_there] or [None]
        shown = {name: example[name] for name in ("row", "query", "documents", "reference")}
        found.append({**shown, "answers": answers})
    return found
