"""Text files: the licence is cut, long ones are read in pieces, and every token is trained exactly once."""

import itertools

import pytest

from cria_tricks.data import sources, texts
from cria_tricks.data.chat import Chat
from cria_tricks.data.tokens import IGNORED, chunks, document, tokenize
from cria_tricks.errors import BadInput

HEAD = "The Project Gutenberg eBook of Umoja\r\n\r\n*** START OF THE PROJECT GUTENBERG EBOOK UMOJA ***\r\n"
FOOT = "\r\n*** END OF THE PROJECT GUTENBERG EBOOK UMOJA ***\r\nSTART: FULL LICENSE\r\n"
BODY = "One.\r\n\r\nTwo two.\r\n\r\nThree three three.\r\n"


def test_the_licence_is_cut_off(tmp_path):
    (tmp_path / "a.txt").write_bytes(("\ufeff" + HEAD + BODY + FOOT).encode())
    [row] = sources.find(str(tmp_path / "a.txt"), "train").rows
    assert row.text == BODY.replace("\r\n", "\n").strip()


def test_a_line_of_stars_is_no_licence(tmp_path):
    text = "*** START OF THE STORY ***\n\nOnce.\n\n*** END OF THE STORY ***"
    (tmp_path / "a.txt").write_text(text)
    assert sources.find(str(tmp_path / "a.txt"), "train").rows[0].text == text


def test_a_folder_is_read_by_name_with_all_below_it(tmp_path):
    for name, text in (("b.txt", "B"), ("a/z.txt", "A"), ("a/empty.txt", ""), ("c.md", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = sources.find(str(tmp_path), "train")
    assert [row.text for row in found.rows] == ["A", "B"]
    assert "3 text files" in found.description


@pytest.mark.parametrize("text", ["é" * 1000, "a line\n" * 300, "A paragraph.\n\n" * 150, "A paragraph.\r\n\r\n" * 150])
def test_pieces_are_the_whole_text_and_none_is_too_long(text, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    found = list(texts.spans(path, piece=101))
    assert [span.begin for span in found] == [0, *(span.end for span in found[:-1])]
    assert found[-1].end == len(text.encode())
    assert max(span.end - span.begin for span in found) <= 101
    read = [texts.read(span) for span in found]  # no character is cut in two
    if "\n\n" in text or "\r\n\r\n" in text:
        assert all(row.text.endswith("paragraph.") for row in read)


def test_a_file_that_is_no_utf8_names_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadInput, match=r"a.txt: not UTF-8 text \(byte 3\)"):
        sources.find(str(tmp_path / "a.txt"), "train")


def test_a_folder_of_empty_files_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(BadInput, match="there is no text in it"):
        sources.find(str(tmp_path), "train")


@pytest.mark.parametrize(("length", "overlap"), [(8, 1), (8, 3), (8, 7), (64, 5)])
def test_every_token_but_the_first_is_trained_once(length, overlap):
    ids = list(range(100, 150))
    rows = list(chunks(ids, length, overlap))
    labels = [label for row in rows for label in row["labels"] if label != IGNORED]
    assert labels == ids[1:]
    for row in rows:
        assert len(row["input_ids"]) <= length
        assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
        assert row["labels"][0] == IGNORED  # a trained token has one before it, in its own row
    for before, after in itertools.pairwise(rows):
        assert after["input_ids"][:overlap] == before["input_ids"][-overlap:]


def test_a_text_becomes_rows_that_end_with_the_end_token(tokenizer):
    chat = Chat((), "", "", "here", "The kinara holds seven candles. " * 20)
    found = tokenize([chat], tokenizer, max_length=32, overlap=4)
    assert len(found.rows) > 3
    assert found.rows[-1]["labels"][-1] == tokenizer.eos_token_id
    assert found.trained_tokens == len(document(chat, tokenizer)) - 1
