"""Write an evaluation, the content of ``eval.json``, as a Markdown page."""

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
"""The scores and losses in their order on the page: the key in ``eval.json``, and its name on the page."""
_COUNTS = {
    "json": "a JSON object could be read",
    "placeholders": "placeholders in the place of an answer",
    "learnt_by_heart": "answers whose text is a training answer, word for word",
    "same_documents": "cites the same documents as the data's own answer",
    "citation_precision": "right labels, of all labels",
    "citation_recall": "statements with a right label, of those that need one",
    "items": "numbers, years, names and quotes",
    "unsupported": "of these in no document",
    "tokens": "tokens an answer, mean",
    "cut_off": "answers cut off at the longest allowed",
}
"""The same for counts."""
_CASES = {
    "refused_rightly": "should refuse, refuses",
    "answered_wrongly": "should refuse, answers",
    "refused_wrongly": "should answer, refuses",
    "answered_rightly": "should answer, answers",
    "no_text": "neither: no text",
}
"""The same for the confusion matrix of refusals."""
UNSCORED = (
    "The four scores (format, citations, grounding, refusal) need rows whose answers keep the contract "
    "kwanzaa.answer.v1, so they are left out."
)
KINDS = "The kind is that of the data's own answer. A placeholder announces an answer in brackets and gives none."
QUESTIONS = "Where a question was trained on, a model may know the answer by heart."
_LONGEST = 1200
"""The length at which a text in an example is cut (characters)."""


def markdown(found: Mapping[str, Any]) -> str:
    """Write the whole page.

    Args:
        found: the evaluation, from :func:`cria_tricks.kwanzaa.summary.summarise`.
    """
    lines = [
        "# Evaluation",
        "",
        f"{found['rows']} of {found['rows_in_data']} rows of {found['data']}.",
        *_made_with(found),
        "",
        *_scores(found),
        *_groups("kind of row", KINDS, groups_table("rows whose answer is", found["kinds"])),
        *_groups("question", QUESTIONS, groups_table("rows of which", found["questions"])),
        *_counts(found["systems"]),
    ]
    if _keeps_contract(found["systems"]):
        lines += _violations(found["systems"])
        lines += _refusals(found["systems"])
    lines += [f"## {len(found['examples'])} examples", ""]
    for example in found["examples"]:
        lines += _example(example)
    return "\n".join(lines)


def _keeps_contract(systems: Mapping[str, Any]) -> bool:
    """Tell whether the rows keep the answer contract: only then are its violations counted."""
    first = next(iter(systems.values()))
    return "violations" in first


def _made_with(found: Mapping[str, Any]) -> list[str]:
    """Name the adapter and the versions of the libraries; no lines if no model has answered."""
    lines = []
    if "adapter" in found:
        keys = ("base", "quantization", "dtype", "device", "max_new_tokens")
        with_what = ", ".join(f"{key} {found[key]}" for key in keys if found.get(key))
        lines.append(f"Adapter: {found['adapter']}; {with_what}.")
    versions = [f"{name} {version}" for name, version in found.get("versions", {}).items()]
    if versions:
        lines.append(f"Versions: {', '.join(versions)}.")
    return lines


def _scores(found: Mapping[str, Any]) -> list[str]:
    where = UNSCORED
    if _keeps_contract(found["systems"]):
        where = "Definitions and blind spots stand in `cria_tricks/kwanzaa/scores.py`."
    texts = ""
    if found.get("text_length"):
        texts = f"A text is not answered; for its loss it is cut into rows of {found['text_length']:,} tokens. "
    return [
        "## Scores",
        "",
        "Mean over the rows; in brackets its 95 % interval, by 10,000 bootstrap draws of the rows (BCa).",
        "",
        *table_lines(scores_table(found)),
        "",
        where,
        "",
        f"The loss is on whole rows, and it is not quite the training report's where that cut some. {texts}"
        "Loss and perplexity: the lower the better.",
        "",
    ]


