"""Write Markdown tables."""

import re
from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table as a list of lines.

    Args:
        columns: the headings.
        rows: the cells of each table row. They are not escaped; use :func:`cell` for a text that may contain ``|``.

    Examples:
        >>> print("\\n".join(markdown_table(["what", "bytes"], [["weights", "4 B"]])))
        | what | bytes |
        |---|---|
        | weights | 4 B |
    """
    lines = [_line(columns), "|" + "---|" * len(columns)]
    return lines + [_line(row) for row in rows]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return :func:`markdown_table` as one text."""
    return "\n".join(markdown_table(columns, rows))


def cell(text: str) -> str:
    """Escape each ``|`` in a text, because it would end the cell."""
    return text.replace("|", "\\|")


def literal(text: str) -> str:
    """Escape what Markdown would read as its own marks, for a text in one line that somebody else has written.

    Examples:
        >>> print(literal("a | <b> *c*"))
        a \\| \\<b\\> \\*c\\*
    """
    return re.sub(r"([\\`*_\[\]<>|~#&$])", r"\\\1", text)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
