"""Show things in a notebook, and run commands of ``cria`` in a cell; a lesson also runs as a plain script."""

import json
import os
import shlex
import subprocess
import sys
from typing import Any

CRIA = (sys.executable, "-m", "cria_tricks")


def shown(data: dict[str, Any]) -> bool:
    """Show an output in a notebook, and return whether it was shown.

    Args:
        data: the output in several formats, by MIME type; a notebook takes the richest that it knows.
    """
    try:
        # Imported here, because a lesson also runs as a plain script on a machine without IPython.
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return False
    if get_ipython() is None:
        return False
    display(data, raw=True)
    return True


def show_table(text: str) -> None:
    """Show a Markdown table as a table, or print it where there is no notebook."""
    if not shown({"text/markdown": text, "text/plain": text}):
        print(text)


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
