"""Warnings of the libraries: those that a user cannot act on are dropped, and each other one becomes one plain line."""

import re
import warnings
from typing import TextIO

from cria_tricks.common.console import Aside
from cria_tricks.common.errors import redacted
from cria_tricks.processes import numbers

NOT_FOR_USERS = (
    "fan_in_fan_out is set to",  # peft sees how GPT-2 keeps its matrices, and says that it has
    "Already (un)?merged",
    "Could not find a config file in",  # peft looks whether a vocabulary grew; none grows here
    "Merge lora module to",  # `cria merge` unpacks the base first, and measures what rounding does
    "Input and output embeddings are no longer tied",  # `cria merge` writes that down in the config
    r"Setting `save_embedding_layers` to",
)
"""How warnings begin that nobody can do anything about."""


def drop() -> None:
    """Drop the warnings of libraries that are for programmers, or about what is taken care of here."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for words in NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=words)


def plain() -> None:
    """Say every other warning in one line, by the library's name, without the line of its code."""
    warnings.showwarning = _say


def _say(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if numbers.rank():  # one process speaks for all
        return
    text = " ".join(str(message).split())
    library = re.search(r"(?:site|dist)-packages[/\\](\w+)", filename)
    if library:
        text = f"{library[1]}: {text}"
    Aside().print(redacted(f"warning: {text}"))
