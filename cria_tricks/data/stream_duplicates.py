"""Deduplicate a stream: read the whole source once before the run, to find the rows that are left out.

A row is a duplicate if an earlier row is the same. But several processes read a stream, each in an order of its own,
and again with each pass, so none of them knows which row is earlier. Therefore rank 0 reads everything once, in the
source's order, compares them on files (``prepared/repeats.py``), and keeps 9 bytes for each row that is left out. The
result is saved in the run's folder, together with the source and the settings that it holds for. A resumed run takes it
from there.
"""

import json
import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cria_tricks.common import atomic_files
from cria_tricks.data.counts import Tally
from cria_tricks.data.duplicates import digest
from cria_tricks.data.prepare import Prepare
from cria_tricks.data.prepared import repeats
from cria_tricks.data.rows import Chat

FILE = "duplicates.safetensors"
AT_ONCE = 2**12
"""Rows whose signatures are in memory before they are written: 2 MB."""


class Duplicates:
    """The N rows of a source that repeat an earlier row and are left out.

    Args:
        places: a hash of each row's place (file and its first byte), in ascending order, shape (N,), uint64.
        reasons: the index of each row's reason in ``repeats.REASONS``, shape (N,), uint8.
    """

    def __init__(self, places: np.ndarray, reasons: np.ndarray):
        self.places, self.reasons = places, reasons

    def reason(self, row: Chat) -> str | None:
        """Return why a row is left out; ``None`` if it is not."""
        place = np.uint64(digest([row.where]))
        at = int(np.searchsorted(self.places, place))
        if at == len(self.places) or self.places[at] != place:
            return None
        return repeats.REASONS[self.reasons[at]]


def find_duplicates(rows: Iterable[Chat], prepare: Prepare, near: bool, folder: Path) -> Duplicates:
    """Find the duplicates by reading all rows once.

    Args:
        rows: all rows of the source, in its order.
        prepare: gives the filters. A row that they leave out does not make a later row a duplicate.
        near: whether rows that are nearly the same count as duplicates, too.
        folder: the run's folder, in which the signatures are kept meanwhile.
    """
    work = folder / "signatures.partial"
    shutil.rmtree(work, ignore_errors=True)  # an earlier process may have been killed here
    try:
        places, parts = _write_signatures(rows, prepare, near, work)
        verdicts = repeats.find(parts)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    found = np.flatnonzero(verdicts != repeats.KEPT)
    order = np.argsort(places[found])
    return Duplicates(places[found][order], verdicts[found][order])


def _write_signatures(rows: Iterable[Chat], prepare: Prepare, near: bool, work: Path) -> tuple[np.ndarray, list[Path]]:
    """Write the signatures of the rows that the filters keep, in parts; return the rows' places, and the parts."""
    places = array("Q")
    parts: list[Path] = []
    signatures = repeats.Signatures(near)

    def write_part() -> None:
        parts.append(work / f"{len(parts):05}")
        signatures.write(parts[-1])
        signatures.clear()

    for row in rows:
        # The counts of this tally are dropped, because the run counts each row when it reads it for training.
        if not prepare.row_filter.keeps(row, Tally()):
            continue
        places.append(digest([row.where]))
        signatures.add(row)
        if len(signatures.digests) == AT_ONCE:
            write_part()
    write_part()
    return np.array(places, np.uint64), parts


def write(file: Path, found: Duplicates, about: dict[str, Any]) -> None:
    """Write the duplicates into a file, together with ``about``: the source and the settings that they hold for."""
    columns = {"places": found.places, "reasons": found.reasons}
    atomic_files.write_file(file, save(columns, metadata={"about": json.dumps(about)}))


def read(file: Path, about: dict[str, Any]) -> Duplicates | None:
    """Read the duplicates from a file; ``None`` if it is missing, damaged, or for another source or other settings."""
    try:
        with safe_open(file, "numpy") as kept:
            if json.loads(kept.metadata()["about"]) == json.loads(json.dumps(about)):
                return Duplicates(kept.get_tensor("places"), kept.get_tensor("reasons"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        pass
    return None
