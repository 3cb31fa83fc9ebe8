"""Show things in a notebook, if a lesson runs in one: it also runs as a plain script, on a machine without IPython."""

from typing import Any


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
