r"""Which texts say the same, or nearly: shingles, the guard of the evaluation rows, and the search for duplicates.

A shingle is n words in a row. Two texts are as similar as their sets of shingles A and B are (Broder 1997,
doi:10.1109/SEQUEN.1997.666900)::

    J(A, B) = |A and B| / |A or B|

The evaluation's rows are few, so the guard computes J itself. Training rows are many, and each would have to be
compared with each: so near duplicates are found by MinHash, 128 numbers that stand for a set, of which two sets share
a share of J on average, and by tables of bands of them, in which similar sets meet (Leskovec, Rajaraman, Ullman, Mining
of Massive Datasets, chapter 3).
"""

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cria_tricks.data.rows import Chat

_WORD = re.compile(r"\w+")
_QUESTION = re.compile(r"^(?:Query|Question): *(.+?)(?:\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_NOTHING = np.empty(0, np.uint64)
_FACTOR = 0x9E3779B97F4A7C15
"""An odd number of 64 bits without a pattern: 2^64 divided by the golden ratio, as in Fibonacci hashing."""

TEXT = 8
"""Words of a shingle of a text: eight in a row are hardly ever the same by chance."""
LEAK = 0.5
"""From this similarity on a row is taken for one of the evaluation. Of the 27 real evaluation rows 8 have one such in
training: two with the same question, six with another name or subject in it ("How many people celebrate Kwanzaa in
UK?", where training has France). What comes next, from 0.46 down, asks something else in the same words."""
ROW, NEAR = 5, 0.8
"""Words of a shingle, and the similarity from which on a training row is a near duplicate of another."""
SIGNED = 4000
"""Words of a row that its signature is made of: the first ones."""
PERMUTATIONS, BANDS, IN_BAND = 128, 16, 8
"""Two rows of similarity s meet in a band with probability 1 - (1 - s^8)^16: 0.95 at 0.8, 0.06 at 0.5."""


def words(text: str) -> list[str]:
    """A text's words in lower case, and nothing else."""
    return _WORD.findall(text.lower())


def shingles(found: Sequence[str], size: int) -> np.ndarray:
    """The different shingles of a text.

    Args:
        found: its words.
        size: words of a shingle; a shorter text has one, of all its words, and an empty one none.

    Returns:
        64-bit hashes in rising order, shape (N,), uint64; the same in every process.
    """
    if not found:
        return _NOTHING
    each = np.fromiter((zlib.crc32(word.encode()) for word in found), np.uint64, len(found))
    size = min(size, len(found))
    mixed = np.zeros(len(found) - size + 1, np.uint64)
    for place in range(size):
        mixed = (mixed + each[place : place + len(mixed)] + np.uint64(1)) * np.uint64(_FACTOR)
    return np.unique(mixed ^ (mixed >> np.uint64(29)))


def digest(found: Iterable[str]) -> int:
    """A number for a text's words in their order: 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(" ".join(found).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Leak:
    """A training row that is an evaluation row, or nearly.

    Attributes:
        row: file and line of the training row.
        held_out: those of the evaluation row.
        similarity: of the two; 1 for the same words.
    """

    row: str
    held_out: str
    similarity: float


class Guard:
    """Knows the evaluation's rows, and finds training rows that say the same.

    Of a chat the question counts, behind ``Query:`` or ``Question:`` where a turn marks one, else the user's turns: the
    form of an answer is the same in all rows, and the documents of a prompt in many. So two rows are as similar as the
    pairs of words of their questions, or as the words of their questions and the pairs of words of their whole turns,
    whichever of the two is less: "What does Umoja ask?" is near "What does Nia ask?" only where the documents are. Of a
    prompt and its completion the prompt counts. Texts are compared by the share of the smaller one's shingles that the
    other has: a page of a book is in the book.

    Args:
        rows: the evaluation's.
    """

    def __init__(self, rows: Sequence[Chat]):
        self.rows = rows
        parts = [_parts(row) for row in rows]
        self.same = {digest(found[0]): number for number, found in reversed(list(enumerate(parts)))}
        chats = [found if len(found) == 2 else ([], []) for found in parts]
        self.pairs = _Table([shingles(question, 2) for question, _ in chats])
        self.words = _Table([shingles(question, 1) for question, _ in chats])
        self.turns = _Table([shingles(turns, 2) for _, turns in chats])
        self.texts = _Table([shingles(found[0], TEXT) if len(found) == 1 else _NOTHING for found in parts])

    def find(self, row: Chat) -> Leak | None:
        """The evaluation row that a training row is nearest to, if it is near enough."""
        found = _parts(row)
        number, similarity = self.same.get(digest(found[0]), -1), 1.0
        if number < 0:
            if len(found) == 1:
                near = self.texts.shares(shingles(found[0], TEXT))
            else:
                question, turns = found
                near = np.minimum(self.words.jaccard(shingles(question, 1)), self.turns.jaccard(shingles(turns, 2)))
                near = np.maximum(near, self.pairs.jaccard(shingles(question, 2)))
            number = int(near.argmax())
            similarity = float(near[number])
        return Leak(row.where, self.rows[number].where, similarity) if similarity >= LEAK else None


def _parts(row: Chat) -> tuple[list[str], ...]:
    """The words of a text; of another row those of its question, and those of all that is asked."""
    if row.text or not (row.messages or row.prompt.strip()):
        return (words(row.content),)
    turns = [message["content"] for message in row.messages if message["role"] == "user"] or [row.prompt]
    questions = [(_QUESTION.findall(turn) or [turn])[-1] for turn in turns]
    return words("\n".join(questions)), words("\n".join(turns))


class _Table:
    """The shingles of N rows in one sorted array, and beside each the row that it is of."""

    def __init__(self, sets: Sequence[np.ndarray]):
        self.sizes = np.array([len(hashes) for hashes in sets])
        hashes = np.concatenate(sets)
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.owners = hashes[order], np.repeat(np.arange(len(sets)), self.sizes)[order]

    def shared(self, mine: np.ndarray) -> np.ndarray:
        """How many shingles each row has in common with a set, shape (N,)."""
        begin, end = (np.searchsorted(self.hashes, mine, side) for side in ("left", "right"))
        places = [self.owners[begin[i] : end[i]] for i in np.flatnonzero(end > begin)]
        return np.bincount(np.concatenate([np.empty(0, np.intp), *places]), minlength=len(self.sizes))

    def jaccard(self, mine: np.ndarray) -> np.ndarray:
        """J of each row and a set, shape (N,)."""
        shared = self.shared(mine)
        return shared / np.maximum(self.sizes + len(mine) - shared, 1)

    def shares(self, mine: np.ndarray) -> np.ndarray:
        """The share of the smaller of the two that the other has, shape (N,)."""
        return self.shared(mine) / np.maximum(np.minimum(self.sizes, len(mine)), 1)


class Repeats:
    """Finds rows that came before, in the words they have or nearly.

    Args:
        near: whether rows that are nearly the same count, too. Then each row that stays costs some kilobytes.
    """

    def __init__(self, near: bool):
        self.seen: set[int] = set()
        self.signatures: list[Any] = []
        self.bands: Any = None
        if near:
            # It takes half a second to import, and only near duplicates need it.
            from datasketch import MinHashLSH

            self.bands = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, IN_BAND))

    def reason(self, row: Chat) -> str | None:
        """``"duplicate"``, ``"near duplicate"``, or ``None`` for a row that is the first of its kind."""
        found = words(row.content)
        same = digest(found)
        if same in self.seen:
            return "duplicate"
        if self.bands is not None:
            signature = sign(found)
            if any(signature.jaccard(self.signatures[key]) >= NEAR for key in self.bands.query(signature)):
                return "near duplicate"
            self.bands.insert(len(self.signatures), signature, check_duplication=False)
            self.signatures.append(signature)
        self.seen.add(same)
        return None


def sign(found: Sequence[str]) -> Any:
    """The MinHash of a row's first words.

    Returns:
        ``datasketch.LeanMinHash`` of 128 numbers; of two the share that is equal estimates J, with a standard deviation
        of at most 1 / (2 sqrt(128)) = 0.044.
    """
    # It takes half a second to import, and only near duplicates need it.
    from datasketch import LeanMinHash, MinHash

    hashes = shingles(found[:SIGNED], ROW)
    signature = MinHash(num_perm=PERMUTATIONS, hashfunc=lambda value: value)
    signature.update_batch((hashes >> np.uint64(32)).astype(np.uint32))
    return LeanMinHash(signature)
