"""Show progress bars with counts, times and a note."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


def new_bar(console: Console) -> Progress:
    """Make a bar with counts, times, and a ``note`` at its end. Without a terminal it shows nothing.

    Each task must set the field ``note``: ``bar.add_task("reading", total=None, note="")``.
    """
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def counted(rows: Iterable[T], what: str, console: Console) -> Iterator[Iterator[T]]:
    """Show how many rows have been read so far, and print a plain line before and after.

    Args:
        rows: the rows. How many there will be is not known, so the bar has no total.
        what: what they are read for; the lines begin with it.
        console: where to show it.

    Yields:
        An iterator over the rows, which counts them.
    """
    number = 0
    bar = new_bar(console)

    def each() -> Iterator[T]:
        nonlocal number
        for number, row in enumerate(rows, 1):
            yield row
            if number % 1000 == 0:
                bar.update(task, completed=number, note=f"{number:,} rows")

    console.print(f"{what}: all rows are read once")
    # A disabled bar is not entered: when it ends, some versions of rich print an empty line.
    with contextlib.nullcontext() if bar.disable else bar:
        task = bar.add_task("reading", total=None, note="")
        yield each()
    console.print(f"{what}: {number:,} rows read")
