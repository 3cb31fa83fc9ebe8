"""Read plain text files: leave out Project Gutenberg's licence, and cut long texts into pieces.

Each file is one document. Project Gutenberg puts its licence before a line ``*** START OF ... GUTENBERG`` and behind a
line ``*** END OF ... GUTENBERG``. If the first line is near the beginning of the file, the body begins after it. If the
second is near the end of the file, the body ends before it. Each works without the other; without both, the body is the
whole file. A body of more than ``PIECE`` bytes is cut into pieces, at blank lines where possible, and each piece is a
document of its own. So a stream can read one piece at a time.
"""

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import Chat

PIECE = 2**20
"""The most bytes in a piece. 1 MiB of English is about a quarter of a million tokens, and longer than most books."""
EDGE = 2**17
"""How many bytes at each end of a file are searched for the lines beside the licence, which has about 20,000 bytes."""

_BEGINS = re.compile(rb"^\*\*\* ?START OF[^\r\n]*GUTENBERG[^\r\n]*\r?\n", re.MULTILINE)
_ENDS = re.compile(rb"^\*\*\* ?END OF[^\r\n]*GUTENBERG", re.MULTILINE)


@dataclass(frozen=True)
class Span:
    """A part of a file: the bytes from ``begin`` up to ``end``."""

    path: str
    begin: int
    end: int


def files(path: Path) -> list[Path]:
    """List the text files in a folder and in all folders below it, sorted by path; for a file, list it alone.

    Raises:
        BadInput: if the folder has no text file.
    """
    found = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not found:
        raise BadInput(f"data {path}: the folder holds no .txt file; name one that does, or a file of rows")
    return found


def spans(path: Path, piece: int = PIECE) -> Iterator[Span]:
    """Cut the body of a file into pieces.

    Args:
        path: a text file.
        piece: the most bytes in a piece. Only a piece of a single character may be longer, if the character is.

    Raises:
        BadInput: if it cannot be read.
    """
    try:
        size = path.stat().st_size
        if not size:  # mmap cannot map an empty file
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at, end = _body(content, size)
            while at < end:
                until = end
                if end - at > piece:
                    until = _cut(content, at, at + piece)
                yield Span(str(path), at, until)
                at = until
    except OSError as error:
        raise BadInput(f"data {path}: cannot be read: {error.strerror}") from None


def _body(content: mmap.mmap, size: int) -> tuple[int, int]:
    """Find the bytes at which the text begins and ends, without Project Gutenberg's licence."""
    # A text may contain such lines itself, so the body reaches from the first beginning to the last end.
    licence_before = _BEGINS.search(content, 0, EDGE)
    licences_behind = list(_ENDS.finditer(content, max(0, size - EDGE)))
    begin = licence_before.end() if licence_before else 0
    end = licences_behind[-1].start() if licences_behind else size
    return begin, end


def _cut(content: mmap.mmap, begin: int, end: int) -> int:
    """Find the byte at which to cut a piece: after the last blank line in its second half.

    A cut in the first half would make the piece short. Without a blank line in the second half, cut after its last line
    break; without that, between two characters.
    """
    for mark in (b"\n\n", b"\n\r\n", b"\n"):
        found = content.rfind(mark, (begin + end) // 2, end)
        if found >= 0:
            return found + len(mark)
    character = end
    while character > begin and _is_inside(content, character):
        character -= 1
    if character > begin:
        return character
    while end < len(content) and _is_inside(content, end):  # the first character is longer than the piece
        end += 1
    return end


def _is_inside(content: mmap.mmap, place: int) -> bool:
    """Tell whether a byte continues a character of UTF-8 that an earlier byte begins."""
    return content[place] & 0xC0 == 0x80


def read(span: Span) -> Chat | None:
    """Read a piece as a document; ``None`` if it holds only whitespace.

    Raises:
        BadInput: if it is not UTF-8, or cannot be read.
    """
    try:
        with open(span.path, "rb") as file:
            file.seek(span.begin)
            text = file.read(span.end - span.begin).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"data {span.path}: not UTF-8 text (byte {span.begin + error.start})") from None
    except OSError as error:
        raise BadInput(f"data {span.path}: cannot be read: {error.strerror}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").strip()
    if not text:
        return None
    where = f"{span.path} (bytes {span.begin} to {span.end})"
    return Chat((), "", "", where, text)  # no turns, prompt or completion: a text row, trained on all of it
