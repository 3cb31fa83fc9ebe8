"""Summarise scored answers as plain data: values with their intervals, paired differences, counts, examples."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cria_tricks.kwanzaa.answers import Written
from cria_tricks.kwanzaa.bootstrap import Statistic, mean, ratio, with_interval
from cria_tricks.kwanzaa.prompt import QARow
from cria_tricks.kwanzaa.reply import VIOLATIONS, Reply
from cria_tricks.kwanzaa.scores import SCORERS, Score, is_placeholder, kind
from cria_tricks.kwanzaa.statements import labels
from cria_tricks.kwanzaa.training import Training

Columns = list[list[float]]
"""Some numbers for each row."""
EXAMPLES = 10
"""The number of rows that are shown with all answers."""


@dataclass(frozen=True)
class Scored:
    """One answer and its scores.

    Attributes:
        row: the row that was answered.
        reply: the answer.
        written: the saved answer, with its length and the loss; ``None`` for the data's own answer.
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


def summarise(
    systems: Mapping[str, Sequence[Scored]], about: Mapping[str, Any], training: Training | None = None
) -> dict[str, Any]:
    """Summarise the scored answers of all systems.

    Args:
        systems: for each system (``adapter``, ``base``, ``trivial``, ``reference``) its answers to the same rows, in
            the same order.
        about: the first keys of the result: what was evaluated, and with what.
        training: what the adapter was trained on, if that is known.

    Returns:
        Plain JSON data: the keys of ``about``; ``systems`` by name; ``kinds``, the scores by kind of row;
        ``questions``, the scores by whether the question is in the training rows (empty if these are not known);
        ``differences``, adapter minus base, if both are there; ``examples``; and ``answers``, every row's scores with
        their reasons.
    """
    figures = {name: _figures(scored) for name, scored in systems.items()}
    return {
        **about,
        "systems": {name: _system(scored, figures[name], training) for name, scored in systems.items()},
        "kinds": _grouped(systems, kind),
        "questions": _grouped(systems, training.group) if training else {},
        "differences": _differences(figures),
        "examples": _examples(systems),
        "answers": {name: [_answer(each) for each in scored] for name, scored in systems.items()},
    }


def _answer(scored: Scored) -> dict[str, Any]:
    """List one answer's scores, each with its reasons."""
    scores = {scorer: {"value": score.value, **score.why} for scorer, score in scored.scores.items()}
    return {"row": scored.row.where, **scores}


def _figures(scored: Sequence[Scored]) -> dict[str, tuple[Statistic, Columns]]:
    """Return the figures of a system, by name: each as a statistic, and the columns of numbers that it takes."""
    figures: dict[str, tuple[Statistic, Columns]] = {}
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
    """List what a model wrote; empty for the data's own answers."""
    return [each.written for each in scored if each.written]


def _system(
    scored: Sequence[Scored], figures: Mapping[str, tuple[Statistic, Columns]], training: Training | None
) -> dict[str, Any]:
    """Summarise one system: its scores, loss and perplexity with their intervals, and its counts."""
    found: dict[str, Any] = {name: with_interval(*figure) for name, figure in figures.items()}
    written = _written(scored)
    if scored[0].row.contract:
        found |= _of_contract(scored)
        if training:
            found["learnt_by_heart"] = sum(training.holds(each.reply) for each in scored)
    tokens = cut_off = None
    answered = [each for each in written if each.tokens]  # a text is not answered
    if answered:
        tokens = sum(each.tokens for each in answered) / len(answered)
        cut_off = sum(not each.ended for each in answered)
    return found | {"tokens": tokens, "cut_off": cut_off}


