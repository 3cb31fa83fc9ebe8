"""Rows in a mapped file are those of the list, whatever reads them, and leave nothing behind."""

import tracemalloc

import numpy as np
import pytest

from cria_tricks.common.cache import cache_folder
from cria_tricks.common.errors import BadInput, Unwritten
from cria_tricks.data import table
from cria_tricks.data.rows import Chat
from cria_tricks.data.table import mapped
from cria_tricks.data.tokens import Tokenized, listed


class Numbers:
    """A tokenizer of one token a word, each a number."""

    eos_token_id = 1

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": list(map(int, text.split()))}


def tokenized(rows: int = 7, length: int = 8) -> Tokenized:
    """Completions and texts in turn; the texts become several rows."""
    words = [" ".join(map(str, range(2, 6 + number))) for number in range(rows)]
    chats = (Chat((), "2", text, "x") if len(text) % 2 else Chat((), "", "", "x", text) for text in words)
    return Tokenized(chats, Numbers(), length, "drop")


@pytest.mark.parametrize("at_once", [1000, 2])
def test_they_are_the_rows_of_the_list(at_once, monkeypatch):
    monkeypatch.setattr(table, "AT_ONCE", at_once)
    found, wanted = mapped(tokenized(40)), listed(tokenized(40))
    assert list(found.rows) == wanted.rows
    assert found.rows[3:5] == wanted.rows[3:5]
    assert found.rows[-1] == wanted.rows[-1]
    assert all(-100 in row["labels"] for row in wanted.rows)
    assert found.dropped == wanted.dropped > 0
    assert found.tally.kinds == wanted.tally.kinds
    for name in ("count", "tokens", "trained_tokens", "longest", "highest_id"):
        assert getattr(found, name) == getattr(wanted, name) > 0, name
    assert found.most_trained(3) == wanted.most_trained(3)
    assert np.array_equal(found.lengths, wanted.lengths)


def test_memory_does_not_grow_with_the_rows():
    def peak(rows: int) -> int:
        chats = (Chat((), "2", "3 " * 500, "x") for _ in range(rows))
        tracemalloc.start()
        found = mapped(Tokenized(chats, Numbers(), 1000))
        assert sum(len(row["input_ids"]) for row in found.rows) == 502 * rows
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(100)  # imports
    few, many = peak(500), peak(3000)
    assert many - few < 2500 * 502, "less than a byte a token; lists take 44"


def test_nothing_stays_on_the_disk():
    rows = mapped(tokenized()).rows
    assert list((cache_folder() / "tokens").iterdir()) == []
    assert len(rows[0]["input_ids"]) > 0, "but it can be read"


def test_a_disk_that_cannot_be_written_ends_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unwritten, match="cannot be written: Not a directory"):
        mapped(tokenized())


def test_no_rows_are_refused():
    with pytest.raises(BadInput, match="all 3 rows are longer than data.max_length=3"):
        mapped(Tokenized([Chat((), "2", "3 4 5", "x")] * 3, Numbers(), 3, "drop"))
