"""Define the errors that a user can meet, and functions that word their messages.

``cli/main.py`` ends a command with one line and an exit code for these errors, and also for a wrong option, for Ctrl-C,
and when memory runs out in a library. Any other exception that ends a command is a bug of this package.
"""

import errno
import logging
import os
import re
from pathlib import Path

# On a CPU with bf16 instructions (AVX-512 BF16), bitsandbytes warns on import if the package `kernels` is missing. It
# has a kernel of its own, so nothing here needs that package. The filter is set here, because the command and
# run/train.py import this module before bitsandbytes.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_TOKEN")
"""Environment variables that hold an access token of the Hugging Face hub."""


class BadInput(ValueError):
    """The input is wrong: one line says what, where, and what would be right. Exit code 2.

    Args:
        line: the message. In a word of 300 or more characters, such as a long path that the user typed, dots replace
            the middle.
    """

    def __init__(self, line: str):
        super().__init__(re.sub(r"(\S{200})\S{60,}(\S{40})", r"\1...\2", redacted(line)))


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The system's error numbers for which making room may help: no space, quota used up, file too large."""


class Unwritten(BadInput):
    """A file or folder could not be written; everything saved before is complete. Exit code 2.

    Args:
        path: what could not be written.
        reason: why, in the system's words.
        number: the system's error number, or ``None`` if it is unknown. It decides the advice: to make room, or to mend
            what the reason names. The default is a full disk, because some libraries report a half-written file
            without a number.
    """

    def __init__(self, path: Path, reason: str, number: int | None = errno.ENOSPC):
        self.made_from = path, reason, number
        # A warning about train.mirror quotes only this part, because the run goes on without the mirror.
        self.reason = f"{path}: cannot be written: {reason}"
        cure = "make room" if number in _FULL else "mend that"
        super().__init__(f"{self.reason}; {WHOLE}: {cure}, then {AGAIN}")

    def __reduce__(self) -> tuple[object, ...]:
        # Another process sends it as a pickle. Python would make it again from its message alone.
        return Unwritten, self.made_from


WHOLE = "what was saved before is whole"
AGAIN = "run the command again (a training run: with --resume)"


class Diverged(RuntimeError):
    """A loss or the gradients are not finite, or an evaluation's loss is above its limit. Exit code 1.

    A training run that ends with it has written no adapter.
    """


class OutOfMemory(RuntimeError):
    """Memory ran out, or by the estimate it would. Exit code 3.

    In training the state was saved if that was possible.
    """


class Lost(RuntimeError):
    """Another process died, stopped answering or did not start; everything saved before is complete. Exit code 1."""


class Interrupted(RuntimeError):
    """The user, or the system, stopped the run; its state was saved if it had done a step. Exit code 130."""


FORESEEN = (BadInput, Diverged, OutOfMemory, Lost, Interrupted)
"""Errors whose message is one sentence for the user already."""


def redacted(text: str) -> str:
    """Hide secrets in a text: access tokens of the hub, and user and password in a URL.

    A token is found by its form (``hf_...``) or because an environment variable holds it. Every error message that a
    command prints passes through here, because it may quote what a library said.

    Examples:
        >>> redacted("https://me:secret@example.org/x")
        'https://[hidden]@example.org/x'
    """
    for name in _SECRETS:
        secret = os.environ.get(name, "").strip()
        if len(secret) >= 8:  # a shorter value is no token, and may be a common word
            text = text.replace(secret, "[hidden]")
    text = re.sub(r"\bhf_[A-Za-z0-9]{20,}", "[hidden]", text)
    return re.sub(r"(?<=://)[^/\s@]+(?=@)", "[hidden]", text)


def usable_path(option: str, text: str | Path) -> Path:
    """Check that the system accepts a path, whether or not it exists.

    Args:
        option: what the error message calls it, e.g. ``"--out"``.
        text: the path as it was typed.

    Returns:
        The path, with ``~`` replaced by the home folder.

    Raises:
        BadInput: if the system refuses it, for example because it is too long, cannot be written as UTF-8, holds a zero
            byte, begins with ``~NAME`` for an unknown user, or access is denied.
    """
    try:
        str(text).encode()
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: expanduser does not know the user of ~NAME
        reason = getattr(error, "strerror", None) or first_line(error)
        raise BadInput(f"{option} {str(text)[:80]!r}: is no path that can be used: {reason}") from None
    return path


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error's class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """Return a library's error message with its lines joined into one."""
    return " ".join(str(error).split()) or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that the GPU, bitsandbytes' managed memory or the machine ran out of memory."""
    # torch's error is recognised by its name, because importing torch here would take seconds.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # CUDA says the first, torch's allocator for the machine's memory the next two (Linux, Windows), cuBLAS the last.
    words = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