def _of_contract(scored: Sequence[Scored]) -> dict[str, Any]:
    """Count what the scorers found, for rows that keep the contract."""
    formats = _reasons(scored, "format")
    citations = _reasons(scored, "citations")
    grounding = _reasons(scored, "grounding")
    cases = Counter((case["should"], case["did"]) for case in _reasons(scored, "refusal"))
    return {
        "json": sum(case["json"] for case in formats) / len(formats),
        "placeholders": sum(is_placeholder(each.reply) for each in scored),
        "same_documents": sum(map(_cites_as_the_reference, scored)) / len(scored),
        "violations": _violations(formats),
        "citation_precision": _ratio(citations, "right", "labels"),
        "citation_recall": _ratio(citations, "covered", "needed"),
        "items": sum(case["items"] for case in grounding),
        "unsupported": sum(len(case["unsupported"]) for case in grounding),
        "confusion": {
            "refused_rightly": cases[True, True],
            "answered_wrongly": cases[True, False],
            "refused_wrongly": cases[False, True],
            "answered_rightly": cases[False, False],
            "no_text": cases[True, None] + cases[False, None],
        },
    }


def _reasons(scored: Sequence[Scored], scorer: str) -> list[dict[str, Any]]:
    return [each.scores[scorer].why for each in scored]


def _violations(formats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of answers with each kind of violation, without the kinds that no answer has."""
    shares = {}
    for violation in VIOLATIONS:
        count = sum(violation in case["violations"] for case in formats)
        if count:
            shares[violation] = count / len(formats)
    return shares


def _cites_as_the_reference(scored: Scored) -> bool:
    """Tell whether an answer cites the same documents as the data's own answer, no more and no fewer."""
    return set(labels(scored.reply.text)) == set(labels(scored.row.reference.text))


def _grouped(systems: Mapping[str, Sequence[Scored]], group: Callable[[QARow], str]) -> dict[str, Any]:
    """Summarise the scores of each group of rows.

    Args:
        systems: as for :func:`summarise`.
        group: returns the name of a row's group, such as :func:`cria_tricks.kwanzaa.scores.kind`.

    Returns:
        For each group that the rows have: ``rows``, their number, and ``systems``, the scores of each system over them.
        Empty for rows without the contract.
    """
    rows = [scored.row for scored in next(iter(systems.values()))]
    if not rows[0].contract:
        return {}
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(group(row), []).append(place)
    found = {}
    for name, some in places.items():
        shares = {}
        for system, scored in systems.items():
            mine = [scored[place] for place in some]
            shares[system] = {scorer: with_interval(mean, [_values(mine, scorer)]) for scorer in SCORERS}
        found[name] = {"rows": len(some), "systems": shares}
    return found


def _differences(figures: Mapping[str, Mapping[str, tuple[Statistic, Columns]]]) -> dict[str, Any]:
    """Subtract the base's figures from the adapter's, with paired intervals; empty if one of the two is missing."""
    if not {"adapter", "base"} <= figures.keys():
        return {}
    return {name: difference(figures["adapter"][name], figures["base"][name]) for name in figures["adapter"]}


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


def _examples(systems: Mapping[str, Sequence[Scored]]) -> list[dict[str, Any]]:
    """Pick ten rows, evenly spread over the data, or all rows if there are fewer."""
    rows = len(next(iter(systems.values())))
    chosen = sorted({round(number * (rows - 1) / (EXAMPLES - 1)) for number in range(EXAMPLES)})
    return [_example({name: scored[number] for name, scored in systems.items()}) for number in chosen]


def _example(answers: Mapping[str, Scored]) -> dict[str, Any]:
    """Return one row with what each system answered."""
    row = next(iter(answers.values())).row
    return {
        "row": row.where,
        "query": row.prompt.query,
        "documents": [document.title for document in row.prompt.documents],
        "reference": row.reference.text,
        "systems": {name: _shown(scored) for name, scored in answers.items()},
    }


def _shown(scored: Scored) -> dict[str, Any]:
    return {
        "text": scored.reply.text,
        "read": scored.reply.fields is not None,
        "scores": {scorer: score.value for scorer, score in scored.scores.items()},
    }


def _ratio(cases: Sequence[Mapping[str, Any]], of: str, to: str) -> float | None:
    """Divide the sum of one count over all cases by that of another; ``None`` if the latter is zero."""
    total = sum(case[to] for case in cases)
    if not total:
        return None
    return sum(case[of] for case in cases) / total
