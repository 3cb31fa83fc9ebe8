"""Scored answers -> one plain dictionary: values with their intervals, paired differences, counts, examples."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cria_tricks.kwanzaa.answers import Written
from cria_tricks.kwanzaa.bootstrap import interval, resampled_means
from cria_tricks.kwanzaa.prompt import Row
from cria_tricks.kwanzaa.reply import VIOLATIONS, Reply
from cria_tricks.kwanzaa.scores import SCORERS, Score

if TYPE_CHECKING:
    import torch

EXAMPLES = 10


@dataclass(frozen=True)
class Scored:
    """One answer and its scores.

    Attributes:
        row: what was asked.
        reply: what came.
        written: how it came; ``None`` for the data's own.
    """

    row: Row
    reply: Reply
    written: Written | None

    @cached_property
    def scores(self) -> dict[str, Score]:
        """By the scorer's name; none for a row without the answer contract."""
        return {name: scorer(self.row, self.reply) for name, scorer in SCORERS.items() if self.row.contract}


def summarise(systems: Mapping[str, Sequence[Scored]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Put all numbers together.

    Args:
        systems: the answers of each to the same rows, in the same order.
        about: what was evaluated, with what; becomes the first keys.

    Returns:
        Plain JSON data: ``systems`` by name, ``differences`` (adapter minus base, where both are there), ``examples``,
        and ``answers``, every row's scores with what was found wanting.
    """
    samples = _samples(systems)
    summary = {name: _system(scored, samples[name]) for name, scored in systems.items()}
    return {
        **about,
        "systems": summary,
        "differences": _differences(summary, samples),
        "examples": _examples(systems),
        "answers": {
            name: [
                {"row": each.row.where, **{scorer: {"value": s.value, **s.why} for scorer, s in each.scores.items()}}
                for each in scored
            ]
            for name, scored in systems.items()
        },
    }


def _samples(systems: Mapping[str, Sequence[Scored]]) -> dict[str, dict[str, "torch.Tensor"]]:
    """Every system's values in every draw; the draws are the same for all."""
    columns: dict[tuple[str, str], list[float]] = {}
    for name, scored in systems.items():
        for scorer in scored[0].scores:
            columns[name, scorer] = [each.scores[scorer].value for each in scored]
        if written := [each.written for each in scored if each.written]:
            columns[name, "loss"] = [each.loss for each in written]
            columns[name, "trained"] = [each.trained for each in written]
    means = dict(zip(columns, resampled_means(list(columns.values())).unbind(1), strict=True))
    found = {name: {scorer: means[name, scorer] for scorer in scored[0].scores} for name, scored in systems.items()}
    for name in systems:
        if (name, "loss") in means:  # per token, not per row
            found[name]["loss"] = means[name, "loss"] / means[name, "trained"]
            found[name]["perplexity"] = found[name]["loss"].exp()
    return found


def _system(scored: Sequence[Scored], samples: Mapping[str, "torch.Tensor"]) -> dict[str, Any]:
    values = {scorer: sum(each.scores[scorer].value for each in scored) / len(scored) for scorer in scored[0].scores}
    written = [each.written for each in scored if each.written]
    if written:
        values["loss"] = sum(each.loss for each in written) / sum(each.trained for each in written)
        values["perplexity"] = math.exp(values["loss"])
    answered = [each for each in written if each.tokens]  # a text is not answered
    return {
        **{name: _with_interval(value, samples[name]) for name, value in values.items()},
        **(_of_contract(scored) if scored[0].row.contract else {}),
        "tokens": sum(each.tokens for each in answered) / len(answered) if answered else None,
        "cut_off": sum(not each.ended for each in answered) if answered else None,
    }


def _of_contract(scored: Sequence[Scored]) -> dict[str, Any]:
    """What is counted where the rows keep the contract."""
    why = {scorer: [each.scores[scorer].why for each in scored] for scorer in SCORERS}
    cases = Counter((case["should"], case["did"]) for case in why["refusal"])
    return {
        "json": _share(why["format"], "json"),
        "violations": {
            kind: count / len(scored)
            for kind in VIOLATIONS
            if (count := sum(kind in case["violations"] for case in why["format"]))
        },
        "citation_precision": _ratio(why["citations"], "right", "labels"),
        "citation_recall": _ratio(why["citations"], "covered", "needed"),
        "items": sum(case["items"] for case in why["grounding"]),
        "unsupported": sum(len(case["unsupported"]) for case in why["grounding"]),
        "confusion": {
            "refused_rightly": cases[True, True],
            "answered_wrongly": cases[True, False],
            "refused_wrongly": cases[False, True],
            "answered_rightly": cases[False, False],
            "no_text": cases[True, None] + cases[False, None],
        },
    }


def _with_interval(value: float, samples: "torch.Tensor") -> dict[str, float]:
    low, high = interval(samples)
    return {"value": value, "low": low, "high": high}


def _differences(summary: Mapping[str, Any], samples: Mapping[str, Mapping[str, "torch.Tensor"]]) -> dict[str, Any]:
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
    """Ten rows, evenly spread."""
    rows = len(next(iter(systems.values())))
    chosen = sorted({round(number * (rows - 1) / (EXAMPLES - 1)) for number in range(EXAMPLES)})
    return [
        {
            "row": scored[number].row.where,
            "query": scored[number].row.prompt.query,
            "documents": [document.title for document in scored[number].row.prompt.documents],
            "reference": scored[number].row.reference.text,
            "systems": {
                name: {
                    "text": each[number].reply.text,
                    "read": each[number].reply.fields is not None,
                    "scores": {scorer: score.value for scorer, score in each[number].scores.items()},
                }
                for name, each in systems.items()
            },
        }
        for number in chosen
        for scored in [next(iter(systems.values()))]
    ]


def _share(cases: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(bool(case[name]) for case in cases) / len(cases)


def _ratio(cases: Sequence[Mapping[str, Any]], of: str, to: str) -> float | None:
    total = sum(case[to] for case in cases)
    return sum(case[of] for case in cases) / total if total else None