def _groups(by: str, text: str, table: list[list[str]]) -> list[str]:
    """Write the scores by group of rows under a heading; no lines without a table."""
    return [f"## By {by}", "", text, "", *table_lines(table), ""] if table else []


def groups_table(column: str, groups: Mapping[str, Any]) -> list[list[str]]:
    """Lay out the scores by group of rows: a line for each group and score, a column for each system.

    Returns:
        The lines of the table; the first line holds the column names. Empty if all rows are of one group, or do not
        keep the contract.
    """
    if len(groups) < 2:
        return []
    systems = next(iter(groups.values()))["systems"]
    rows = [[column, "score", *systems]]
    for group, found in groups.items():
        for key, name in NAMES.items():
            values = [_value(system[key]) for system in found["systems"].values() if key in system]
            if values:
                rows.append([f"{group}, {found['rows']} rows", name, *values])
    return rows


def _counts(systems: Mapping[str, Any]) -> list[str]:
    first = next(iter(systems.values()))
    rows = []
    for key, label in _COUNTS.items():
        if key in first:
            rows.append([label, *(_count(system[key]) for system in systems.values())])
    return ["## Counts", "", *table_lines([["what", *systems], *rows]), ""]


def _violations(systems: Mapping[str, Any]) -> list[str]:
    kinds: dict[str, None] = {}  # an ordered set
    for system in systems.values():
        kinds |= dict.fromkeys(system["violations"])
    rows = []
    for kind in kinds:
        shares = [system["violations"].get(kind, 0) for system in systems.values()]
        rows.append([kind, *(f"{share:.2f}" for share in shares)])
    return ["## Violations of the contract", "", *table_lines([["share of rows with", *systems], *rows]), ""]


def _refusals(systems: Mapping[str, Any]) -> list[str]:
    rows = []
    for key, label in _CASES.items():
        rows.append([label, *(str(system["confusion"][key]) for system in systems.values())])
    return ["## Refusals", "", *table_lines([["rows", *systems], *rows]), ""]


def scores_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Lay out the scores with their intervals, a column for each system and one for their difference.

    Returns:
        The lines of the table, each a list of cells; the first line holds the column names.
    """
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


def _example(example: Mapping[str, Any]) -> list[str]:
    """Write one row with its documents, and below it the reference and the answer of each system."""
    asked = example["query"].strip().splitlines() or ["(nothing is asked)"]
    where = f"{example['row']}."
    if any(system["scores"] for system in example["systems"].values()):
        documents = [f"[{number}] {title}" for number, title in enumerate(example["documents"], 1)]
        where += f" Documents: {'; '.join(documents) or 'none'}"
    lines = [f"### {asked[0]}", "", where, ""]
    answers = {"reference": _quoted(example["reference"])}
    scores = {"reference": ""}
    for name, system in example["systems"].items():
        answers[name] = _quoted(system["text"])
        scores[name] = _scores_in_words(system)
    for name, quoted in answers.items():
        lines += [f"**{name}**{scores[name]}", "", *quoted, ""]
    return lines


def _scores_in_words(system: Mapping[str, Any]) -> str:
    said = ", ".join(f"{scorer} {value:.2f}" for scorer, value in system["scores"].items())
    if not said:
        return ""
    if not system["read"]:
        said += "; no JSON could be read"
    return f" ({said})"


def _quoted(text: str) -> list[str]:
    """Write a text as a Markdown quotation, cut to its first :data:`_LONGEST` characters."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " ..."
    return [f"> {line}".rstrip() for line in text.splitlines() or ["(no text)"]]


def _value(found: Mapping[str, float] | None, sign: str = "") -> str:
    """Write a value with its interval; with ``sign="+"``, as for a difference, positive numbers get a plus."""
    if found is None:
        return ""
    return f"{found['value']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


def _count(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}"


def table_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Write a table as Markdown; no lines if it is empty."""
    if not table:
        return []
    head, *rows = [list(map(cell, row)) for row in table]
    return markdown_table(head, rows)
