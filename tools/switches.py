"""Write both tables of techniques into the page of switches, from what the modules of the techniques say.

python -m tools.switches
"""

from pathlib import Path

from cria_tricks.common.markdown_table import cell, markdown_table
from cria_tricks.doctor.explain import COLUMNS, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "switches.md"
MARKS = {
    "tricks": ("<!-- the table of tricks: python -m tools.switches -->", "<!-- end of the table -->"),
    "parallel": ("<!-- the table of strategies: the same command -->", "<!-- end of the strategies -->"),
}
"""The HTML comments before and after each table in the page."""


def markdown(group: str) -> str:
    """Return a table in Markdown, as it stands on the page; the groups are those of ``table``."""
    rows = []
    for row in table(group):
        row["set"] = ", ".join(f"`{part}`" for part in row["set"].split(", "))
        rows.append([cell(row[column]) for column in COLUMNS])
    return "\n".join(markdown_table(COLUMNS, rows))


def write_into(path: Path) -> None:
    """Write both tables into a Markdown file, between their marks, in place of the old ones.

    Raises:
        SystemExit: if the file lacks one of the marks.
    """
    text = path.read_text(encoding="utf-8")
    for group, (begin, end) in MARKS.items():
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise SystemExit(f"{path}: has no place for the table, between {begin} and {end}")
        text = f"{before}{begin}\n\n{markdown(group)}\n\n{end}{after}"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_into(PAGE)
