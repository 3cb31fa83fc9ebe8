"""Train on token shards: read each row through a memory map, when the run asks for it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import Tally
from cria_tricks.data.prepared.layout import SETTINGS, VERSION, identity, index_file, tokens_file
from cria_tricks.data.sources import PREPARED, DataSource
from cria_tricks.data.tokens import TokenRow, TokenRows, labelled
from cria_tricks.settings import Data


class TokenShards:
    """A folder of token shards. Opening it reads two small files, and the size of each shard.

    Args:
        folder: the folder that ``cria prepare`` has written.

    Attributes:
        about: what ``prepared.json`` says.
        sha256: the hash of the manifest, so of all files.
        description: one line for the report and the model card.

    Raises:
        BadInput: if a file is missing or has another size than was written, or if its description cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.about: dict[str, Any] = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
            listed = atomic_files.listed(folder)
            self.sha256 = atomic_files.entry(folder / atomic_files.MANIFEST)["sha256"]
            cut = [name for name, entry in listed.items() if (folder / name).stat().st_size != entry["bytes"]]
        except OSError as error:
            raise BadInput(f"data.train={folder}: {error}; prepare it again with cria prepare") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not JSON, or another JSON
            what = f"{PREPARED} or {atomic_files.MANIFEST} is damaged"
            raise BadInput(f"data.train={folder}: {what}; prepare it again with cria prepare") from None
        # The sizes come first: a prepared.json that was changed may have no version.
        if cut or self.about["version"] != VERSION:
            what = f"{cut[0]} has another size than was written" if cut else "is of another version"
            raise BadInput(f"data.train={folder}: {what}; prepare it again with cria prepare")
        self.dtype = np.dtype(self.about["dtype"])
        self.description = (
            f"{folder.name}, {self.about['documents']:,} documents, {self.about['tokens']:,} tokens of "
            f"{self.about['tokenizer']['of']}, made of {self.about['source']['description']}"
        )

    def rows(self, data: Data, held_out: DataSource, tokenizer: Any) -> "MappedRows":
        """Return the training rows, as :func:`cria_tricks.data.prepare.train_rows` would make them of the texts.

        Args:
            data: the run's settings of the data.
            held_out: the evaluation rows.
            tokenizer: the model's tokenizer.

        Raises:
            BadInput: if the shards were made with another tokenizer, other settings or for other evaluation rows.
        """
        where = f"data.train={self.folder}"
        if self.about["tokenizer"]["sha256"] != identity(tokenizer):
            raise BadInput(
                f"{where}: its tokens are of the tokenizer of {self.about['tokenizer']['of']}, and this model's is "
                "another; prepare the texts for this model with cria prepare"
            )
        for name in SETTINGS:
            then = self.about["settings"][name]
            if then != getattr(data, name):
                raise BadInput(
                    f"{where}: was prepared with data.{name}={then}, and this run has {getattr(data, name)}; set "
                    f"data.{name}={then}, or prepare the texts again with cria prepare"
                )
        if data.leakage != "ignore" and self.about["eval_sha256"] != held_out.sha256:
            raise BadInput(
                f"{where}: was compared with other evaluation rows than those of data.eval={data.eval}, so rows of "
                "these may be in it; name those, or prepare the texts again with cria prepare"
            )
        tally = Tally(self.about["steps"], self.about["kinds"])
        return MappedRows(Rows(self, data.max_length, data.overlap), 0, 0, tally)

    def tokens(self, shard: int, begin: int, end: int) -> list[int]:
        """Read some tokens of a shard. The file is mapped for this moment only, so no page stays with the process."""
        path = self.folder / tokens_file(shard)
        offset = begin * self.dtype.itemsize
        ids: list[int] = np.memmap(path, self.dtype, "r", offset, (end - begin,)).tolist()
        return ids

    def ends(self) -> list[np.ndarray]:
        """Read where each document ends in its shard [tokens], an array for each shard."""
        shards = range(len(self.about["shards"]))
        return [np.fromfile(self.folder / index_file(shard), "<u8").astype(np.int64) for shard in shards]


class Rows(Sequence[TokenRow]):
    """The rows of all documents, each read from its shard when it is asked for.

    It keeps three numbers of 8 bytes in memory for each document.

    Args:
        shards: where the tokens are.
        length: the most tokens of a row.
        overlap: how many tokens of the row before are repeated.
    """

    def __init__(self, shards: TokenShards, length: int, overlap: int):
        self.shards = shards
        self.length = length
        self.overlap = overlap
        by_shard = shards.ends()
        self.first_document = np.cumsum([0, *map(len, by_shard)])  # of each shard
        self.lengths = np.concatenate([np.diff(ends, prepend=0) for ends in by_shard])
        self.begins = np.concatenate(by_shard) - self.lengths
        # After the first row, each row has length - overlap new tokens.
        more = np.maximum(self.lengths - length, 0)
        self.rows_until = np.cumsum(1 + -(-more // (length - overlap)))  # the rows of all documents up to each one

    def __len__(self) -> int:
        return int(self.rows_until[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # also for negative numbers; too large a number is an IndexError
        document = int(np.searchsorted(self.rows_until, number, "right"))
        before = int(self.rows_until[document - 1]) if document else 0
        shard = int(np.searchsorted(self.first_document, document, "right")) - 1
        begin = (number - before) * (self.length - self.overlap)
        end = min(begin + self.length, int(self.lengths[document]))
        unlabelled = self.overlap if begin else 1
        start = int(self.begins[document])
        return labelled(self.shards.tokens(shard, start + begin, start + end), unlabelled)


@dataclass(frozen=True)
class MappedRows(TokenRows):
    """Rows of token shards; what :class:`TokenRows` counts row by row is computed from the documents' lengths."""

    rows: Any

    @property
    def tokens(self) -> int:
        repeated = (len(self.rows) - len(self.rows.lengths)) * self.rows.overlap
        return int(self.rows.lengths.sum()) + repeated

    @property
    def highest_id(self) -> int:
        return int(self.rows.shards.about["highest_id"])

    @property
    def trained_tokens(self) -> int:
        return int(self.rows.lengths.sum()) - len(self.rows.lengths)  # all but the first of each document

    @property
    def longest(self) -> int:
        return min(self.rows.length, int(self.rows.lengths.max()))

    def most_trained(self, batch_size: int) -> int:
        rows = self.rows
        new = rows.length - rows.overlap  # what a row after a document's first one trains, if it is full
        first = np.minimum(rows.lengths, rows.length) - 1
        more = np.maximum(rows.lengths - rows.length, 0)
        full = np.full(min(batch_size, int((more // new).sum())), new)
        rests = more % new
        return int(np.sort(np.concatenate([first, full, rests[rests > 0]]))[-batch_size:].sum())
