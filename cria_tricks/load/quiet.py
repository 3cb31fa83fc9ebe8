"""Filter the warnings of libraries: drop those that a user cannot act on, and print each other one as one line."""

import re
import warnings
from typing import TextIO

from cria_tricks.common.console import Aside
from cria_tricks.common.errors import redacted
from cria_tricks.processes import numbers

NOT_FOR_USERS = (
    "fan_in_fan_out is set to",  # peft reports that GPT-2 stores its matrices transposed, and handles it
    "Already (un)?merged",  # peft reports that there is nothing to do
    "Could not find a config file in",  # peft checks whether the vocabulary has grown; this package never resizes it
    "Merge lora module to",  # peft warns of rounding; `cria merge` unpacks the base first and measures the rounding
    "Input and output embeddings are no longer tied",  # `cria merge` writes that into the config
    "Position ids are not supported for parameter",  # so rows behind a learnt prompt are answered one by one
    r"Setting `save_embedding_layers` to",  # peft saves an embedding that is trained or resized
)
"""Regular expressions that match the beginning of a warning which needs no action from a user."""


def drop() -> None:
    """Ignore every ``FutureWarning``, which is for programmers, and the warnings in :data:`NOT_FOR_USERS`."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for pattern in NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=pattern)


def plain() -> None:
    """Print each remaining warning as one line, ``warning: library: text``, without a source line.

    This replaces ``warnings.showwarning`` for the whole process.
    """
    warnings.showwarning = _print_warning


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on standard error; the parameters are those of ``warnings.showwarning``."""
    if numbers.rank() != 0:  # every rank meets the same warning, so rank 0 prints it for all
        return
    text = " ".join(str(message).split())
    library = re.search(r"(?:site|dist)-packages[/\\](\w+)", filename)
    if library:
        text = f"{library[1]}: {text}"
    Aside().print(redacted(f"warning: {text}"))
