"""Deduplicate a stream: one pass over the source, before the run, finds the rows that are left out.

What came before can only be known by reading it, and a stream is read in another order, by several processes, again and
again. So the first process reads everything once, in the source's order, and keeps 9 bytes for each row that is left
out. The result lies in the run's folder, tied to the source and the settings, and a resumed run takes it from there.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cria_tricks.common import atomic_files
from cria_tricks.data.counts import Tally
from cria_tricks.data.duplicates import Repeats, digest
from cria_tricks.data.prepare import Prepare
from cria_tricks.data.rows import Chat

FILE = "duplicates.safetensors"
REASONS = ("duplicate", "near duplicate")


class Duplicates:
    """The rows that came before, and are left out.

    Args:
        places: a number for the place of each, in rising order, shape (N,), uint64.
        reasons: which of :data:`REASONS`, shape (N,), uint8.
    """

    def __init__(self, places: np.ndarray, reasons: np.ndarray):
        self.places, self.reasons = places, reasons

    def reason(self, row: Chat) -> str | None:
        """Say why a row is left out; ``None`` if it is not."""
        place = np.uint64(digest([row.where]))
        at = int(np.searchsorted(self.places, place))
        if at == len(self.places) or self.places[at] != place:
            return None
        return REASONS[self.reasons[at]]


def find_duplicates(rows: Iterable[Chat], prepare: Prepare, near: bool) -> Duplicates:
    """Find the duplicates by reading everything once.

    Args:
        rows: all of the source, in its order.
        prepare: rows that its filters leave out are no originals.
        near: whether rows that are nearly the same count, too.
    """
    repeats = Repeats(near)
    found: dict[int, int] = {}
    for row in rows:
        if not prepare.row_filter.keeps(row, Tally()):
            continue
        reason = repeats.reason(row)
        if reason:
            found[digest([row.where])] = REASONS.index(reason)
    places = sorted(found)
    reasons = [found[place] for place in places]
    return Duplicates(np.array(places, np.uint64), np.array(reasons, np.uint8))


def write(file: Path, found: Duplicates, about: dict[str, Any]) -> None:
    """Write the duplicates that were found into a file, with what it is of."""
    columns = {"places": found.places, "reasons": found.reasons}
    atomic_files.write_file(file, save(columns, metadata={"about": json.dumps(about)}))


def read(file: Path, about: dict[str, Any]) -> Duplicates | None:
    """Read the duplicates of a file; ``None`` if there is none, or it is of something else, or damaged."""
    try:
        with safe_open(file, "numpy") as kept:
            if json.loads(kept.metadata()["about"]) == json.loads(json.dumps(about)):
                return Duplicates(kept.get_tensor("places"), kept.get_tensor("reasons"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        pass
    return None
