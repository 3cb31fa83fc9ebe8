"""The errors a user can meet. Everything else that raises is a bug of ours."""

import errno
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

# bitsandbytes tells every user of a CPU with 16-bit products about a package that nothing here needs. This module is
# imported before bitsandbytes is, whatever of ours is used.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_TOKEN")
"""Variables that hold a token of the hub."""


class BadInput(ValueError):
    """The input is wrong: one line that says what, where, and what would be right. Exit code 2.

    Args:
        line: what to say. Of a word longer than 300 letters, a user's that is quoted, the middle is left out.
    """

    def __init__(self, line: str):
        super().__init__(re.sub(r"(\S{200})\S{60,}(\S{40})", r"\1...\2", redacted(line)))


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What the system says when there is no room."""


class Unwritten(BadInput):
    """A file or folder could not be written; what was saved before it is whole. Exit code 2.

    Args:
        path: what could not be written.
        reason: why, in the system's words.
        number: the system's number for the reason, if there is one; it decides what is advised.
    """

    def __init__(self, path: Path, reason: str, number: int | None = errno.ENOSPC):
        self.reason = f"{path}: cannot be written: {reason}"
        cure = "make room" if number in _FULL else "mend that"
        super().__init__(f"{self.reason}; {WHOLE}: {cure}, then {AGAIN}")


WHOLE = "what was saved before is whole"
AGAIN = "run the command again (a training run: with --resume)"


class Unfinished(RuntimeError):
    """Something unforeseen stopped a result from being written; what was saved before it is whole. Exit code 1.

    Args:
        path: what could not be written.
        error: why.
    """

    def __init__(self, path: Path, error: BaseException):
        said = redacted(f"{type(error).__name__}: {first_line(error)}")
        super().__init__(f"{path}: cannot be written: {said}; {WHOLE}: {AGAIN}")


class Diverged(RuntimeError):
    """The loss or the gradients stopped being finite; no adapter was written. Exit code 1."""


class OutOfMemory(RuntimeError):
    """The run does not fit; its state was saved where that was possible. Exit code 3."""


class Lost(RuntimeError):
    """Another process of the run died or stopped answering; what was saved is whole. Exit code 1."""


class JobFailed(RuntimeError):
    """A job on a rented machine was not taken, or did not end well. Exit code 1."""


class Interrupted(RuntimeError):
    """The user, or the system, stopped the run and its state was saved. Exit code 130."""


FORESEEN = (BadInput, Unfinished, Diverged, OutOfMemory, Lost, JobFailed, Interrupted)
"""Errors that are one sentence already."""


def redacted(text: str) -> str:
    """Hide secrets in a text: tokens of the hub, by their looks or from the environment, and a URL's part before its @.

    Every error passes through here, and so does what a library printed into it.

    Examples:
        >>> redacted("https://me:secret@example.org/x")
        'https://[hidden]@example.org/x'
    """
    for name in _SECRETS:
        secret = os.environ.get(name, "").strip()
        if len(secret) >= 8:  # a shorter word is nobody's token, and too common to cut out
            text = text.replace(secret, "[hidden]")
    text = re.sub(r"\bhf_[A-Za-z0-9]{20,}", "[hidden]", text)
    return re.sub(r"(?<=://)[^/\s@]+(?=@)", "[hidden]", text)


def usable_path(option: str, text: str | Path) -> Path:
    """Check that the system can take a path, whether or not there is something.

    Raises:
        BadInput: if it is too long, not UTF-8, holds a zero byte, or may not be looked at.
    """
    try:
        str(text).encode()
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise BadInput(f"{option} {str(text)[:80]!r}: is no path that can be used: {reason}") from None
    return path


def first_line(error: BaseException) -> str:
    """Take the first line of what a library's error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """Put all that a library's error says into one line."""
    return " ".join(str(error).split()) or type(error).__name__


def cure(error: BaseException, cures: Mapping[int, str]) -> str:
    """Look up what to do about a library's HTTP error: ``"; is the token right?"``, or nothing.

    Args:
        error: whose ``response`` has a status code, if it is an HTTP error.
        cures: what to do, by status code.
    """
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return f"; {cures[status]}" if status in cures else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the GPU, bitsandbytes' managed memory or the machine ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; it is not imported here
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
