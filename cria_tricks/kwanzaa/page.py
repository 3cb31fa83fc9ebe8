"""What ``eval.json`` holds, as Markdown to read."""

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
_COUNTS = {
    "json": "a JSON object could be read",
    "citation_precision": "right labels, of all labels",
    "citation_recall": "statements with a right label, of those that need one",
    "items": "numbers, years, names and quotes",
    "unsupported": "of these in no document",
    "tokens": "tokens an answer, mean",
    "cut_off": "answers cut off at the longest allowed",
}
_CASES = {
    "refused_rightly": "should refuse, refuses",
    "answered_wrongly": "should refuse, answers",
    "refused_wrongly": "should answer, refuses",
    "answered_rightly": "should answer, answers",
    "no_text": "neither: no text",
}
UNSCORED = (
    "The four scores (format, citations, grounding, refusal) need rows whose answers keep the contract "
    "kwanzaa.answer.v1, so they are left out."
)
_LONGEST = 1200
"""Letters of a text that an example shows."""


def markdown(found: Mapping[str, Any]) -> str:
    """Write the whole evaluation.

    Args:
        found: from :func:`cria_tricks.kwanzaa.summary.summarise`.
    """
    systems = found["systems"]
    names = list(systems)
    first = systems[names[0]]
    contract = "violations" in first
    with_what = [
        f"{key} {found[key]}" for key in ("base", "quantization", "dtype", "device", "max_new_tokens") if found.get(key)
    ]
    versions = [f"{name} {version}" for name, version in found.get("versions", {}).items()]
    lines = [
        "# Evaluation",
        "",
        f"{found['rows']} of {found['rows_in_data']} rows of {found['data']}.",
        *([f"Adapter: {found['adapter']}; {', '.join(with_what)}."] if "adapter" in found else []),
        *([f"Versions: {', '.join(versions)}."] if versions else []),
        "",
        "## Scores",
        "",
        "Mean over the rows; in brackets the middle 95 % of 10,000 bootstrap draws of the rows.",
        "",
        *_table(*scores_table(found)),
        *(
            ["Definitions and blind spots stand in `cria_tricks/kwanzaa/scores.py`.", ""]
            if contract
            else [UNSCORED, ""]
        ),
        f"The loss is on whole rows, and it is not quite the training report's where that cut some. {_texts(found)}"
        "Loss and perplexity: the lower the better.",
        "",
        "## Counts",
        "",
        *_table(
            ["what", *names],
            *(
                [label, *(_count(systems[name][key]) for name in names)]
                for key, label in _COUNTS.items()
                if key in first
            ),
        ),
        *(_broken_and_refused(systems) if contract else []),
        f"## {len(found['examples'])} examples",
        "",
    ]
    for example in found["examples"]:
        lines += _example(example)
    return "\n".join(lines)


def _texts(found: Mapping[str, Any]) -> str:
    length = found.get("text_length")
    return f"A text is not answered; for its loss it is cut into rows of {length:,} tokens. " if length else ""


def _broken_and_refused(systems: Mapping[str, Any]) -> list[str]:
    kinds = dict.fromkeys(kind for system in systems.values() for kind in system["violations"])
    return [
        "## Violations of the contract",
        "",
        *_table(
            ["share of rows with", *systems],
            *([kind, *(f"{system['violations'].get(kind, 0):.2f}" for system in systems.values())] for kind in kinds),
        ),
        "## Refusals",
        "",
        *_table(
            ["rows", *systems],
            *(
                [label, *(str(system["confusion"][key]) for system in systems.values())]
                for key, label in _CASES.items()
            ),
        ),
    ]


def scores_table(found: Mapping[str, Any]) -> list[list[str]]:
    """The scores with their intervals, a column for each system, and their difference; the first row is the head."""
    systems, differences = found["systems"], found["differences"]
    shown = [key for key in NAMES if any(key in system for system in systems.values())]
    return [
        ["score", *systems, *(["adapter minus base"] if differences else [])],
        *(
            [
                NAMES[key],
                *(_value(system.get(key)) for system in systems.values()),
                *([_value(differences[key], "+")] if differences else []),
            ]
            for key in shown
        ),
    ]


def _example(example: Mapping[str, Any]) -> list[str]:
    documents = [f"[{number}] {title}" for number, title in enumerate(example["documents"], 1)]
    texts = {"reference": (example["reference"], "")}
    for name, system in example["systems"].items():
        scores = ", ".join(f"{scorer} {value:.2f}" for scorer, value in system["scores"].items())
        said = f" ({scores}{'' if system['read'] else '; no JSON could be read'})" if scores else ""
        texts[name] = (system["text"], said)
    scored = any(system["scores"] for system in example["systems"].values())
    return [
        f"### {''.join(example['query'].strip().splitlines()[:1]) or '(nothing is asked)'}",
        "",
        f"{example['row']}." + f" Documents: {'; '.join(documents) or 'none'}" * scored,
        "",
        *(line for name, (text, scores) in texts.items() for line in (f"**{name}**{scores}", "", *_quoted(text), "")),
    ]


def _quoted(text: str) -> list[str]:
    cut = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    return [f"> {line}".rstrip() for line in cut.splitlines() or ["(no text)"]]


def _table(*rows: Sequence[str]) -> list[str]:
    columns, *lines = [[cell(text) for text in row] for row in rows]
    return [*markdown_table(columns, lines), ""]


def _value(found: Mapping[str, float] | None, sign: str = "") -> str:
    return " ".join(
        [f"{found['value']:{sign}.3f}", f"[{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"] if found else []
    )


def _count(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
