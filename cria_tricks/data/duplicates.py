r"""Find texts that are the same or nearly the same: duplicates in the training set, and leaked evaluation rows.

A shingle is a sequence of n consecutive words. The similarity of two texts is the Jaccard similarity J of their sets of
shingles A and B: the shingles that both have, divided by those that at least one has (Broder 1997,
doi:10.1109/SEQUEN.1997.666900)::

    J(A, B) = |A and B| / |A or B|

Evaluation rows are few, so :class:`Guard` computes J for each of them. Training rows are many, and comparing each with
each would take too long. So :class:`Repeats` uses MinHash and bands (Leskovec, Rajaraman, Ullman, Mining of Massive
Datasets, chapter 3). A MinHash signature is 128 numbers that represent a set; the share of equal numbers in two
signatures is J on average. Signatures are cut into bands, and only rows with an equal band are compared.
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
FACTOR = 0x9E3779B97F4A7C15
"""The multiplier of the hash: an odd 64-bit number, 2^64 divided by the golden ratio, as in Fibonacci hashing."""

TEXT = 8
"""Words in a shingle when texts are compared: eight consecutive words are hardly ever the same by chance."""
LEAK = 0.5
"""The similarity from which a training row counts as an evaluation row. Of the 27 evaluation rows of the Kwanzaa data,
8 have such a row in training: two with the same question, six with another name or subject in it ("How many people
celebrate Kwanzaa in UK?", where training has France). The next similar rows, from 0.46 down, use the same words to ask
something else."""
ROW = 5
"""Words in a shingle when near duplicates among training rows are searched."""
NEAR = 0.8
"""The similarity from which a training row counts as a near duplicate of another."""
SIGNED = 4000
"""A row's signature is computed from its first 4,000 words at most."""
PERMUTATIONS = 128
"""Numbers in a MinHash signature: 16 bands of 8."""
BANDS = 16
IN_BAND = 8
"""Numbers in a band. Two rows of similarity s have an equal band with probability 1 - (1 - s^8)^16: 0.95 at s = 0.8,
and 0.06 at s = 0.5."""


def words(text: str) -> list[str]:
    """Split a text into its words, in lower case. A text without words, as of emoji, is split at its spaces."""
    return _WORD.findall(text.lower()) or text.split()


def shingles(found: Sequence[str], size: int) -> np.ndarray:
    """Hash each distinct shingle of a text.

    Args:
        found: the text's words.
        size: words in a shingle. A shorter text has one shingle, of all its words; an empty text has none.

    Returns:
        64-bit hashes in ascending order, shape (N,), uint64; the same in every process.
    """
    return np.unique(sequences(found, size))


def sequences(found: Sequence[str], size: int) -> np.ndarray:
    """Hash each sequence of so many words, in the text's order; the arguments are those of :func:`shingles`."""
    if not found:
        return _NOTHING
    word_hashes = np.fromiter((zlib.crc32(word.encode()) for word in found), np.uint64, len(found))
    size = min(size, len(found))
    # Hash all sequences at once: step i mixes the i-th word of each sequence into its hash.
    mixed = np.zeros(len(found) - size + 1, np.uint64)
    for place in range(size):
        # Without the 1, a word of hash 0 at the beginning of a sequence would leave its hash at 0.
        mixed = (mixed + word_hashes[place : place + len(mixed)] + np.uint64(1)) * np.uint64(FACTOR)
    # In a product, a bit changes only the bits above it. So the upper bits are mixed into the lower ones once.
    return mixed ^ (mixed >> np.uint64(29))


def digest(found: Iterable[str]) -> int:
    """Hash a text's words, in their order, to a 64-bit number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(" ".join(found).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Leak:
    """A training row that is the same as an evaluation row, or nearly.

    Attributes:
        row: file and line of the training row.
        held_out: file and line of the evaluation row.
        similarity: how similar they are, up to 1. Two texts have similarity 1 also if one contains the other.
        same: whether their words, or those of their questions, are the same.
    """

    row: str
    held_out: str
    similarity: float
    same: bool = False


COMMON = 3
"""A word pair that stands in so many evaluation rows, and in a fifth of them, belongs to an instruction that they
share. It tells nothing about one of them."""


class Guard:
    """Find training rows that are the same as an evaluation row, or nearly.

    Two chats are compared by the user's turns, because in data such as Kwanzaa's the form of the answers is the same in
    all rows. There the retrieved documents are the same in many rows, too. So a turn's question is what comes after
    ``Query:`` or ``Question:``, or the whole turn if it has no such mark. The similarity of two chats is the larger of:

    - J of the word pairs (two consecutive words) in their questions;
    - the smaller of J of the words in their questions and J of the word pairs in their whole turns, with documents.

    A word pair that many evaluation rows have (:data:`COMMON`) is left out, so that rows which share an instruction do
    not leak each other.

    So "What does Umoja ask?" is near "What does Nia ask?" only if the documents are similar. A row with a completion is
    compared by its prompt. Two texts are compared by the share of the smaller one's shingles that the other has, so
    that a page of a book is found in the book.

    Args:
        rows: the evaluation rows.
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
            # Each table has an entry for every row: texts have empty ones in the tables of chats, and vice versa.
            texts.append(shingles(asked.question, TEXT) if asked.is_text else _NOTHING)
            questions.append([] if asked.is_text else asked.question)
            turns.append([] if asked.is_text else asked.turns)
        self.texts = Table(texts)
        self.words = Table([shingles(question, 1) for question in questions])
        # Each question counts once, so that a row which is there three times is no instruction.
        different = {digest(question): question for question in questions}
        self.common = _common([shingles(question, 2) for question in different.values()])
        self.pairs = Table([self._telling(question) for question in questions])
        self.turns = Table([self._telling(turn) for turn in turns])

    def find(self, row: Chat) -> Leak | None:
        """Find the evaluation row that is most similar to a training row; ``None`` if none is similar enough."""
        asked = _asked(row)
        same = self.same.get(digest(asked.question))
        if same is not None:
            return Leak(row.where, self.rows[same].where, 1.0, same=True)
        similarities = self._similarities(asked)
        number = int(similarities.argmax())
        similarity = float(similarities[number])
        if similarity < LEAK:
            return None
        return Leak(row.where, self.rows[number].where, similarity)

    def _similarities(self, asked: "_Asked") -> np.ndarray:
        """Compute the similarity of each of the N evaluation rows, shape (N,)."""
        if asked.is_text:
            return self.texts.shares(shingles(asked.question, TEXT))
        by_words = self.words.jaccard(shingles(asked.question, 1))
        by_pairs = self.pairs.jaccard(self._telling(asked.question))
        by_turns = self.turns.jaccard(self._telling(asked.turns))
        return np.maximum(by_pairs, np.minimum(by_words, by_turns))

    def _telling(self, found: Sequence[str]) -> np.ndarray:
        """The word pairs that tell something about a row."""
        return np.setdiff1d(shingles(found, 2), self.common, assume_unique=True)


def _common(sets: Sequence[np.ndarray]) -> np.ndarray:
    """Return the hashes that stand in many of the sets (:data:`COMMON`), in ascending order."""
    hashes, times = np.unique(np.concatenate([_NOTHING, *sets]), return_counts=True)
    return hashes[times >= max(COMMON, len(sets) / 5)]


@dataclass(frozen=True)
class _Asked:
    """The words by which :class:`Guard` compares a row.

    Attributes:
        question: the words of its questions; for a text, all words.
        turns: the words of the user's whole turns or of the prompt, documents included; empty for a text.
        is_text: whether it is a text, or a completion with an empty prompt: then there is no question.
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


class Table:
    """The shingles of N rows in one sorted array, and in a second array the row that each one comes from."""

    def __init__(self, sets: Sequence[np.ndarray]):
        self.sizes = np.array([len(hashes) for hashes in sets])
        hashes = np.concatenate(sets)
        owners = np.repeat(np.arange(len(sets)), self.sizes)
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.owners = owners[order]

    def shared(self, mine: np.ndarray) -> np.ndarray:
        """Count the shingles that each row has in common with a set, shape (N,)."""
        # Equal hashes are neighbours in the sorted array: begin to end are the rows that have the same shingle.
        begin = np.searchsorted(self.hashes, mine, "left")
        end = np.searchsorted(self.hashes, mine, "right")
        owners = [self.owners[begin[i] : end[i]] for i in np.flatnonzero(end > begin)]
        none = np.empty(0, np.intp)  # concatenate needs at least one array
        return np.bincount(np.concatenate([none, *owners]), minlength=len(self.sizes))

    def jaccard(self, mine: np.ndarray) -> np.ndarray:
        """Compute J of a set and each row, shape (N,)."""
        shared = self.shared(mine)
        return shared / np.maximum(self.sizes + len(mine) - shared, 1)

    def shares(self, mine: np.ndarray) -> np.ndarray:
        """Compute for a set and each row which share of the smaller one the larger one has, too, shape (N,)."""
        return self.shared(mine) / np.maximum(np.minimum(self.sizes, len(mine)), 1)


class Repeats:
    """Find rows that repeat an earlier row which was kept, exactly or nearly.

    Exactly means that the rows are equal: ``x = a - b`` does not repeat ``x = a + b``.

    Args:
        near: whether rows that are nearly the same count as repeats, too. Then each row that is not left out takes some
            kilobytes of memory, for its signature.
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
        """Return why a row is left out: ``"duplicate"`` or ``"near duplicate"``; ``None`` if it repeats none."""
        same = digest([row.key])
        if same in self.seen:
            return "duplicate"
        if self.bands is not None:
            signature = sign(words(row.content))
            # Rows that share a band are only candidates; their whole signatures decide.
            if any(signature.jaccard(self.signatures[key]) >= NEAR for key in self.bands.query(signature)):
                return "near duplicate"
            self.bands.insert(len(self.signatures), signature, check_duplication=False)
            self.signatures.append(signature)
        self.seen.add(same)
        return None


def sign(found: Sequence[str]) -> Any:
    """Compute the MinHash signature of a row from its first words.

    Returns:
        ``datasketch.LeanMinHash`` of 128 numbers. The share of equal numbers in two signatures estimates J, with a
        standard deviation of at most 1 / (2 sqrt(128)) = 0.044.
    """
    # It takes half a second to import, and only near duplicates need it.
    from datasketch import LeanMinHash, MinHash

    hashes = shingles(found[:SIGNED], ROW)
    signature = MinHash(num_perm=PERMUTATIONS, hashfunc=lambda value: value)
    signature.update_batch((hashes >> np.uint64(32)).astype(np.uint32))  # datasketch takes 32 bits: the upper half
    return LeanMinHash(signature)
