"""The committed Kwanzaa runs on a CPU as tables and as answers to read; measures nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.common.markdown_table import table
from cria_tricks.data.samples import answer_line
from cria_tricks.kwanzaa.summary import NAMES

SYSTEMS = {
    "base": "the base alone",
    "adapter": "with the adapter",
    "trivial": "an answer without a model",
    "reference": "the data's own answers",
}
SHOWN = 3
"""Answers that the page "Did it learn?" shows."""
ON_HOME = "Which state did Harriet Tubman escape from?"
"""The question that the home page shows, because all about it is short."""
WIDTH = 240
"""The length at which an answer is cut (characters)."""


def scores(study: Mapping[str, Any], data: str) -> str:
    """Write the scores of an evaluation, over all rows and by their kind, each with its 95 % interval."""
    found = study["evaluations"][data]
    systems = [system for system in SYSTEMS if system in found["systems"]]
    rows = _score_rows("all", found, systems)
    cut_off = [found["systems"][system]["cut_off"] for system in systems]
    counts = ["" if count is None else f"{count} of {found['rows']}" for count in cut_off]
    rows.append([f"all, {found['rows']}", "answers cut off at the token limit", *counts])
    for kind, about in found["kinds"].items():
        rows += _score_rows(kind, about, systems)
    return table(["rows", "score", *(SYSTEMS[system] for system in systems)], rows)


def answers(study: Mapping[str, Any]) -> str:
    """Write some questions, spread over the rows, with the answers of base and adapter."""
    lines = []
    for example in chosen(study["answers"]):
        lines += [f"**{example['question']}**", ""]
        lines += [f"- {SYSTEMS[system]}: {answer_line(example[system], WIDTH)}" for system in ("base", "adapter")]
        lines += [""]
    return "\n".join(lines).rstrip()


def answer_on_home(study: Mapping[str, Any]) -> str:
    """Write the question of the home page with its documents, and the answers before and after training."""
    (example,) = [one for one in study["answers"] if one["question"] == ON_HOME]
    documents = [f"> [{number}] {text}" for number, text in enumerate(example["documents"], 1)]
    said = [answer_line(example[system], WIDTH) for system in ("base", "adapter")]
    quoted = "\n>\n".join([f"> **{example['question']}**", *documents])
    after = f"after {study['run']['seconds'] / 60:.0f} minutes of training"
    return f"{quoted}\n\n{table(['before training', after], [said])}"


def chosen(examples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Choose examples that are spread over the rows, so that the last ones, refusals, are among them."""
    step = max(1, (len(examples) - 1) // (SHOWN - 1))
    return list(examples[::step][:SHOWN])


def _score_rows(group: str, about: Mapping[str, Any], systems: Sequence[str]) -> list[list[str]]:
    rows = []
    for score, name in NAMES.items():
        if score in about["systems"]["adapter"] and score != "perplexity":
            values = [_value(about["systems"][system].get(score)) for system in systems]
            rows.append([f"{group}, {about['rows']}", name, *values])
    return rows


def _value(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
