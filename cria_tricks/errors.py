"""The errors a user can meet. Everything else that raises is a bug of ours."""

from pathlib import Path


class BadInput(ValueError):
    """The input is wrong: one line that says what, where, and what would be right. Exit code 2."""


class Unwritten(BadInput):
    """A file or folder could not be written; what was saved before it is whole. Exit code 2.

    Args:
        path: what could not be written.
        reason: why, in the system's words.
    """

    def __init__(self, path: Path, reason: str):
        super().__init__(
            f"{path}: cannot be written: {reason}; what was saved before is whole: make room, then go on with --resume"
        )


class Diverged(RuntimeError):
    """The loss or the gradients stopped being finite; no adapter was written. Exit code 1."""


class OutOfMemory(RuntimeError):
    """The run does not fit; its state was saved where that was possible. Exit code 3."""


class Interrupted(RuntimeError):
    """The user, or the system, stopped the run and its state was saved. Exit code 130."""


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the card, bitsandbytes' managed memory or the machine had no bytes left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; it is not imported here
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
