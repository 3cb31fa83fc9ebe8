"""A progress bar with counts, times and a note."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


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
