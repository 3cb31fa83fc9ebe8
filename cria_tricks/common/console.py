"""Print answers on standard output, wrapped on a terminal only, and sentences on standard error."""

import contextlib
import os
from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000
"""The width of output that no terminal shows [columns]."""


class Screen(Console):
    """A console for answers: as wide as the terminal or ``$COLUMNS``; without either, as wide as the answer needs.

    So a pipe, a file and a notebook get whole lines. rich itself would wrap them: a pipe or a file at the width of the
    terminal from which the command was started, or at 80 columns without one; a notebook at 115.
    """

    @property
    def size(self) -> ConsoleDimensions:
        """The width and the height in columns and lines; rich takes the width from here."""
        found = super().size
        columns = os.environ.get("COLUMNS", "")
        if columns.isdigit():  # if it is set when the console is made, rich keeps that value; we read it each time
            return ConsoleDimensions(int(columns), found.height)
        if self.is_terminal:
            return found
        return ConsoleDimensions(UNLIMITED, found.height)

    @size.setter  # overriding a property drops its setter, so this repeats rich's
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def wrapped(self, *parts: object) -> None:
        """Print tables and sentences so that they fit the width; brackets are rich's markup, such as [red]."""
        for part in parts:
            self.print(part, highlight=False, soft_wrap=False)


def table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    """Make a table without vertical lines. A text that is too wide for its column is wrapped and never cut.

    Args:
        columns: the heads of the columns; with none of them the table has no head.
        numbers: the columns that hold numbers; they are right-aligned and never wrapped. On a terminal narrower
            than all numbers side by side, they are cut.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for column in columns:
        right = column in numbers
        made.add_column(column, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return made


def doing(console: Console, what: str) -> contextlib.AbstractContextManager[object]:
    """Show what takes its time, with a spinner, while the block runs; only a terminal shows it.

    Args:
        console: a console on standard error.
        what: e.g. ``"loading NAME"``.
    """
    if console.is_terminal and not console.quiet:
        return console.status(Text(what))  # Text, because a name may hold brackets
    return contextlib.nullcontext()


class Aside(Console):
    """A console on standard error that prints brackets as they are, and whose errors never stop the run.

    Writing fails if nobody reads any more, for example when ``| tee`` has ended or the terminal was closed.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True, soft_wrap=True, markup=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Print nothing from now on. rich would end the process here, before the run is saved."""
        self.quiet = True

    def _check_buffer(self) -> None:
        """Write the buffer as rich does; print nothing from now on if that fails with any ``OSError``.

        Such an error comes from a closed terminal (EIO) or a full disk. rich itself catches only a broken pipe.
        """
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()


class Voice:
    """Print sentences on a console; a pickled copy in another process prints nothing.

    Rank 0 broadcasts objects that hold a Voice, and a console cannot be pickled. So the copies have no console.

    Args:
        console: where to print; without one, nothing is printed.
    """

    def __init__(self, console: Console | None = None):
        self.console = console

    def __call__(self, sentence: str) -> None:
        if self.console:
            self.console.print(sentence)

    def __reduce__(self):
        # Pickle it as a Voice without a console.
        return Voice, ()
