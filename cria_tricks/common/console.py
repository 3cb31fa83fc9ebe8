"""Print sentences for the user on standard error, as plain text, without ever stopping the work."""

from rich.console import Console


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
