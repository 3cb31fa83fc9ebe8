"""Write the last line of a command that was stopped: what is saved so far, and which command goes on."""

import os
import shlex
import sys

CODE = 130
"""The exit code of an interrupted command: 128 + 2, as shells report a process that Ctrl-C ended."""
NOTHING = "nothing was written"
"""What the last line of an interrupted command says before anything is saved."""

_saved = NOTHING


def now_saved(sentence: str) -> None:
    """Set what the last line of an interrupted command says: what is saved so far, and how to continue."""
    global _saved
    _saved = sentence


def words() -> str:
    """Return the last line of an interrupted command."""
    return f"interrupted; {_saved}"


def resumed() -> str:
    """Return the command that was typed, with ``--resume``; or ``--resume`` alone where no ``cria train`` was typed."""
    words = sys.argv[1:]
    program = os.path.basename(sys.argv[0])
    launched = "TORCHELASTIC_RUN_ID" in os.environ  # then a launcher has written this command, for one process of many
    if program not in ("cria", "__main__.py") or words[:1] != ["train"] or launched:
        return "--resume"
    return shlex.join(["cria", *words, *([] if "--resume" in words else ["--resume"])])
