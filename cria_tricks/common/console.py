"""Print sentences for the user on standard error, as plain text, without ever stopping the work."""

from rich.console import Console


class Aside(Console):
    """Standard error. Brackets in a path are no markup, and a reader who left (``| tee``, Ctrl-C) stops nothing."""

    def __init__(self) -> None:
        super().__init__(stderr=True, soft_wrap=True, markup=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Go on in silence; rich would end the process, and with it the save that is to come."""
        self.quiet = True

    def _check_buffer(self) -> None:
        """Do the same for a terminal that is gone (EIO), or a log on a full disk; rich knows broken pipes alone."""
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()


class Voice:
    """Print sentences on a console; a copy that is sent to another process stays silent.

    Args:
        console: where; nowhere when left out.
    """

    def __init__(self, console: Console | None = None):
        self.console = console

    def __call__(self, sentence: str) -> None:
        if self.console:
            self.console.print(sentence)

    def __reduce__(self):
        return Voice, ()
