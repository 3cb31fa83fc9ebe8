"""Count what makes a lesson long or hard to read: ``python -m tools.lesson_figures [LESSON ...] [--private]``.

The *path* through a lesson is what a first reading takes: all but folded code, form cells that take a guess, and the
parts that are tagged as deep.
"""

import argparse
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from cria_tricks.common.markdown_table import table
from tools import notebooks

PER_MINUTE = 180
"""Words of a lesson, code included, that a reader takes in [words a minute]."""
PER_EXERCISE = 2
"""Time for an exercise [minutes]."""
EXERCISES = 3

PRIVATE = {
    "roots (memory that is never freed)": r"\broots?\b(?! of| mean)",
    "dice (random state)": r"\bdice\b",
    "sieve (filter)": r"\bsieves?\b",
    "tally (counter)": r"\btall(?:y|ies)\b",
    "survey (profile)": r"\bsurveys?\b",
    "lane (rank)": r"\blanes?\b",
    "rounds (launches)": r"\brounds of\b",
    "waits (is kept, is saved)": r"\bwait(?:s|ing)? (?:for the backward|until the backward|in (?:the )?blocks?)|"
    r"\b(?:KiB|MiB|GiB|bytes) (?:would )?wait\b|\bwhat waits\b|\bwaiting (?:gradient|states?)\b",
    "what blocks keep (saved activations)": r"what (?:a |the )?blocks? keeps?\b",
    "pinned input (kept by bitsandbytes)": r"\bpinned inputs?\b",
    "what cannot stay": r"what cannot stay",
    "rung (step of the ladder)": r"\brungs?\b",
    "staircase": r"\bstaircases?\b",
    "the say (share, weight)": r"\bthe say\b|\ba say\b|\bless of a say\b",
    "toggle (switch)": r"(?<!--)\btoggles?\b",
    "row (line of the bill)": r"\brows? of (?:a|the|that|this) bill\b|\bbill's rows?\b|\bthe rows? \*",
    "beside (next to; as well as)": r"\bbeside\b",
    "who ... does": r"(?:^|[.!?:] )Who(?:ever)? \w+",
    "one (a person)": r"(?:^|[.!?:] )One (?:can|may|must|should|has|gets|sees|needs)\b",
    "all the same; besides": r"\ball the same\b|\bbesides\b(?!=)",
    "reckoning (estimate)": r"\breckon",
}
"""Words of our own, or of another time, that a reader cannot look up, and patterns that find them in prose."""


@dataclass(frozen=True)
class Figures:
    """What is counted in one lesson.

    Attributes:
        cells: of the path.
        lines: of code in the path that are not blank.
        words: of prose in the path, before "In one breath".
        deep_words: of prose in the folded parts.
        short: the share of sentences with fewer than eight words.
        private: how often each private word occurs, in all of the lesson's prose.
        minutes: that the path takes: words of prose and code / 180, a minute for the cells, two for each exercise.
    """

    cells: int
    lines: int
    words: int
    deep_words: int
    short: float
    private: Counter[str]
    minutes: int


def figures(lesson: Path) -> Figures:
    """Count one lesson."""
    cells = jupytext.read(lesson, fmt="py:percent").cells
    path = [cell for cell in cells if not set(_tags(cell)) & {notebooks.DEEP, notebooks.FOLDED, notebooks.PREDICT}]
    code = [line for cell in path if cell.cell_type == "code" for line in cell.source.splitlines() if line.strip()]
    text = _prose(path)
    whole = _prose(cells)
    before = text.partition("## In one breath")[0]
    words = len(before.split())
    sentences = _sentences(whole)
    read = words + sum(len(re.findall(r"\w+", line)) for line in code)
    return Figures(
        cells=len(path),
        lines=len(code),
        words=words,
        deep_words=len(_prose([cell for cell in cells if notebooks.DEEP in _tags(cell)]).split()),
        short=sum(len(sentence.split()) < 8 for sentence in sentences) / len(sentences),
        private=Counter({name: len(re.findall(pattern, whole, re.I | re.M)) for name, pattern in PRIVATE.items()}),
        minutes=5 * math.ceil((read / PER_MINUTE + 1 + PER_EXERCISE * EXERCISES) / 5),
    )


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _prose(cells: list[NotebookNode]) -> str:
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def _sentences(text: str) -> list[str]:
    """The sentences of a text, without code, tables, headings and formulas."""
    for pattern, instead in (
        (r"```.*?```", ""), (r"^\|.*$", ""), (r"^#+ .*$", ""), (r"\$\$.*?\$\$|\$[^$]*\$", "x"),
        (r"\[([^\]]*)\]\([^)]*\)", r"\1"), (r"<[^>]+>", ""), (r"[*_`>]", ""), (r"\s+", " "),
    ):  # fmt: skip
        text = re.sub(pattern, instead, text, flags=re.M if pattern.startswith("^") else re.S)
    return [sentence for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9(])", text) if sentence.strip()]


def main() -> None:
    """Print a table of all lessons, or of those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lesson", nargs="*", help="the name of a lesson, such as nf4")
    parser.add_argument("--private", action="store_true", help="also name each private word that is left")
    chosen = parser.parse_args()
    rows = []
    for path in notebooks.lessons():
        if not path.exists() or (chosen.lesson and path.stem not in chosen.lesson):
            continue
        found = figures(path)
        numbers = (found.cells, found.lines, found.words, found.deep_words)
        left = sum(found.private.values())
        rows.append((path.stem, *map(str, numbers), f"{found.short:.0%}", str(left), str(found.minutes)))
        if chosen.private:
            for name, times in found.private.items():
                if times:
                    print(f"{path.stem}: {name}, {times} times")
    print(table(("lesson", "cells", "lines", "words", "deep words", "short sentences", "private words", "min"), rows))


if __name__ == "__main__":
    main()
