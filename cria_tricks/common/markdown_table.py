"""Write Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table, as a list of lines.

    Args:
        columns: their headings.
        rows: the cells of each row, as they are; see :func:`cell` for texts that may hold a bar.

    Examples:
        >>> print("\\n".join(markdown_table(["what", "bytes"], [["weights", "4 B"]])))
        | what | bytes |
        |---|---|
        | weights | 4 B |
    """
    lines = [_line(columns), "|" + "---|" * len(columns)]
    return lines + [_line(row) for row in rows]


def cell(text: str) -> str:
    """Escape the bars of a text, which would end its cell."""
    return text.replace("|", "\\|")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
