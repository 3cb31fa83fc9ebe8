"""Count the rows that are read, left out and added on the way to the training rows."""

from collections import Counter
from collections.abc import Mapping

from cria_tricks.data.rows import Chat
from cria_tricks.settings import Data

READ = "read"
KEPT = "kept"
CUT = "cut at data.max_length"
DROPPED = "longer than data.max_length"
LEAK = "in the evaluation set"
LEAK_KEPT = "in the evaluation set, and kept"
QUIET = (READ, KEPT, CUT, LEAK_KEPT)
"""Counts of rows that are neither left out nor added. The last two have warnings of their own."""
ADDED = {
    "shuffle_documents": "added with its documents shuffled",
    "drop_uncited": "added without the documents that are not cited",
    "drop_cited": "added as a refusal, without the documents that are cited",
}
"""The fields of the recipe that add rows, and the names under which these rows are counted."""


class Tally:
    """Count rows and their words by what happened to them, e.g. ``"read"``, ``"duplicate"`` or ``"kept"``.

    Args:
        counts: the counts to begin with, from an earlier tally's :meth:`to_dict`.
        kinds: the earlier tally's ``kinds``.

    Attributes:
        rows: rows, by what happened to them.
        words: the words of these rows.
        kinds: how many rows of each kind were tokenised; see :attr:`cria_tricks.data.rows.Chat.kind`.
    """

    def __init__(self, counts: Mapping[str, Mapping[str, int]] | None = None, kinds: Mapping[str, int] | None = None):
        self.rows: Counter[str] = Counter()
        self.words: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.add(counts or {}, kinds or {})

    def count(self, step: str, row: Chat) -> None:
        self.rows[step] += 1
        self.words[step] += len(row.content.split())

    def add(self, counts: Mapping[str, Mapping[str, int]], kinds: Mapping[str, int]) -> None:
        self.kinds.update(kinds)
        for step, entry in counts.items():
            self.rows[step] += entry["rows"]
            self.words[step] += entry["words"]

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as JSON data, in the order in which they first occurred."""
        return {step: {"rows": number, "words": self.words[step]} for step, number in self.rows.items()}

    def in_words(self) -> str:
        """Describe in one line how many rows were left out or added; empty if none were."""
        steps = [f"{number:,} {step}" for step, number in self.rows.items() if step not in QUIET]
        if not steps:
            return ""
        return f"{self.rows[READ]:,} rows read: {', '.join(steps)}; {self.rows[KEPT]:,} kept"


def warnings(tally: Tally, settings: Data) -> list[str]:
    """Return warnings about leaked evaluation rows, and about settings that have no effect."""
    said = []
    kept = tally.rows[LEAK_KEPT]
    if kept:
        said.append(
            f"{kept} training rows ask what an evaluation row asks, or nearly, so the evaluation loss is too good; "
            "set data.leakage=drop to leave them out, or data.leakage=ignore"
        )
    for field, step in ADDED.items():
        if getattr(settings, field) and not tally.rows[step]:
            said.append(f"data.{field} has no effect: no row could be changed in this way")
    return said
