"""Summarise scored answers as plain data: values with their intervals, paired differences, counts, examples."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cria_tricks.kwanzaa.answers import Written
from cria_tricks.kwanzaa.bootstrap import interval, resampled_means
from cria_tricks.kwanzaa.prompt import QARow
from cria_tricks.kwanzaa.reply import VIOLATIONS, Reply
from cria_tricks.kwanzaa.scores import SCORERS, Score

if TYPE_CHECKING:
    import torch

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


def summarise(systems: Mapping[str, Sequence[Scored]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the scored answers of all systems.

    Args:
        systems: for each system (``adapter``, ``base``, ``reference``) its answers to the same rows, in the same order.
        about: the first keys of the result: what was evaluated, and with what.

    Returns:
        Plain JSON data: the keys of ``about``; ``systems`` by name; ``differences``, adapter minus base, if both are
        there; ``examples``; and ``answers``, every row's scores with their reasons.
    """
    samples = _samples(systems)
    summary = {name: _system(scored, samples[name]) for name, scored in systems.items()}
    return {
        **about,
        "systems": summary,
        "differences": _differences(summary, samples),
        "examples": _examples(systems),
        "answers": {name: [_answer(each) for each in scored] for name, scored in systems.items()},
    }


def _answer(scored: Scored) -> dict[str, Any]:
    """List one answer's scores, each with its reasons."""
    scores = {scorer: {"value": score.value, **score.why} for scorer, score in scored.scores.items()}
    return {"row": scored.row.where, **scores}


def _samples(systems: Mapping[str, Sequence[Scored]]) -> dict[str, dict[str, "torch.Tensor"]]:
    """Draw bootstrap samples of each system's means; all systems use the same draws, so that differences are paired.

    Returns:
        For each system the samples by name (scores, ``loss``, ``perplexity``), each of shape (draws,).
    """
    columns: dict[tuple[str, str], list[float]] = {}
    for name, scored in systems.items():
        for scorer in scored[0].scores:
            columns[name, scorer] = _values(scored, scorer)
        written = _written(scored)
        if written:
            columns[name, "loss"] = [each.loss for each in written]
            columns[name, "trained"] = [each.trained for each in written]
    means = resampled_means(list(columns.values())).unbind(1)
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in systems}
    for (name, column), mean in zip(columns, means, strict=True):
        found[name][column] = mean
    for samples in found.values():
        if "loss" in samples:  # a row's mean loss over its mean number of tokens: the mean over tokens, not over rows
            samples["loss"] = samples["loss"] / samples.pop("trained")
            samples["perplexity"] = samples["loss"].exp()
    return found


def _values(scored: Sequence[Scored], scorer: str) -> list[float]:
    return [each.scores[scorer].value for each in scored]


def _written(scored: Sequence[Scored]) -> list[Written]:
    """List what a model wrote; empty for the data's own answers."""
    return [each.written for each in scored if each.written]


def _system(scored: Sequence[Scored], samples: Mapping[str, "torch.Tensor"]) -> dict[str, Any]:
    """Summarise one system: its scores, loss and perplexity with their intervals, and its counts."""
    values = {scorer: sum(_values(scored, scorer)) / len(scored) for scorer in scored[0].scores}
    written = _written(scored)
    if written:
        values["loss"] = sum(each.loss for each in written) / sum(each.trained for each in written)
        values["perplexity"] = math.exp(values["loss"])
    found: dict[str, Any] = {name: _with_interval(value, samples[name]) for name, value in values.items()}
    if scored[0].row.contract:
        found |= _of_contract(scored)
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
    for kind in VIOLATIONS:
        count = sum(kind in case["violations"] for case in formats)
        if count:
            shares[kind] = count / len(formats)
    return shares


def _with_interval(value: float, samples: "torch.Tensor") -> dict[str, float]:
    low, high = interval(samples)
    return {"value": value, "low": low, "high": high}


def _differences(summary: Mapping[str, Any], samples: Mapping[str, Mapping[str, "torch.Tensor"]]) -> dict[str, Any]:
    """Subtract the base's values from the adapter's, with paired intervals; empty if one of the two is missing."""
    if not {"adapter", "base"} <= summary.keys():
        return {}
    return {
        name: _with_interval(
            summary["adapter"][name]["value"] - summary["base"][name]["value"],
            samples["adapter"][name] - samples["base"][name],
        )
        for name in samples["adapter"]
    }


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
