"""Summarise scored answers as plain data, and as one table: means with their intervals, paired differences, counts.

The intervals are those of scipy's bias-corrected and accelerated (BCa) bootstrap over the rows.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from cria_tricks.common.markdown_table import cell, markdown_table
from cria_tricks.kwanzaa.contract import VIOLATIONS, Reply
from cria_tricks.kwanzaa.prompt import QARow
from cria_tricks.kwanzaa.scores import SCORERS, Score, is_placeholder, kind
from cria_tricks.kwanzaa.statements import labels

NAMES = {
    "format": "format compliance",
    "citations": "citation accuracy (F1)",
    "grounding": "grounding",
    "refusal": "refusal accuracy",
    "loss": "loss per token of the reference, nats",
    "perplexity": "perplexity of the reference, exp(loss)",
}
"""The scores and losses in their order in the table: the key in ``eval.json``, and its name in the table."""
_COUNTS = {
    "placeholders": "placeholders in the place of an answer",
    "same_documents": "share that cites the same documents as the data's own answer",
    "refused_rightly": "should refuse, refuses",
    "answered_wrongly": "should refuse, answers",
    "refused_wrongly": "should answer, refuses",
    "answered_rightly": "should answer, answers",
    "no_text": "neither: no text",
    "cut_off": "answers cut off at the longest allowed",
}
"""The same for counts."""
UNSCORED = (
    "The four scores (format, citations, grounding, refusal) need rows whose answers keep the contract "
    "kwanzaa.answer.v1, so they are left out."
)
_EXPLAINED = """\
Mean over the rows; in brackets its 95 % interval, by 10,000 bootstrap draws of the rows (BCa). The docstrings in
`cria_tricks/kwanzaa/scores.py` define the scores. Loss and perplexity are over whole rows, and the lower the better.
The kind of a row is that of the data's own answer: a placeholder announces an answer in brackets and gives none.
`eval.json` has the answers to each row, with the reasons of their scores."""
DRAWS = 10_000
"""The number of bootstrap samples."""

Statistic = Callable[..., Any]
"""Takes columns, arrays whose last axis is the rows, and returns a figure of each along that axis."""
Figure = tuple[Statistic, list[list[float]]]
"""What is computed of a system's answers: a statistic, and the columns that it takes, a number for each row."""


@dataclass(frozen=True)
class Written:
    """A model's answer to one row, and the model's loss on the row's own answer, the reference.

    Attributes:
        text: the model's answer; empty for a row without a prompt, such as a text.
        tokens: length of the answer with its end token (tokens); 0 for a row without a prompt.
        ended: whether the model ended the answer itself, before the allowed length.
        loss: loss of the reference, summed over its trained tokens (nats).
        trained: number of these tokens.
    """

    text: str
    tokens: int
    ended: bool
    loss: float
    trained: int


