"""Draw a reader's own benchmark run beside the committed ones, in the figures and tables that any cases can fill."""

from pathlib import Path

from cria_tricks.bench import figures, results, style, tables
from cria_tricks.bench.results import Case
from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput


def report(file: Path, out: Path, committed: Path = results.COMMITTED) -> list[Case]:
    """Draw a reader's cases beside the committed ones, and write the figures and ``report.md``.

    Args:
        file: what ``pytest --benchmark-only --benchmark-json FILE`` wrote.
        out: the folder to write.
        committed: folder of the project's own results. If there are none, only the reader's cases are drawn.

    Returns:
        The reader's cases.

    Raises:
        BadInput: if the file cannot be read, holds no cases or a wrong one, or ``out`` is no folder.
        Unwritten: if the results cannot be written.
    """
    mine = results.read_benchmark_json(file)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    # Cases are grouped by device. The reader's may have the name of a committed one, so it gets a name of its own.
    named = [case.model_copy(update={"device": f"{case.device} (yours)"}) for case in mine]
    cases = [*results.read(committed), *named]
    # Peaks that dry runs counted while one size grows: the growth figures and tables show them beside measured cases.
    counted = (results.study("growth", committed) or {"cases": {}})["cases"]
    drawings = figures.of_cases(cases, counted)
    # If Ctrl-C stops the program from here on, it prints this sentence.
    interrupts.now_saved(f"{out} may hold a part of the files; the same command writes all of them")
    for name, drawing in drawings.items():
        for theme in style.THEMES:
            atomic_files.write_file(out / f"{name}-{theme}.svg", style.save(drawing, theme))
    text = ["# Your run beside the committed ones"]
    text += [style.picture(name, style.SAYS[name]) for name in drawings]
    for name, block in tables.of_cases(cases, counted).items():
        text += [f"## {tables.TITLES[name]}", block]
    atomic_files.write_file(out / "report.md", "\n\n".join(text) + "\n")
    return mine
