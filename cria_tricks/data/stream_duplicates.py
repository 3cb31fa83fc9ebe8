"""Duplicates of a stream: one pass over the source before the run remembers which rows are left out.

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


class Survey:
    """Which rows came before.

    Args:
        places: a number for the place of each, in rising order, shape (N,), uint64.
        reasons: which of :data:`REASONS`, shape (N,), uint8.
    """

    def __init__(self, places: np.ndarray, reasons: np.ndarray):
        self.places, self.reasons = places, reasons

    def reason(self, row: Chat) -> str | None:
        """Why a row is left out, if it is."""
        place = np.uint64(digest([row.where]))
        at = int(np.searchsorted(self.places, place))
        return REASONS[self.reasons[at]] if at < len(self.places) and self.places[at] == place else None


def survey(rows: Iterable[Chat], prepare: Prepare, near: bool) -> Survey:
    """Read everything once.

    Args:
        rows: all of the source, in its order.
        prepare: rows that its sieve leaves out are no originals.
        near: whether rows that are nearly the same count, too.
    """
    repeats, found = Repeats(near), dict[int, int]()
    for row in rows:
        if prepare.sieve.keeps(row, Tally()) and (reason := repeats.reason(row)):
            found[digest([row.where])] = REASONS.index(reason)
    places = np.array(sorted(found), np.uint64)
    return Survey(places, np.array([found[int(place)] for place in places], np.uint8))


def write(file: Path, found: Survey, about: dict[str, Any]) -> None:
    """Keep a survey, and of what it is."""
    columns = {"places": found.places, "reasons": found.reasons}
    atomic_files.write_file(file, save(columns, metadata={"about": json.dumps(about)}))


def read(file: Path, about: dict[str, Any]) -> Survey | None:
    """Take a survey that was kept; ``None`` if there is none, or it is of something else, or damaged."""
    try:
        with safe_open(file, "numpy") as kept:
            if json.loads(kept.metadata()["about"]) == json.loads(json.dumps(about)):
                return Survey(kept.get_tensor("places"), kept.get_tensor("reasons"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        pass
    return None
