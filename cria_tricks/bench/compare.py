"""Draw a reader's own results beside the committed ones, in the figures and tables that any cases can fill."""

from collections.abc import Sequence
from pathlib import Path

from cria_tricks.bench import card_tables, figures, own_results, results, style, tables
from cria_tricks.bench.measured_card import MeasuredCard
from cria_tricks.bench.own_results import Own
from cria_tricks.bench.results import Case
from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput


def report(files: Sequence[Path], out: Path, committed: Path = results.COMMITTED) -> list[Case]:
    """Draw a reader's results beside the committed ones, and write the figures and ``report.md``.

    Args:
        files: what ``pytest --benchmark-only --benchmark-json FILE`` or ``cria bench`` wrote, or reports of runs.
        out: the folder to write.
        committed: folder of the project's own results. If there are none, only the reader's cases are drawn.

    Returns:
        The reader's cases.

    Raises:
        BadInput: if a file cannot be read, holds no cases or a wrong one, or ``out`` is no folder.
        Unwritten: if the results cannot be written.
    """
    mine = [own_results.read(file) for file in files]
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    named = _named(mine)
    cases = [*results.read(committed), *named]
    # Peaks that dry runs counted while one size grows: the growth figures and tables show them beside measured cases.
    counted = (results.study("growth", committed) or {"cases": {}})["cases"]
    drawings = figures.of_cases(cases, counted)
    # If Ctrl-C stops the program from here on, it prints this sentence.
    interrupts.now_saved(f"{out} may hold a part of the files; the same command writes all of them")
    for name, drawing in drawings.items():
        for theme in style.THEMES:
            atomic_files.write_file(out / f"{name}-{theme}.svg", style.save(drawing, theme))
    text = ["# Your results beside the committed ones"]
    text += [style.picture(name, style.SAYS[name]) for name in drawings]
    text += _cards([own.card for own in mine if own.card], card_tables.committed(committed))
    for name, block in tables.of_cases(cases, counted).items():
        text += [f"## {tables.TITLES[name]}", block]
    atomic_files.write_file(out / "report.md", "\n\n".join(text) + "\n")
    return [case for own in mine for case in own.cases]


def _named(mine: Sequence[Own]) -> list[Case]:
    """Give the reader's devices names of their own: cases are grouped by device, and committed ones may be the same."""
    found: list[Case] = []
    for own, label in zip(mine, own_results.labels([own.file for own in mine]), strict=True):
        found += [case.model_copy(update={"device": f"{case.device} ({label})"}) for case in own.cases]
    return found


def _cards(mine: Sequence[MeasuredCard], committed: Sequence[MeasuredCard]) -> list[str]:
    """Lay out measured cards: a line for each, the reader's first, and then the reader's in full."""
    if not mine:
        return []
    text = ["## Measured cards, yours first", card_tables.summary([*mine, *committed])]
    for card in mine:
        text += [f"## {card.device.name}: predicted and measured", card_tables.page(card)]
    return text
