"""Keep the tokens of the training rows in an Arrow file that is mapped into memory, so that memory does not grow.

A list of Python integers takes 44 bytes for a token and its label. Here a token takes 4 bytes on the disk, and one bit
says whether it is trained. The system loads the pages that are read, and drops them when memory runs short.
"""

import contextlib
import itertools
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cria_tricks.common.cache import cache_folder
from cria_tricks.common.errors import Unwritten
from cria_tricks.data.tokens import IGNORED, Tokenized, TokenRow, TokenRows

AT_ONCE = 100
"""Rows that are written together."""


class MappedRows(Sequence[TokenRow]):
    """The rows of an Arrow file, each read when it is asked for.

    Args:
        file: the file, with the columns ``input_ids`` and ``is_trained``, a list in each row.
    """

    def __init__(self, file: Path):
        # It takes a second to import, and a plan reads no table.
        from datasets import Dataset

        self.rows = Dataset.from_file(str(file))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.rows[int(index)]
        ids = row["input_ids"]
        pairs = zip(ids, row["is_trained"], strict=True)
        return {"input_ids": ids, "labels": [token if is_trained else IGNORED for token, is_trained in pairs]}


def mapped(tokenized: Tokenized) -> TokenRows:
    """Write all rows into a file of their own, and return them mapped.

    The file lies in the cache's folder, which is on a disk also where ``/tmp`` is memory. It never has a name, so the
    system frees it when the process ends, however that ends. Each process of a run writes its own, because processes on
    several machines may share no disk.

    Raises:
        BadInput: as :func:`cria_tricks.data.tokens.tokenize` does.
        Unwritten: if the disk is full.
    """
    folder = cache_folder() / "tokens"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        except OSError as error:
            raise Unwritten(folder, error.strerror or str(error), error.errno) from None
        lengths, trained, highest_id = _write(tokenized, file, folder)
        tokenized.refuse_if_empty()
        rows = MappedRows(Path(f"/dev/fd/{file.fileno()}"))
    return TokenRows(rows, tokenized.cut, tokenized.dropped, tokenized.tally, lengths, trained, highest_id)


def _write(tokenized: Tokenized, file: BinaryIO, folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Write the rows, and return what a run asks of all of them: tokens and trained tokens of each, the largest id."""
    # As above.
    import pyarrow

    schema = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32()), "is_trained": pyarrow.list_(pyarrow.bool_())})
    lengths = array("q")
    trained = array("q")
    highest_id = 0
    remaining = iter(tokenized)
    out = _or_unwritten(folder, pyarrow.ipc.new_stream, file, schema)
    while rows := list(itertools.islice(remaining, AT_ONCE)):
        ids = [row["input_ids"] for row in rows]
        is_trained = [[label != IGNORED for label in row["labels"]] for row in rows]
        _or_unwritten(folder, out.write_batch, pyarrow.record_batch([ids, is_trained], schema))
        lengths.extend(map(len, ids))
        trained.extend(map(sum, is_trained))
        highest_id = max(highest_id, *map(max, ids))
    _or_unwritten(folder, out.close)
    _or_unwritten(folder, file.flush)
    return np.array(lengths, np.int64), np.array(trained, np.int64), highest_id


def _or_unwritten(folder: Path, write: Callable[..., Any], *arguments: Any) -> Any:
    """Write, and turn a full disk into one line."""
    try:
        return write(*arguments)
    except OSError as error:
        raise Unwritten(folder, error.strerror or str(error), error.errno) from None
