"""Lay a comparison of runs out as tables of text, for the terminal and for the page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cria_tricks.common.units import duration, human

UNFINISHED = "not finished"
UNEVALUATED = "not evaluated"
NONE = "not measured"


@dataclass(frozen=True)
class ComparedTable:
    """One table of the comparison.

    Attributes:
        title: its heading.
        head: the names of the columns: what, and the runs.
        lines: the cells of each line.
        note: a sentence below the table; often empty.
    """

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    note: str = ""


def verdict(found: Mapping[str, Any]) -> str:
    """Say in one sentence which run has the lowest evaluation loss, or why that cannot be said."""
    names = _names(found)
    last = found["figures"]["eval_loss_last"]
    losses = [(loss, name) for loss, name in zip(last, names, strict=True) if loss is not None]
    if len(losses) < 2:
        return f"{len(names)} runs; fewer than two of them finished with an evaluation loss"
    if not found["same_eval_rows"]:
        return f"{len(names)} runs; their evaluation losses are over different rows or tokens, so they do not compare"
    (loss, name), (next_loss, other), *_ = sorted(losses)
    if loss == next_loss:
        return f"{len(names)} runs; the lowest evaluation loss is {loss:.4f}, of {name} and {other} alike"
    return f"{len(names)} runs; {name} has the lowest evaluation loss at the end: {loss:.4f} ({other}: {next_loss:.4f})"


def tables(found: Mapping[str, Any], scores_names: Mapping[str, str]) -> list[ComparedTable]:
    """Return all tables; those with nothing to say are left out.

    Args:
        found: the comparison, with the scores under ``evaluation``.
        scores_names: the scores and losses in their order: the key, and its name in a table.
    """
    made = [_recipe(found), _figures(found), _bill(found), *_evaluation(found, scores_names)]
    return [table for table in made if table.lines]


def _names(found: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(run["name"] for run in found["runs"])


def _recipe(found: Mapping[str, Any]) -> ComparedTable:
    lines = [(field, *map(_value, values)) for field, values in found["recipe"].items()]
    if not lines:
        lines = [("no field", *("the same" for _ in found["runs"]))]
    return ComparedTable("What differs in the recipes", ("field", *_names(found)), tuple(lines))


def _value(value: Any) -> str:
    """Write a recipe's value as a TOML file does, but a text without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "empty"


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "eval_loss_first": ("evaluation loss, first", _loss),
    "eval_loss_last": ("evaluation loss, last", _loss),
    "eval_loss_best": ("evaluation loss, best", _loss),
    "eval_loss_best_step": ("best at step", _count),
    "train_loss_first": ("training loss, first step", _loss),
    "train_loss_last": ("training loss, last step", _loss),
    "seconds": ("time, with loading", duration),
    "step_seconds": ("seconds of a step", lambda value: f"{value:.2f}"),
    "tokens_per_second": ("tokens per second", _count),
    "predicted_peak_bytes": ("peak of a step, predicted", human),
    "measured_peak_bytes": ("peak of a step, measured", human),
    "run_peak_bytes": ("peak of the whole run", human),
    "trainable_parameters": ("trainable parameters", _count),
    "device": ("device", str),
    "warnings": ("warnings in the report", _count),
}
"""The figures in their order, with the name and the format of each."""


def _figures(found: Mapping[str, Any]) -> ComparedTable:
    figures = found["figures"]
    steps = []
    for finished, done, planned in zip(figures["finished"], figures["steps"], figures["planned_steps"], strict=True):
        steps.append(f"{done} of {planned}" if finished else UNFINISHED)
    lines = [("optimizer steps", *steps)]
    for key, (name, shown) in FIGURES.items():
        lines.append((name, *_cells(figures[key], shown, figures["finished"], NONE, UNFINISHED)))
    note = "Losses are per trained token, in nats."
    if not found["same_eval_rows"]:
        note += " The evaluation losses are over different rows or tokens, so they do not compare."
    return ComparedTable("What came of it", ("what", *_names(found)), tuple(lines), note)


def _cells(
    values: Sequence[Any], shown: Callable[[Any], str], there: Sequence[bool], none: str, missing: str
) -> Iterator[str]:
    """Write one line of values; a run that has none is there, and says ``none``, or it is not, and says ``missing``."""
    for is_there, value in zip(there, values, strict=True):
        if value is not None:
            yield shown(value)
        else:
            yield none if is_there else missing


def _bill(found: Mapping[str, Any]) -> ComparedTable:
    lines = []
    for part, each in found["bill"].items():
        cells = [("no bill" if number is None else human(number)) for number in each]
        lines.append((part, *cells))
    note = "Only the parts of the predicted peak that differ."
    return ComparedTable("Where the memory goes", ("part", *_names(found)), tuple(lines), note)


def _evaluation(found: Mapping[str, Any], names: Mapping[str, str]) -> list[ComparedTable]:
    """Return the tables of scores, of differences, and of scores by kind; none if no run was evaluated."""
    scored = found["evaluation"]
    evaluated = scored["evaluated"]
    if not any(evaluated):
        return []
    head = ("score", *_names(found))
    rows = ("rows", *(UNEVALUATED if number is None else f"{number:,}" for number in scored["rows"]))
    lines = [rows, *_score_lines(scored["scores"], evaluated, names)]
    note = "Mean over the rows, and below it its 95 % interval."
    if not scored["same_rows"]:
        note += " The runs answered different rows, so the scores do not compare."
    made = [ComparedTable("Scores", head, tuple(lines), note)]
    first = _names(found)[evaluated.index(True)]
    apart = [(names[key], *map(_difference, each)) for key, each in scored["differences"].items()]
    note = "Over the same rows, with a paired 95 % interval. An interval with 0 in it may be chance."
    made.append(ComparedTable(f"Differences from {first}", head, tuple(apart), note))
    by_kind = []
    for kind, entry in scored["kinds"].items():
        counts = ("no score" if number is None else f"{number:,}" for number in entry["rows"])
        by_kind.append((f"{kind}: rows", *counts))
        for name, *cells in _score_lines(entry["scores"], evaluated, names):
            by_kind.append((f"{kind}: {name}", *cells))
    if len(scored["kinds"]) > 1:
        made.append(ComparedTable("Scores by kind of row", head, tuple(by_kind)))
    return made


def _score_lines(
    scores: Mapping[str, Sequence[Any]], evaluated: Sequence[bool], names: Mapping[str, str]
) -> list[tuple[str, ...]]:
    lines = []
    for key, each in scores.items():
        if any(each):
            lines.append((names[key], *_cells(each, _interval, evaluated, "no score", UNEVALUATED)))
    return lines


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['value']:.3f}\n{value['low']:.3f} to {value['high']:.3f}"


def _difference(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value['value']:+.3f}\n{value['low']:+.3f} to {value['high']:+.3f}"
