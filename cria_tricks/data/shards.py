"""Open the source of a stream and read it shard by shard: a file of rows, text files, or a hub data set.

A shard is a part of the source that can be read without the rest. The library ``datasets`` divides the shards among
lanes (readers), shuffles them again for each pass, and keeps the position of each lane. The order inside a shard is
drawn in this module, from the seed and the shard's number. So no shuffle buffer of rows has to be kept in memory, and
none is lost when a run stops.

``datasets`` iterates over items. An item is small: the place of one row, or a list of pieces of texts. Only the items
that are trained on are read and parsed.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources, texts
from cria_tricks.data.rows import Chat, check_rows, parse
from cria_tricks.data.texts import Span
from cria_tricks.models import network

SHARD = 2**23
"""Bytes in a shard of rows. Of an open shard only its rows' places and their order are in memory, 16 bytes a row."""
BLOCKS = 64
"""How many blocks of a file are read for its fingerprint."""
BLOCK = 2**16
"""Bytes in such a block."""


def fingerprint(folder: Path, files: Sequence[Path]) -> str:
    """Compute a quick hash that tells files apart: of their names, sizes, and 64 blocks of 64 KiB of each.

    Args:
        folder: file names are relative to it. For a single file this is the file itself, and its name is not hashed.
        files: the files to hash.

    Returns:
        A sha256, in hexadecimal.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        name = "" if path == folder else path.relative_to(folder)
        digest.update(f"{name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(BLOCKS):  # evenly spaced, from the first bytes of the file to the last
                file.seek(max(0, (size - BLOCK) * place // (BLOCKS - 1)))
                digest.update(file.read(BLOCK))
                if size <= BLOCK:
                    break
    return digest.hexdigest()


class LineStream:
    """Stream the rows of a .jsonl file; a shard is a range of bytes, with the lines that begin in this range.

    Args:
        path: the file.
        lanes: how many lanes share it.

    Attributes:
        description: one line for the report and the model card.

    Raises:
        BadInput: if it cannot be read, or is empty.
    """

    def __init__(self, path: Path, lanes: int = 1):
        self.path = path
        self.lanes = lanes
        try:
            self.size = path.stat().st_size
            self.sha256 = fingerprint(path, [path])
        except OSError as error:
            raise BadInput(f"data {path}: cannot be read: {error.strerror}") from None
        if not self.size:
            raise BadInput(f"data {path}: no rows; one JSON object a line is expected")
        self.description = f"{path.name}, {self.size:,} bytes, streamed, fingerprint {self.sha256}"

    def __getstate__(self) -> dict[str, Any]:
        # datasets pickles the object whose method makes the items, and an open file cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "_file"}

    @cached_property
    def _file(self) -> BinaryIO:
        return self.path.open("rb")

    def shards(self) -> list[tuple[int, int, int]]:
        """Cut the file into ranges of bytes of equal size, the same number for each lane, as (number, begin, end)."""
        for_each_lane = math.ceil(self.size / (self.lanes * SHARD))
        number = self.lanes * for_each_lane
        cuts = [self.size * cut // number for cut in range(number + 1)]
        return [(shard, cuts[shard], cuts[shard + 1]) for shard in range(number)]

    def items(self, shards: Sequence[tuple[int, int, int]], seed: int) -> Iterator[dict[str, int]]:
        for shard, begin, end in shards:
            places = self._places(begin, end)
            # Drawn from seed and shard alone, so that a resumed run finds the same order.
            for index in np.random.default_rng([seed, shard]).permutation(len(places)):
                yield {"number": int(places[index])}

    def chats(self, item: dict[str, int]) -> list[Chat]:
        """Read the row of an item; an empty line gives none."""
        self._file.seek(item["number"])
        return self._read(self._file.readline(), item["number"])

    def in_order(self, shards: Sequence[tuple[int, int, int]]) -> Iterator[Chat]:
        """Read all rows of some shards in the file's order."""
        for _, begin, end in shards:
            for place in self._places(begin, end):
                yield from self.chats({"number": int(place)})

    def _read(self, line: bytes, place: int) -> list[Chat]:
        where = f"{self.path} (byte {place})"
        encoding = "utf-8-sig" if place == 0 else "utf-8"  # only a file's first line may have a byte order mark
        try:
            text = line.decode(encoding).strip()
        except UnicodeDecodeError:
            raise BadInput(f"{where}: not UTF-8 text") from None
        if not text:
            return []
        return list(check_rows([(parse(text, where), where)]))

    def _places(self, begin: int, end: int) -> np.ndarray:
        """Find the bytes from ``begin`` up to ``end`` at which a line begins: each byte that follows a line break."""
        first = [0] if begin == 0 else []  # the file's first line follows no line break
        found = [np.array(first, np.int64)]
        # If a line begins at byte b, the line break is at b - 1. So look for line breaks from begin - 1 up to end - 1.
        at = max(begin - 1, 0)
        with self.path.open("rb") as file:
            file.seek(at)
            while at < end - 1 and (block := file.read(min(2**20, end - 1 - at))):
                line_breaks = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                found.append(line_breaks + at + 1)
                at += len(block)
        return np.concatenate(found)

    def in_lines(self, message: str) -> str:
        """Replace the byte at which a line begins, in an error message, by the line's number."""
        return re.sub(rf"{re.escape(str(self.path))} \(byte (\d+)\)", lambda m: self._line(int(m[1])), message)

    def _line(self, place: int) -> str:
        number = 1
        with self.path.open("rb") as file:
            while place > 0 and (block := file.read(min(2**20, place))):
                number += block.count(b"\n")
                place -= len(block)
        return f"{self.path}:{number}"


