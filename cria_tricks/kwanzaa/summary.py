"""Summarise scored answers as plain data: means with their intervals, paired differences, and counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cria_tricks.kwanzaa.answers import Written
from cria_tricks.kwanzaa.bootstrap import Statistic, mean, ratio, with_interval
from cria_tricks.kwanzaa.prompt import QARow
from cria_tricks.kwanzaa.reply import VIOLATIONS, Reply
from cria_tricks.kwanzaa.scores import SCORERS, Score, is_placeholder, kind
from cria_tricks.kwanzaa.statements import labels

Columns = list[list[float]]
"""Some numbers for each row."""
Figures = dict[str, tuple[Statistic, Columns]]
"""What is computed of a system's answers, by name: each a statistic, and the columns of numbers that it takes."""


@dataclass(frozen=True)
class Scored:
    """One answer and its scores.

    Attributes:
        row: the row that was answered.
        reply: the answer.
        written: the saved answer, with its length and the loss; ``None`` if no model wrote it.
    """

    row: QARow
    reply: Reply
    written: Written | None

    @cached_property
    def scores(self) -> dict[str, Score]:
        """The scores by the scorer's name; empty for a row without the answer contract."""
        if not self.row.contract:
            return {}
        return {name: scorer(self.row, self.reply) for name, scorer in SCORERS.items()}


def summarise(systems: Mapping[str, Sequence[Scored]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the scored answers of all systems.

    Args:
        systems: for each system (``adapter``, ``base``, ``trivial``, ``reference``) its answers to the same rows, in
            the same order.
        about: the first keys of the result: what was evaluated, and with what.

    Returns:
        Plain JSON data: the keys of ``about``; ``systems`` by name; ``kinds``, the scores by kind of row;
        ``differences``, adapter minus base, if both are there; and ``answers``, every row with the answer of each
        system, its scores and their reasons.
    """
    figures = {name: _figures(scored) for name, scored in systems.items()}
    differences = {}
    if {"adapter", "base"} <= figures.keys():
        for name, adapter in figures["adapter"].items():
            differences[name] = difference(adapter, figures["base"][name])
    rows = range(len(next(iter(systems.values()))))
    return {
        **about,
        "systems": {name: _system(scored, figures[name]) for name, scored in systems.items()},
        "kinds": _kinds(systems),
        "differences": differences,
        "answers": [_answers({name: scored[row] for name, scored in systems.items()}) for row in rows],
    }


def _figures(scored: Sequence[Scored]) -> Figures:
    figures: Figures = {}
    for scorer in scored[0].scores:
        figures[scorer] = (mean, [_values(scored, scorer)])
    written = _written(scored)
    if written:  # per token, so that a long row counts more than a short one
        per_token = [[each.loss for each in written], [float(each.trained) for each in written]]
        figures["loss"] = (ratio, per_token)
        figures["perplexity"] = (_perplexity, per_token)
    return figures


def _perplexity(loss: Any, trained: Any, axis: int = -1) -> Any:
    import numpy as np  # here, so that wrong arguments are refused before it is loaded

    return np.exp(ratio(loss, trained, axis))


def _values(scored: Sequence[Scored], scorer: str) -> list[float]:
    return [each.scores[scorer].value for each in scored]


def _written(scored: Sequence[Scored]) -> list[Written]:
    """List what a model wrote; empty for answers that need no model."""
    return [each.written for each in scored if each.written]


def _system(scored: Sequence[Scored], figures: Figures) -> dict[str, Any]:
    """Summarise one system: its scores, loss and perplexity with their intervals, and its counts."""
    found: dict[str, Any] = {name: with_interval(*figure) for name, figure in figures.items()}
    if scored[0].row.contract:
        found |= _counts(scored)
    answered = [each for each in _written(scored) if each.tokens]  # a text is not answered
    found["cut_off"] = sum(not each.ended for each in answered) if answered else None
    return found


def _counts(scored: Sequence[Scored]) -> dict[str, Any]:
    """Count what the scorers found, for rows that keep the contract."""
    violations = {}
    for violation in VIOLATIONS:
        count = sum(violation in each.scores["format"].why["violations"] for each in scored)
        if count:
            violations[violation] = count / len(scored)
    reasons = [each.scores["refusal"].why for each in scored]
    cases = Counter((reason["should"], reason["did"]) for reason in reasons)
    return {
        "placeholders": sum(is_placeholder(each.reply) for each in scored),
        "same_documents": sum(map(_cites_as_the_reference, scored)) / len(scored),
        "violations": violations,
        "confusion": {
            "refused_rightly": cases[True, True],
            "answered_wrongly": cases[True, False],
            "refused_wrongly": cases[False, True],
            "answered_rightly": cases[False, False],
            "no_text": cases[True, None] + cases[False, None],
        },
    }


def _cites_as_the_reference(scored: Scored) -> bool:
    """Tell whether an answer cites the same documents as the data's own answer, no more and no fewer."""
    return set(labels(scored.reply.text)) == set(labels(scored.row.reference.text))


def _kinds(systems: Mapping[str, Sequence[Scored]]) -> dict[str, Any]:
    """Summarise the scores by kind of row: ``rows``, their number, and ``systems``, the scores of each system.

    Returns:
        An entry for each kind that the rows have; empty for rows without the contract.
    """
    rows = [scored.row for scored in next(iter(systems.values()))]
    if not rows[0].contract:
        return {}
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(kind(row), []).append(place)
    found = {}
    for name, some in places.items():
        means = {}
        for system, scored in systems.items():
            mine = [scored[place] for place in some]
            means[system] = {scorer: with_interval(mean, [_values(mine, scorer)]) for scorer in SCORERS}
        found[name] = {"rows": len(some), "systems": means}
    return found


def difference(one: tuple[Statistic, Columns], other: tuple[Statistic, Columns]) -> dict[str, float]:
    """Subtract a figure of one system from that of another over the same rows, with the paired interval.

    Args:
        one: the statistic and its columns of the system to subtract from.
        other: the same of the system that is subtracted.
    """
    statistic, columns = one

    def apart(*both: Any, axis: int = -1) -> Any:
        return statistic(*both[: len(columns)], axis=axis) - statistic(*both[len(columns) :], axis=axis)

    return with_interval(apart, [*columns, *other[1]])


def _answers(scored: Mapping[str, Scored]) -> dict[str, Any]:
    """Return one row with what each system answered: the text, and each score with its reasons."""
    row = next(iter(scored.values())).row
    systems = {}
    for name, each in scored.items():
        scores = {scorer: {"value": score.value, **score.why} for scorer, score in each.scores.items()}
        systems[name] = {"text": each.reply.text, **scores}
    return {
        "row": row.where,
        "query": row.prompt.query,
        "documents": [document.title for document in row.prompt.documents],
        "reference": row.reference.text,
        "systems": systems,
    }
