"""Write an evaluation, the content of ``eval.json``, as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.common.markdown_table import cell, markdown_table

NAMES = {
    "format": "format compliance",
    "citations": "citation accuracy (F1)",
    "grounding": "grounding",
    "refusal": "refusal accuracy",
    "loss": "loss per token of the reference, nats",
    "perplexity": "perplexity of the reference, exp(loss)",
}
"""The scores and losses in their order in the tables: the key in ``eval.json``, and its name in a table."""
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

Table = list[list[str]]
"""The lines of a table, each a list of cells; the first line holds the names of the columns."""


def markdown(found: Mapping[str, Any]) -> str:
    """Write the whole page.

    Args:
        found: the evaluation, from :func:`cria_tricks.kwanzaa.summary.summarise`.
    """
    lines = ["# Evaluation", "", f"{found['rows']} of {found['rows_in_data']} rows of {found['data']}."]
    if "adapter" in found:
        keys = ("base", "quantization", "dtype", "device", "max_new_tokens")
        with_what = ", ".join(f"{key} {found[key]}" for key in keys if found.get(key))
        lines.append(f"Adapter: {found['adapter']}; {with_what}.")
    if found.get("text_length"):
        lines.append(f"A text is not answered; for its loss it is cut into rows of {found['text_length']:,} tokens.")
    if not found["kinds"]:
        lines.append(UNSCORED)
    lines += ["", _EXPLAINED, ""]
    for made in (scores_table(found), kinds_table(found), _counts_table(found["systems"])):
        lines += [*table_lines(made), ""]
    return "\n".join(lines)


def scores_table(found: Mapping[str, Any]) -> Table:
    """Lay out the scores over all rows with their intervals: a column for each system and one for their difference."""
    systems = found["systems"]
    differences = found["differences"]
    rows = [["score", *systems]]
    for key, name in NAMES.items():
        values = [system.get(key) for system in systems.values()]
        if any(values):
            rows.append([name, *map(_value, values)])
            if differences:
                rows[-1].append(_value(differences[key], "+"))
    if differences:
        rows[0].append("adapter minus base")
    return rows


def kinds_table(found: Mapping[str, Any]) -> Table:
    """Lay out the scores by kind of row; empty if all rows are of one kind, or do not keep the contract."""
    if len(found["kinds"]) < 2:
        return []
    rows = [["rows whose answer is", "score", *found["systems"]]]
    for kind, about in found["kinds"].items():
        for key, name in NAMES.items():
            values = [_value(system[key]) for system in about["systems"].values() if key in system]
            if values:
                rows.append([f"{kind}, {about['rows']} rows", name, *values])
    return rows


def _counts_table(systems: Mapping[str, Any]) -> Table:
    """Lay out the counts, and the share of answers with each violation of the contract."""
    counts = []
    violations: dict[str, None] = {}  # an ordered set
    for system in systems.values():
        counts.append({**system, **system.get("confusion", {})})
        violations |= dict.fromkeys(system.get("violations", {}))
    rows = [["what", *systems]]
    for key, name in _COUNTS.items():
        if key in counts[0]:
            rows.append([name, *(_count(count[key]) for count in counts)])
    for violation in violations:
        shares = [system["violations"].get(violation, 0.0) for system in systems.values()]
        rows.append([f"share that breaks the contract: {violation}", *map(_count, shares)])
    return rows


def _value(found: Mapping[str, float] | None, sign: str = "") -> str:
    """Write a value with its interval; with ``sign="+"``, as for a difference, positive numbers get a plus."""
    if found is None:
        return ""
    return f"{found['value']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


def _count(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def table_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Write a table as Markdown; no lines if it is empty."""
    if not table:
        return []
    head, *rows = [list(map(cell, row)) for row in table]
    return markdown_table(head, rows)
