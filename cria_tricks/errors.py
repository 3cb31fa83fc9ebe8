"""The errors a user can meet. Everything else that raises is a bug of ours."""


class BadInput(ValueError):
    """The input is wrong: one line that says what, where, and what would be right. Exit code 2."""


class Diverged(RuntimeError):
    """The loss or the gradients stopped being finite; no adapter was written. Exit code 1."""


class Interrupted(RuntimeError):
    """The user stopped the run and its state was saved. Exit code 130."""
