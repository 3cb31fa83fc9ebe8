r"""Find texts that say the same, or nearly: duplicates among training rows, and evaluation rows among them.

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

from cria_tricks.data.rows import Chat, marked_question

_WORD = re.compile(r"\w+")
_NOTHING = np.empty(0, np.uint64)
_FACTOR = 0x9E3779B97F4A7C15
"""An odd number of 64 bits without a pattern: 2^64 divided by the golden ratio, as in Fibonacci hashing."""

TEXT = 8
"""Words of a shingle of a text: eight in a row are hardly ever the same by chance."""
LEAK = 0.5
"""From this similarity on a row is taken for one of the evaluation. Of the 27 real evaluation rows 8 have one such in
training: two with the same question, six with another name or subject in it ("How many people celebrate Kwanzaa in
UK?", where training has France). What comes next, from 0.46 down, asks something else in the same words."""
ROW = 5
"""Words of a shingle of a training row, in the search for near duplicates."""
NEAR = 0.8
"""From this similarity on a training row is a near duplicate of another."""
SIGNED = 4000
"""Words of a row that its signature is made of: the first ones."""
PERMUTATIONS = 128
"""Numbers of a MinHash signature: 16 bands of 8."""
BANDS = 16
IN_BAND = 8
"""Two rows of similarity s meet in a band with probability 1 - (1 - s^8)^16: 0.95 at 0.8, 0.06 at 0.5."""


def words(text: str) -> list[str]:
    """Split a text into its words, in lower case; a text without any, as of emoji, into what stands between spaces."""
    return _WORD.findall(text.lower()) or text.split()


def shingles(found: Sequence[str], size: int) -> np.ndarray:
    """Hash each different shingle of a text.

    Args:
        found: its words.
        size: words of a shingle; a shorter text has one, of all its words, and an empty one none.

    Returns:
        64-bit hashes in rising order, shape (N,), uint64; the same in every process.
    """
    if not found:
        return _NOTHING
    word_hashes = np.fromiter((zlib.crc32(word.encode()) for word in found), np.uint64, len(found))
    size = min(size, len(found))
    # All shingles at once: step i mixes the i-th word of each into its hash.
    mixed = np.zeros(len(found) - size + 1, np.uint64)
    for place in range(size):
        mixed = (mixed + word_hashes[place : place + len(mixed)] + np.uint64(1)) * np.uint64(_FACTOR)
    # A product of integers mixes upwards only, so the upper bits are brought down once.
    return np.unique(mixed ^ (mixed >> np.uint64(29)))


def digest(found: Iterable[str]) -> int:
    """Hash a text's words in their order, to 64 bits that are the same in every process."""
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
    """Find training rows that say the same as a row of the evaluation set.

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
        self.same: dict[int, int] = {}
        texts = []
        questions = []
        turns = []
        for number, row in enumerate(rows):
            asked = _asked(row)
            self.same.setdefault(digest(asked.question), number)
            # Each table has an entry for every row; a text's are empty in those of chats, and the other way round.
            texts.append(shingles(asked.question, TEXT) if asked.is_text else _NOTHING)
            questions.append([] if asked.is_text else asked.question)
            turns.append([] if asked.is_text else asked.turns)
        self.texts = _Table(texts)
        self.words = _Table([shingles(question, 1) for question in questions])
        self.pairs = _Table([shingles(question, 2) for question in questions])
        self.turns = _Table([shingles(turn, 2) for turn in turns])

    def find(self, row: Chat) -> Leak | None:
        """Find the evaluation row that a training row is nearest to, if it is near enough."""
        asked = _asked(row)
        same = self.same.get(digest(asked.question))
        if same is not None:
            return Leak(row.where, self.rows[same].where, 1.0)
        similarities = self._similarities(asked)
        number = int(similarities.argmax())
        similarity = float(similarities[number])
        if similarity < LEAK:
            return None
        return Leak(row.where, self.rows[number].where, similarity)

    def _similarities(self, asked: "_Asked") -> np.ndarray:
        """Compute how similar each evaluation row is, shape (N,)."""
        if asked.is_text:
            return self.texts.shares(shingles(asked.question, TEXT))
        by_words = self.words.jaccard(shingles(asked.question, 1))
        by_pairs = self.pairs.jaccard(shingles(asked.question, 2))
        by_turns = self.turns.jaccard(shingles(asked.turns, 2))
        return np.maximum(by_pairs, np.minimum(by_words, by_turns))


@dataclass(frozen=True)
class _Asked:
    """The words by which the guard compares a row.

    Attributes:
        question: those of its question; of a text all of them.
        turns: those of all that is asked, the documents of a prompt included.
        is_text: whether it is a text, which asks nothing.
    """

    question: list[str]
    turns: list[str]
    is_text: bool


def _asked(row: Chat) -> _Asked:
    if row.text or not (row.messages or row.prompt.strip()):
        return _Asked(words(row.content), [], is_text=True)
    turns = [message["content"] for message in row.messages if message["role"] == "user"] or [row.prompt]
    questions = []
    for turn in turns:
        marked = marked_question(turn)
        questions.append(marked[1] if marked else turn)
    return _Asked(words("\n".join(questions)), words("\n".join(turns)), is_text=False)


class _Table:
    """The shingles of N rows in one sorted array, and beside each the row that it is of."""

    def __init__(self, sets: Sequence[np.ndarray]):
        self.sizes = np.array([len(hashes) for hashes in sets])
        hashes = np.concatenate(sets)
        owners = np.repeat(np.arange(len(sets)), self.sizes)
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.owners = owners[order]

    def shared(self, mine: np.ndarray) -> np.ndarray:
        """Count the shingles that each row has in common with a set, shape (N,)."""
        # Equal hashes lie side by side: from begin up to end are the rows that have the same shingle.
        begin = np.searchsorted(self.hashes, mine, "left")
        end = np.searchsorted(self.hashes, mine, "right")
        owners = [self.owners[begin[i] : end[i]] for i in np.flatnonzero(end > begin)]
        none = np.empty(0, np.intp)  # concatenate needs at least one array
        return np.bincount(np.concatenate([none, *owners]), minlength=len(self.sizes))

    def jaccard(self, mine: np.ndarray) -> np.ndarray:
        """Compute J of each row and a set, shape (N,)."""
        shared = self.shared(mine)
        return shared / np.maximum(self.sizes + len(mine) - shared, 1)

    def shares(self, mine: np.ndarray) -> np.ndarray:
        """Compute the share of the smaller set that the other one has, for each row, shape (N,)."""
        return self.shared(mine) / np.maximum(np.minimum(self.sizes, len(mine)), 1)


class Repeats:
    """Find rows that repeat an earlier row, exactly or nearly.

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
        """Say why a row is left out: ``"duplicate"`` or ``"near duplicate"``; ``None`` for the first of its kind."""
        found = words(row.content)
        same = digest(found)
        if same in self.seen:
            return "duplicate"
        if self.bands is not None:
            signature = sign(found)
            # Rows that share a band are only candidates; their whole signatures decide.
            if any(signature.jaccard(self.signatures[key]) >= NEAR for key in self.bands.query(signature)):
                return "near duplicate"
            self.bands.insert(len(self.signatures), signature, check_duplication=False)
            self.signatures.append(signature)
        self.seen.add(same)
        return None


def sign(found: Sequence[str]) -> Any:
    """Compute the MinHash signature of a row's first words.

    Returns:
        ``datasketch.LeanMinHash`` of 128 numbers; of two the share that is equal estimates J, with a standard deviation
        of at most 1 / (2 sqrt(128)) = 0.044.
    """
    # It takes half a second to import, and only near duplicates need it.
    from datasketch import LeanMinHash, MinHash

    hashes = shingles(found[:SIGNED], ROW)
    signature = MinHash(num_perm=PERMUTATIONS, hashfunc=lambda value: value)
    signature.update_batch((hashes >> np.uint64(32)).astype(np.uint32))  # datasketch permutes numbers of 32 bits
    return LeanMinHash(signature)
