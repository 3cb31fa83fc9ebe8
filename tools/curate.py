"""The real Kwanzaa rows -> cria_tricks/data/kwanzaa_curated.sha256: the rows of ``kwanzaa_curated``, by their hashes.

    python -m tools.curate

Real answers and real refusals are chosen; placeholders are not, because a model that learns them answers nothing, and
neither are training rows that are nearly an evaluation row. The rows are not ours to ship, and their hashes are enough
to find them again.
"""

from pathlib import Path

from cria_tricks.data import sources
from cria_tricks.data.duplicates import Guard
from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa.prompt import read_rows
from cria_tricks.kwanzaa.scores import kind

CHOSEN = Path(sources.__file__).with_name("kwanzaa_curated.sha256")


def chosen(train: list[Chat], held_out: list[Chat]) -> list[str]:
    """Return the hashes of the rows of both parts that are chosen, in their order."""
    guard = Guard(held_out)
    rows = [row for row in train if guard.find(row) is None] + held_out
    hashes = []
    for row, asked in zip(rows, read_rows(rows), strict=True):
        if kind(asked) != "placeholder":
            hashes.append(sources.row_hash(row))
    return hashes


if __name__ == "__main__":
    found = chosen(sources.find("kwanzaa", "train").rows, sources.find("kwanzaa", "eval").rows)
    CHOSEN.write_text("".join(f"{each}\n" for each in found))
