"""Read the raw rows of a file, one after another, each with its place: JSON lines, JSON, CSV, TSV or Parquet.

Python's own readers are used, and pyarrow's for Parquet. ``datasets.load_dataset`` would copy each file into a cache,
read the text "5" of a CSV file as the number 5.0 and "NA" as nothing, and could not name the line of an error.
"""

import codecs
import csv
import gzip
import io
import json
import re
import reprlib
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.common.fields import repeated

Raw = Iterator[tuple[Any, str]]
"""Rows as they are in a file, each with its place."""
TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of tables in text, and what is between two columns."""
ENDINGS = (".jsonl", ".json", *TABLES, ".parquet")
"""The endings that are read; each but the last may have ``.gz`` behind it."""
AT_ONCE = 256
"""Rows of a Parquet file that are read together."""
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def raw_rows(path: Path) -> Raw:
    """Read the rows of a file.

    Raises:
        BadInput: naming the file and the line of what cannot be read.
    """
    is_zipped = path.suffix.lower() == ".gz"
    name = path.stem if is_zipped else path.name
    ending = Path(name).suffix.lower()
    try:
        if ending == ".parquet":
            yield from _parquet(path)
        elif ending in TABLES:
            yield from _table(path, TABLES[ending])
        else:
            yield from _json(path)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a gzip file that was cut short, or damaged
        why = getattr(error, "strerror", None) or first_line(error)
        raise BadInput(f"data {path}: cannot be read: {why}") from None


def _opened(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines, each with its number. A file in UTF-16 must begin with its mark."""
    with _opened(path) as file:
        is_utf_16 = file.read(2) in _UTF_16
        file.seek(0)
        if is_utf_16:
            # In a text file, lines would also end at a lone carriage return, and so the numbers would differ.
            decoded: TextIO = io.TextIOWrapper(file, "utf-16", newline="\n")
            number = 0
            try:
                for number, line in enumerate(decoded, 1):
                    yield number, line
            except UnicodeDecodeError:
                raise BadInput(f"data {path}:{number + 1}: not UTF-16 text; save the file as UTF-8") from None
            return
        # In binary, lines end at a line feed alone: U+2028 is no end of a line, and may stand inside a JSON string.
        for number, content in enumerate(file, 1):
            try:
                text = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"data {path}:{number}: not UTF-8 text (byte {error.start} of the line); save the file as UTF-8"
                ) from None
            yield number, text


def _json(path: Path) -> Raw:
    lines = ((number, line) for number, line in _lines(path) if line.strip())
    is_first = True
    for number, line in lines:
        begins = line.strip()
        # Such a line stands at the beginning of a file that is one list, or has objects over several lines.
        if is_first and (begins == "{" or begins.startswith("[")):
            yield from _objects(path)
            return
        is_first = False
        where = f"{path}:{number}"
        yield _parsed(line, where), where


def _objects(path: Path) -> Raw:
    """Read JSON values that stand one behind the other, each over as many lines as it takes; a list gives its items."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)
    text = "".join(line for _, line in _lines(path)).rstrip()  # an error at its end is then in a line that is there
    at = 0
    line = 1
    while begins := re.compile(r"\S").search(text, at):
        line += text.count("\n", at, begins.start())
        place = f"{path}:{line}"
        try:
            found, at = decoder.raw_decode(text, begins.start())
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from None
        except _Repeated as error:
            raise _twice(error, place) from None
        except (ValueError, RecursionError) as error:
            raise _no_row(error, place) from None
        line += text.count("\n", begins.start(), at)
        rows = found if isinstance(found, list) else [found]
        yield from ((row, f"{place} (row {number})" if len(rows) > 1 else place) for number, row in enumerate(rows, 1))


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line.rstrip(), object_pairs_hook=_without_repeats)
    except _Repeated as error:
        raise _twice(error, where) from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _no_row(error, where) from None


class _Repeated(Exception):
    """A JSON object has a key twice; Python's reader would silently take the last value."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _Repeated(reprlib.repr(repeated([key for key, _ in pairs])))
    return row


def _no_row(error: Exception, where: str) -> BadInput:
    """A number too long, or lists too deep; what stands behind a semicolon is Python's own advice."""
    return BadInput(f"{where}: not a row: {str(error).partition(';')[0]}")


def _twice(error: _Repeated, where: str) -> BadInput:
    return BadInput(f"{where}: the key {error} is there twice, and only one value can count; keep one")


def _table(path: Path, between: str) -> Raw:
    """Read a table whose first line names the columns. Every cell is a text; an empty one is nothing."""
    csv.field_size_limit(sys.maxsize)
    # Lines are counted as they are read, because a cell in quotes may hold line breaks.
    last = [0]

    def counted() -> Iterator[str]:
        for number, line in _lines(path):
            last[0] = number
            yield line.replace("\r\n", "\n")

    rows = csv.reader(counted(), delimiter=between, strict=True)
    names: list[str] = []
    begins = 1
    try:
        for cells in rows:
            where = f"{path}:{begins}"
            begins = last[0] + 1
            if not cells:  # a blank line
                continue
            if not names:
                names = [name.strip() for name in cells]
                if len(set(names)) < len(names):
                    raise BadInput(f"{where}: the column {repeated(names)!r} is there twice; keep one")
                continue
            if len(cells) != len(names):
                raise BadInput(f"{where}: has {len(cells)} cells, and the first line names {len(names)} columns")
            yield {name: cell or None for name, cell in zip(names, cells, strict=True)}, where
    except csv.Error as error:
        raise BadInput(f"{path}:{begins}: no row of a table: {error}") from None


def _parquet(path: Path) -> Raw:
    # It takes a while to import, and only such a file needs it.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path} row {number}"
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"data {path}: cannot be read as Parquet: {first_line(error)}") from None