class TextStream:
    """Stream text files; a shard is a list of pieces with at most ``texts.PIECE`` bytes together, and is one item.

    Args:
        path: a text file, or a folder of text files.
        lanes: how many lanes share them.

    Raises:
        BadInput: if there is no text in it.
    """

    def __init__(self, path: Path, lanes: int = 1):
        self.lanes = lanes
        self.files = texts.files(path)
        self.size = sum(file.stat().st_size for file in self.files)
        self.sha256 = fingerprint(path, self.files)
        if not self.size:
            raise BadInput(f"data {path}: there is no text in it")
        self.description = f"{path.name}, {len(self.files)} text files, streamed, fingerprint {self.sha256}"

    def shards(self) -> list[tuple[int, tuple[Span, ...]]]:
        """Group the files' pieces into shards, in the files' order; for small files, cut smaller pieces.

        Pieces are at most ``size`` bytes, so that about as many shards as lanes are made even of little text.
        """
        size = max(1, min(texts.PIECE, self.size // self.lanes))
        groups: list[list[Span]] = []
        room = 0  # bytes that still fit into the last group
        for file in self.files:
            for span in texts.spans(file, size):
                length = span.end - span.begin
                room -= length
                if room < 0:
                    groups.append([])
                    room = size - length
                groups[-1].append(span)
        return [(number, tuple(spans)) for number, spans in enumerate(groups)]

    def items(self, shards: Sequence[tuple[int, tuple[Span, ...]]], seed: int) -> Iterator[dict[str, Any]]:
        for shard, spans in shards:
            yield {"number": shard, "spans": spans}

    def chats(self, item: dict[str, Any]) -> Iterator[Chat]:
        for span in item["spans"]:
            row = texts.read(span)
            if row:
                yield row

    def in_order(self, shards: Sequence[tuple[int, tuple[Span, ...]]]) -> Iterator[Chat]:
        """Read all texts of some shards in the files' order."""
        for item in self.items(shards, 0):
            yield from self.chats(item)

    def in_lines(self, message: str) -> str:
        return message


class HubStream:
    """Stream a data set of the Hugging Face hub over the network, in its own order.

    Args:
        name: ``owner/name`` or ``owner/name:split``.
        lanes: how many lanes share it.

    Raises:
        BadInput: if it cannot be loaded.
    """

    def __init__(self, name: str, lanes: int = 1):
        # It takes a second to import, and only rows of the hub need it.
        from datasets import load_dataset

        self.lanes = lanes
        self.name = name
        hub_id, _, split = name.partition(":")
        split = split or "train"
        try:
            self.rows = load_dataset(hub_id, split=split, streaming=True)
        except Exception as error:  # the library raises many kinds: offline, gated, missing, unknown split
            raise BadInput(f"data.train={name}: cannot be loaded from the hub: {network.why(error)}") from None
        self.sha256 = hashlib.sha256(f"{name} {self.rows.info.version}".encode()).hexdigest()
        self.description = f"{hub_id} ({split}), streamed from the Hugging Face hub"

    def chats(self, item: dict[str, Any]) -> list[Chat]:
        return list(check_rows([(dict(item), f"{self.name} (a streamed row)")]))

    def in_lines(self, message: str) -> str:
        return message


Streamed = LineStream | TextStream | HubStream


def open_stream(name: str, lanes: int) -> Streamed:
    """Open what ``data.train`` names as a stream, without reading its rows.

    Args:
        name: as for :func:`cria_tricks.data.sources.find`.
        lanes: how many lanes share it.

    Raises:
        BadInput: if there is no such data set, or it cannot be loaded.
    """
    found = sources.place(name, "train")
    if isinstance(found, str):
        return HubStream(found, lanes)
    return open_files(found, lanes)


def open_files(found: Path, lanes: int = 1) -> LineStream | TextStream:
    """Open a file of JSON lines, a text file or a folder of texts as a stream.

    Raises:
        BadInput: if it cannot be read.
    """
    if found.is_dir() or found.suffix == ".txt":
        return TextStream(found, lanes)
    return LineStream(found, lanes)
