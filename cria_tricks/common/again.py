"""Write the command that goes on with a run, for the last line of a command that was stopped."""

import os
import shlex
import sys


def resumed() -> str:
    """Return the command that was typed, with ``--resume``; or ``--resume`` alone where no ``cria train`` was typed."""
    words = sys.argv[1:]
    program = os.path.basename(sys.argv[0])
    launched = "TORCHELASTIC_RUN_ID" in os.environ  # then a launcher has written this command, for one process of many
    if program not in ("cria", "__main__.py") or words[:1] != ["train"] or launched:
        return "--resume"
    return shlex.join(["cria", *words, *([] if "--resume" in words else ["--resume"])])