@dataclass(frozen=True)
class Scored:
    """One answer and its scores.

    Attributes:
        row: the row that was answered.
        reply: the answer.
        written: the answer as the model wrote it, with its length and the loss; ``None`` if no model wrote it.
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


def mean(values: Any, axis: int = -1) -> Any:
    """Compute the mean of a column."""
    return values.mean(axis)


def ratio(over: Any, under: Any, axis: int = -1) -> Any:
    """Compute the sum of one column over the sum of another, such as a loss per token over all rows."""
    return over.sum(axis) / under.sum(axis)


def _perplexity(loss: Any, trained: Any, axis: int = -1) -> Any:
    import numpy as np  # here, so that wrong arguments are refused before it is loaded

    return np.exp(ratio(loss, trained, axis))


def with_interval(statistic: Statistic, columns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compute a figure and its interval of 95 %.

    The rows are drawn with replacement, again and again. A draw takes the same rows of all columns, so the interval of
    a difference of two systems is that of a paired comparison. With one row, or if no draw changes the figure, the
    interval is the figure itself.

    Args:
        statistic: the figure, such as :func:`mean`.
        columns: its arguments, a number for each row.

    Returns:
        ``value``, ``low`` and ``high``.
    """
    # Imported here: scipy takes a second, and wrong rows should be refused before that.
    import numpy as np
    from scipy import stats

    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    value = float(statistic(*arrays))
    if len(arrays[0]) < 2:
        return {"value": value, "low": value, "high": value}
    with warnings.catch_warnings(action="ignore"):  # it warns of what is looked at below
        drawn = stats.bootstrap(arrays, statistic, paired=True, vectorized=True, n_resamples=DRAWS, rng=0)  # BCa
    low, high = drawn.confidence_interval
    if not np.isfinite([low, high]).all():  # no draw changes the figure, or the rows are too few for the correction
        low, high = np.percentile(drawn.bootstrap_distribution, [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}


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
            differences[name] = _difference(adapter, figures["base"][name])
    rows = range(len(next(iter(systems.values()))))
    return {
        **about,
        "systems": {name: _system(scored, figures[name]) for name, scored in systems.items()},
        "kinds": _kinds(systems),
        "differences": differences,
        "answers": [_answers({name: scored[row] for name, scored in systems.items()}) for row in rows],
    }


def _figures(scored: Sequence[Scored]) -> dict[str, Figure]:
    """List what is computed of a system's answers, by name."""
    figures: dict[str, Figure] = {name: (mean, [_values(scored, name)]) for name in scored[0].scores}
    written = [each.written for each in scored if each.written]
    if written:  # per token, so that a long row counts more than a short one
        per_token = [[each.loss for each in written], [float(each.trained) for each in written]]
        figures["loss"] = (ratio, per_token)
        figures["perplexity"] = (_perplexity, per_token)
    return figures


def _values(scored: Sequence[Scored], scorer: str) -> list[float]:
    return [each.scores[scorer].value for each in scored]


def _difference(one: Figure, other: Figure) -> dict[str, float]:
    """Subtract a figure of one system from that of another over the same rows, with the paired interval."""
    statistic, columns = one

    def apart(*both: Any, axis: int = -1) -> Any:
        return statistic(*both[: len(columns)], axis=axis) - statistic(*both[len(columns) :], axis=axis)

    return with_interval(apart, [*columns, *other[1]])


def _system(scored: Sequence[Scored], figures: Mapping[str, Figure]) -> dict[str, Any]:
    """Summarise one system: its scores, loss and perplexity with their intervals, and its counts."""
    found: dict[str, Any] = {name: with_interval(*figure) for name, figure in figures.items()}
    if scored[0].row.contract:
        found |= _counts(scored)
    answered = [each.written for each in scored if each.written and each.written.tokens]  # a text is not answered
    found["cut_off"] = sum(not each.ended for each in answered) if answered else None
    return found


def _counts(scored: Sequence[Scored]) -> dict[str, Any]:
    """Count what the scorers found, for rows that keep the contract."""
    broken = Counter(violation for each in scored for violation in each.scores["format"].why["violations"])
    cases = Counter((each.scores["refusal"].why["should"], each.scores["refusal"].why["did"]) for each in scored)
    as_the_reference = [set(labels(each.reply.text)) == set(labels(each.row.reference.text)) for each in scored]
    return {
        "placeholders": sum(is_placeholder(each.reply) for each in scored),
        "same_documents": sum(as_the_reference) / len(scored),
        "violations": {name: broken[name] / len(scored) for name in VIOLATIONS if broken[name]},
        "confusion": {
            "refused_rightly": cases[True, True],
            "answered_wrongly": cases[True, False],
            "refused_wrongly": cases[False, True],
            "answered_rightly": cases[False, False],
            "no_text": cases[True, None] + cases[False, None],
        },
    }


def _kinds(systems: Mapping[str, Sequence[Scored]]) -> dict[str, Any]:
    """Summarise the scores by kind of row; empty for rows without the contract."""
    places: dict[str, list[int]] = {}
    for place, scored in enumerate(next(iter(systems.values()))):
        if not scored.row.contract:
            return {}
        places.setdefault(kind(scored.row), []).append(place)
    found = {}
    for name, some in places.items():
        means = {}
        for system, answers in systems.items():
            mine = [answers[place] for place in some]
            means[system] = {scorer: with_interval(mean, [_values(mine, scorer)]) for scorer in SCORERS}
        found[name] = {"rows": len(some), "systems": means}
    return found


def _answers(scored: Mapping[str, Scored]) -> dict[str, Any]:
    """Return one row with what each system answered: the text, each score with its reasons, all that a model wrote."""
    row = next(iter(scored.values())).row
    systems = {}
    for name, each in scored.items():
        scores = {scorer: {"value": score.value, **score.why} for scorer, score in each.scores.items()}
        systems[name] = {"text": each.reply.text, **scores}
        if each.written:
            systems[name]["written"] = asdict(each.written)
    return {
        "row": row.where,
        "query": row.query,
        "documents": [document.title for document in row.documents],
        "reference": row.reference.text,
        "systems": systems,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Write ``eval.md`` for an evaluation of :func:`summarise`: what was evaluated, and the table."""
    lines = ["# Evaluation", "", f"{found['rows']} of {found['rows_in_data']} rows of {found['data']}."]
    if "adapter" in found:
        keys = ("base", "quantization", "dtype", "device", "max_new_tokens")
        with_what = ", ".join(f"{key} {found[key]}" for key in keys if found.get(key))
        lines.append(f"Adapter: {found['adapter']}; {with_what}.")
    if found.get("text_length"):
        lines.append(f"A text is not answered; for its loss it is cut into rows of {found['text_length']:,} tokens.")
    if not found["kinds"]:
        lines.append(UNSCORED)
    return "\n".join([*lines, "", _EXPLAINED, "", *table_lines(found), ""])


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """Write the table of an evaluation as Markdown."""
    head, *rows = [list(map(cell, row)) for row in table(found)]
    return markdown_table(head, rows)


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Lay out the scores with their intervals, over all rows and by kind of row, then the counts over all rows.

    Returns:
        The lines, each a list of cells: the rows, what is told of them, a cell for each system, and their difference.
        The first line is the head.
    """
    systems = found["systems"]
    differences = found["differences"]
    every = f"all, {found['rows']}"
    head = ["rows", "score", *systems]
    if differences:
        head.append("adapter minus base")
    lines = [head]
    for key, name in NAMES.items():
        values = [system.get(key) for system in systems.values()]
        if any(values):
            lines.append([every, name, *map(_value, values)])
            if differences:
                lines[-1].append(_value(differences[key], "+"))
    for kind_of, about in found["kinds"].items() if len(found["kinds"]) > 1 else ():
        for key, name in NAMES.items():
            values = [system[key] for system in about["systems"].values() if key in system]
            if values:
                lines.append([f"{kind_of}, {about['rows']}", name, *map(_value, values)])
    counts = [{**system, **system.get("confusion", {})} for system in systems.values()]
    for key, name in _COUNTS.items():
        if key in counts[0]:
            lines.append([every, name, *(_count(each[key]) for each in counts)])
    for violation in VIOLATIONS:
        shares = [system.get("violations", {}).get(violation, 0.0) for system in systems.values()]
        if any(shares):
            lines.append([every, f"share that breaks the contract: {violation}", *map(_count, shares)])
    return [line + [""] * (len(head) - len(line)) for line in lines]


def _value(found: Mapping[str, float] | None, sign: str = "") -> str:
    """Write a value with its interval; with ``sign="+"``, as for a difference, positive numbers get a plus."""
    if found is None:
        return ""
    return f"{found['value']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


def _count(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
