"""Run commands of ``cria`` in a cell of a notebook, in a process of their own."""

import json
import os
import shlex
import subprocess
import sys
from typing import Any

CRIA = (sys.executable, "-m", "cria_tricks")


def cria(*arguments: object, right: int = 0) -> str:
    """Run a command and show what it says, as it comes.

    Args:
        arguments: words of the command, as they would follow ``cria`` in a terminal.
        right: the exit code that is expected.

    Returns:
        What the command said.

    Raises:
        RuntimeError: if the exit code is another one.
    """
    words = [str(argument) for argument in arguments]
    print("$ cria", shlex.join(words))
    process = subprocess.Popen(
        [*CRIA, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", env=_plain()
    )
    assert process.stdout
    said = ""
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            said += line
    except KeyboardInterrupt:  # the stop button; cria heard it too, and saves before it ends
        process.wait()
        raise
    if process.wait() != right:
        raise RuntimeError(f"cria {words[0]} ended with exit code {process.returncode}; its last line says why")
    return said


def ask(*arguments: object) -> dict[str, Any]:
    """Run a command for its answer as data."""
    words = [*CRIA, *map(str, arguments), "--json"]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, env=_plain(), check=True).stdout)


def _plain() -> dict[str, str]:
    """Return an environment without colours: a notebook is no terminal, and a bar would be drawn over and over."""
    return os.environ | {"FORCE_COLOR": ""}
