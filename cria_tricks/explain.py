"""One technique, or all of them, told from their modules: ``cria explain``, ``cria tricks`` and the README's table.

python -m cria_tricks.explain README.md    # writes the table between its two marks
"""

import difflib
import functools
import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cria_tricks.errors import BadInput
from cria_tricks.tricks import CARD, INFERENCE, TRICKS, card, trick_name

COLUMNS = ("set", "saves", "costs", "claim", "bound", "lesson")
BEGIN, END = "<!-- the table of tricks: python -m cria_tricks.explain README.md -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Explained:
    """What there is to say about a technique.

    Attributes:
        name: of its module.
        title: one sentence.
        card: the card's eight lines.
        settings: what switches it on, e.g. ``("quantization=nf4", ...)``; none for a technique of answering.
        reference: the lines of the from-scratch reference that matter.
        plain: the Hugging Face code that the toggle stands for.
        lesson: where it is taught.
    """

    name: str
    title: str
    card: dict[str, str]
    settings: tuple[str, ...]
    reference: str
    plain: str
    lesson: str

    @property
    def bound(self) -> str:
        """What the claim means, in words."""
        claim = self.card["Claim"].partition(":")[2].strip()
        return claim or "sums in another order round otherwise"


def explain(name: str) -> Explained:
    """Look a technique up by the name of its module or of one of its settings.

    Raises:
        BadInput: for an unknown name, with the nearest right one.
    """
    known: dict[str, ModuleType] = {trick_name(trick): trick for trick in (*TRICKS, *INFERENCE)}
    for trick in TRICKS:  # "peft=lora" is lora; quantization alone could be int8 or nf4, so it is none of them
        known |= {switch.removesuffix("=true"): trick for switch in trick.SWITCHES if switch not in known}
    wanted = name.removeprefix("tricks.").removesuffix("=true")
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(map(trick_name, (*TRICKS, *INFERENCE)))}"
        raise BadInput(f"unknown trick {name}: {hint}")
    return _explained(known[wanted])


def _explained(trick: ModuleType) -> Explained:
    fields = card(trick)
    parts = (functools.reduce(getattr, place.split("."), trick) for place in trick.REFERENCE)
    return Explained(
        name=trick_name(trick),
        title=fields["title"],
        card={line: fields[line] for line in CARD},
        settings=getattr(trick, "SWITCHES", ()),
        reference="\n\n\n".join(textwrap.dedent(inspect.getsource(part)).rstrip() for part in parts),
        plain=trick.PLAIN.strip(),
        lesson=trick.LESSON,
    )


def table() -> list[dict[str, str]]:
    """One row for each technique: the columns of :data:`COLUMNS`, and its ``name``."""
    rows = []
    for trick in (*TRICKS, *INFERENCE):
        about = _explained(trick)
        rows.append(
            {
                "name": about.name,
                "set": ", ".join(about.settings) or "cria chat",
                "saves": about.card["Saves"].replace("[bytes]", "").replace("[bytes, FLOPs]", "").strip(),
                "costs": about.card["Costs"],
                "claim": trick.CLAIM,
                "bound": about.bound,
                "lesson": about.lesson,
            }
        )
    return rows


def markdown() -> str:
    """The table as it stands in README.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in table():
        cells = {**row, "set": ", ".join(f"`{part}`" for part in row["set"].split(", "))}
        lines.append(f"| {' | '.join(cells[column].replace('|', chr(92) + '|') for column in COLUMNS)} |")
    return "\n".join(lines)


def write_into(path: Path) -> None:
    """Put the table between its two marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path}: has no place for the table, between {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_into(Path(sys.argv[1]))
