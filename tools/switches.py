"""Write both tables of techniques into the page of switches, from what the modules of the techniques say.

python -m tools.switches
"""

import re
from pathlib import Path
from types import ModuleType

from cria_tricks.common.markdown_table import cell, markdown_table
from cria_tricks.parallel import BESIDE, STRATEGIES
from cria_tricks.switches import TECHNIQUES
from cria_tricks.techniques import INFERENCE, card

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "switches.md"
MARKS = {
    "tricks": ("<!-- the table of tricks: python -m tools.switches -->", "<!-- end of the table -->"),
    "parallel": ("<!-- the table of strategies: the same command -->", "<!-- end of the strategies -->"),
}
"""The HTML comments before and after each table in the page."""
GROUPS: dict[str, tuple[ModuleType, ...]] = {
    "tricks": (*TECHNIQUES, *INFERENCE),
    "parallel": (*STRATEGIES.values(), *BESIDE.values()),
}
COLUMNS = ("set", "saves", "costs", "claim", "bound", "lesson")


def row(trick: ModuleType) -> list[str]:
    """Return the row of a technique, with :data:`COLUMNS`."""
    about = card(trick)
    settings = trick.TECHNIQUE.switches or (trick.TECHNIQUE.command,)
    saves = re.sub(r"\s*\[[a-zA-Z, ]+\]$", "", about["Saves"])  # without the unit at its end
    bound = about["Claim"].partition(":")[2].strip() or "sums in another order round otherwise"
    return [
        ", ".join(f"`{one}`" for one in settings),
        saves,
        about["Costs"],
        trick.TECHNIQUE.claim,
        bound,
        trick.TECHNIQUE.lesson,
    ]


def markdown(group: str) -> str:
    """Return a table in Markdown, as it stands on the page; the groups are those of :data:`GROUPS`."""
    rows = [[cell(text) for text in row(trick)] for trick in GROUPS[group]]
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
