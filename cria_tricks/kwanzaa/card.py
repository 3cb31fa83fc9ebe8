"""Write what ``cria eval`` found into an adapter's model card: a verdict, the scores by kind of row, and metadata."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.model_card import NOT_SCORED
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.kwanzaa.page import NAMES, groups_table, scores_table, table_lines
from cria_tricks.kwanzaa.scores import SCORERS

BEGIN, END = "<!-- scores -->", "<!-- end of scores -->"
"""The lines around the scores in a card; what stands between them is replaced."""
BETTER = "is better than its base"
WORSE = "is worse than its base"
ALIKE = "shows no difference from its base beyond chance"
"""What a verdict says of a score; the last, where the interval of the difference holds zero."""
BEFORE = "## On a GPU"
"""The section of the card that follows the scores."""


def write_scores(adapter: str | Path, evaluations: Sequence[str | Path] = ()) -> str:
    """Write the scores of evaluations into the adapter's README.md, and its manifest anew.

    Args:
        adapter: the adapter's folder.
        evaluations: folders that ``cria eval`` wrote; ``eval`` beside the adapter when empty.

    Returns:
        The verdict, one sentence for each evaluation.

    Raises:
        BadInput: if a folder is damaged, holds no evaluation, or one of another adapter.
    """
    folder = usable_path("adapter", adapter)
    artifact.refuse_another(folder, atomic_files.MANIFEST)
    artifact.refuse_damaged(folder)
    found = [_read(usable_path("--eval", each), folder) for each in evaluations or [folder.absolute().parent / "eval"]]
    readme = folder / "README.md"
    if not readme.is_file():
        raise BadInput(f"{folder}: holds no README.md, so there is no card to write into")
    card = scored_card(readme.read_text(encoding="utf-8"), found)
    with atomic_files.new_folder(folder) as made:
        shutil.copytree(folder, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns(atomic_files.MANIFEST))
        (made / "README.md").write_text(card, encoding="utf-8")
    return "\n".join(map(verdict, found))


def _read(place: Path, adapter: Path) -> dict[str, Any]:
    """Read an evaluation, and refuse one of another adapter."""
    # Imported here, because it imports torch.
    from cria_tricks.kwanzaa.generate import fingerprint

    path = place / "eval.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        header = json.loads((place / "answers-adapter.jsonl").read_text(encoding="utf-8").partition("\n")[0])
        scored = "adapter" in found["systems"]
    except (OSError, ValueError, KeyError, TypeError):
        scored = False
    if not scored:
        raise BadInput(f"{path}: is no evaluation of an adapter; make one: cria eval {adapter} --with-base")
    if header.get("adapter") != fingerprint(adapter):
        raise BadInput(f"{path}: is of another adapter than {adapter}; evaluate this one: cria eval {adapter}")
    return found


def scored_card(card: str, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return the card with the scores of evaluations in its text and in its metadata.

    Args:
        card: the text of README.md, with or without scores.
        evaluations: the content of each ``eval.json``.
    """
    # Slow to import.
    from huggingface_hub import EvalResult, ModelCard

    section = [BEGIN, "## Scores", ""]
    results = []
    for found in evaluations:
        section += [verdict(found), "", *table_lines(scores_table(found)), ""]
        section += [*table_lines(groups_table("rows whose answer is", found["kinds"])), ""]
        for key, value in _values(found).items():
            result = EvalResult(
                task_type="text-generation",
                dataset_type=found["data"],  # results of one type are put together, whatever their name
                dataset_name=found["data"],
                metric_type=key,
                metric_name=NAMES[key],
                metric_value=round(value["value"], 4),
                metric_args={"low": round(value["low"], 4), "high": round(value["high"], 4), "rows": found["rows"]},
            )
            results.append(result)
    section.append(END)
    begin, _, rest = card.replace(NOT_SCORED, "").partition(BEGIN)
    if rest:
        rest = rest.partition(END)[2].lstrip("\n")
    else:
        begin, rest = _halves(begin)
    made = ModelCard(begin.rstrip() + "\n\n" + "\n".join(section) + "\n\n" + rest, ignore_metadata_errors=True)
    about: Any = made.data  # the library's class takes these two as attributes, and does not declare them
    about.model_name = _title(card)
    about.eval_results = results
    return f"---\n{about.to_yaml()}\n---\n{made.text}"


def verdict(found: Mapping[str, Any]) -> str:
    """Say in one sentence what the adapter does better than its base, beyond chance, on the rows of an evaluation.

    A difference counts if its 95 % interval does not hold zero.
    """
    on = f"On {found['rows']} rows ({found['data']})"
    differences = found["differences"]
    if not differences:
        return f"{on} the adapter was scored without its base, so what it has learnt is not told."
    words: dict[str, list[str]] = {BETTER: [], WORSE: [], ALIKE: []}
    for key in SCORERS:
        if key in differences:
            words[_compared(differences[key])].append(NAMES[key])
    if not any(words.values()):
        words[_compared(differences["loss"], lower_is_better=True)].append("loss")
    said = [f"{compared} in {', '.join(names)}" for compared, names in words.items() if names]
    return f"{on} the adapter {'; it '.join(said)}."


def _compared(difference: Mapping[str, float], lower_is_better: bool = False) -> str:
    low, high = difference["low"], difference["high"]
    if lower_is_better:
        low, high = -high, -low
    if low > 0:
        return BETTER
    return WORSE if high < 0 else ALIKE


def _values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter's scores and losses, each with its interval."""
    adapter = found["systems"]["adapter"]
    return {key: adapter[key] for key in NAMES if adapter.get(key)}


def _halves(card: str) -> tuple[str, str]:
    """Split a card without scores where they belong: before its section on the GPU, or at its end."""
    begin, title, rest = card.partition(BEFORE)
    return begin, title + rest


def _title(card: str) -> str:
    """Return the first heading of a card."""
    return next((line.removeprefix("# ") for line in card.splitlines() if line.startswith("# ")), "adapter")
