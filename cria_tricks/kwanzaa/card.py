"""Write what ``cria eval`` found into an adapter's model card: a verdict, the table of scores, and metadata."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.model_card import NOT_SCORED, USE
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.kwanzaa.evaluate import fingerprint
from cria_tricks.kwanzaa.scores import SCORERS
from cria_tricks.kwanzaa.summary import NAMES, table_lines

BEGIN, END = "<!-- scores -->", "<!-- end of scores -->"
"""The lines around the scores in a card; what stands between them is replaced."""


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
    path = place / "eval.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        scored = "adapter" in found["systems"]
    except (OSError, ValueError, KeyError, TypeError):
        scored = False
    if not scored:
        raise BadInput(f"{path}: is no evaluation of an adapter; make one: cria eval {adapter} --with-base")
    if found.get("adapter_sha256") != fingerprint(adapter):
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
        section += [verdict(found), "", *table_lines(found), ""]
        for key, name in NAMES.items():
            value = found["systems"]["adapter"].get(key)
            if value:
                result = EvalResult(
                    task_type="text-generation",
                    dataset_type=found["data"],  # results of one type are put together, whatever their name
                    dataset_name=found["data"],
                    metric_type=key,
                    metric_name=name,
                    metric_value=round(value["value"], 4),
                    metric_args={"low": round(value["low"], 4), "high": round(value["high"], 4), "rows": found["rows"]},
                )
                results.append(result)
    begin, _, scored = card.replace(NOT_SCORED, "").partition(BEGIN)
    rest = scored.partition(END)[2].lstrip("\n")
    if not scored:  # the scores belong before the section on use, or at the end
        begin, title, rest = begin.partition(USE)
        rest = title + rest
    text = "\n\n".join([begin.rstrip(), "\n".join([*section, END]), rest])
    made = ModelCard(text, ignore_metadata_errors=True)
    about: Any = made.data  # the library's class takes these two as attributes, and does not declare them
    headings = [line.removeprefix("# ") for line in card.splitlines() if line.startswith("# ")]
    about.model_name = headings[0] if headings else "adapter"
    about.eval_results = results
    return f"---\n{about.to_yaml()}\n---\n{made.text}"


def verdict(found: Mapping[str, Any]) -> str:
    """Say in one sentence what the adapter does better than its base, beyond chance, on the rows of an evaluation.

    A difference counts if its 95 % interval does not hold zero. Rows without scores are compared by their loss.
    """
    on = f"On {found['rows']} rows ({found['data']})"
    differences = found["differences"]
    if not differences:
        return f"{on} the adapter was scored without its base, so what it has learnt is not told."
    better: list[str] = []
    worse: list[str] = []
    alike: list[str] = []
    for key in [key for key in SCORERS if key in differences] or ["loss"]:
        low, high = differences[key]["low"], differences[key]["high"]
        is_score = key in SCORERS
        name = NAMES[key] if is_score else "loss"
        if low <= 0 <= high:
            alike.append(name)
        elif (low > 0) == is_score:  # a higher score is better, and a lower loss
            better.append(name)
        else:
            worse.append(name)
    words = {
        "is better than its base": better,
        "is worse than its base": worse,
        "shows no difference from its base beyond chance": alike,
    }
    said = [f"{compared} in {', '.join(names)}" for compared, names in words.items() if names]
    return f"{on} the adapter {'; it '.join(said)}."
