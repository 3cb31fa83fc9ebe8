"""The Kwanzaa run of a reader without a GPU: SmolLM2 on ``history_notes``, then its answers beside the base's.

    python -m benchmarks.curated                         # trains and answers: an hour or two on two cores
    python -m benchmarks.curated --recipe kwanzaa_small  # the 107 real rows, for comparison

An adapter is evaluated as it was trained. One that was trained without the answer contract in its prompts (as
``kwanzaa_small`` is) is evaluated a second time with it, for comparison: ``kwanzaa with the contract``.

The run lies in ``build/RECIPE``, and the same command goes on after a stop. Answers to our own held-out rows are
written down; of the 27 real rows only the scores are, because their text is not ours to ship. Writes
``benchmarks/results/DEVICE/RECIPE.json``.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import write
from cria_tricks.bench.case import stamp
from cria_tricks.kwanzaa.evaluate import Settings, evaluate
from cria_tricks.recipe import Recipe
from cria_tricks.recipes import get
from cria_tricks.run.train import train

LONGEST = {"history_notes": 512, "kwanzaa": 1024}
"""The longest answer [tokens], by data set."""
OURS = "history_notes"
SHOWN = 10
"""The number of rows whose answers are written down."""


def scores(found: dict[str, Any]) -> dict[str, Any]:
    """Return what an evaluation found, without the text of any row."""
    return {key: found[key] for key in ("data", "rows", "systems", "kinds", "differences")}


def answered(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return some rows of an evaluation of our own rows, evenly spread: question, documents, and all answers."""
    rows = found["answers"]
    chosen = sorted({round(number * (len(rows) - 1) / (SHOWN - 1)) for number in range(SHOWN)})
    shown = []
    for example in [rows[number] for number in chosen]:
        answers = {name: system["text"] for name, system in example["systems"].items()}
        shown.append({"question": example["query"], "documents": example["documents"], **answers})
    return shown


def asked(recipe: Recipe, data: Iterable[str]) -> Iterator[tuple[str, str, bool | None]]:
    """Yield what is evaluated: its name in the result, the data set, and ``Settings.contract``."""
    for name in data:
        yield name, name, None  # as the adapter was trained
        if not recipe.data.contract:
            yield f"{name} with the contract", name, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="kwanzaa_curated_small", help="a recipe's name")
    parser.add_argument("--data", action="append", choices=LONGEST, help="rows to answer; both when left out")
    parser.add_argument("--results", type=Path, help="the folder of the result")
    chosen = parser.parse_args()
    recipe = get(chosen.recipe)
    folder = Path("build") / recipe.name
    report = train(recipe, folder, resume=True)
    keys = ("steps", "seconds", "tokens_per_second", "peak_bytes", "estimated_peak_bytes", "history", "parameters")
    result: dict[str, Any] = {**stamp(recipe), "run": {key: report[key] for key in keys}, "evaluations": {}}
    for name, data, contract in asked(recipe, chosen.data or LONGEST):
        settings = Settings(max_new_tokens=LONGEST[data], contract=contract)
        out = folder / f"eval-{name.replace(' ', '-')}"
        found = evaluate(report["adapter"], data, base=True, reference=True, trivial=True, out=out, settings=settings)
        result["evaluations"][name] = scores(found)
        if name == OURS:
            result["answers"] = answered(found)
    print(write(recipe.name, result, chosen.results))


if __name__ == "__main__":
    main()
