"""Text files: the licence is cut, long ones are read in pieces, and every token is trained exactly once."""

import itertools

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources, texts
from cria_tricks.data.rows import Chat
from cria_tricks.data.tokens import IGNORED, chunks, document, tokenize

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


def cut(content: bytes, piece: int, path) -> list[bytes]:
    path.write_bytes(content)
    found = list(texts.spans(path, piece))
    assert {span.path for span in found} <= {str(path)}
    assert all(before.end == after.begin for before, after in itertools.pairwise(found))
    return [content[span.begin : span.end] for span in found]


@pytest.mark.parametrize(
    ("content", "piece", "pieces"),
    [
        (b"0123456789", 10, [b"0123456789"]),
        (b"0123456789", 9, [b"012345678", b"9"]),
        (b"0123456789", 4, [b"0123", b"4567", b"89"]),
        (b"01234\n\n789", 8, [b"01234\n\n", b"789"]),  # a blank line in the second half
        (b"0123\n\n6789", 8, [b"0123\n\n", b"6789"]),
        (b"012\n\n56789", 8, [b"012\n\n", b"56789"]),
        (b"01\n\n456789", 8, [b"01\n\n4567", b"89"]),  # in the first half it is too early
        (b"0\n23\n\n6\n89", 8, [b"0\n23\n\n", b"6\n89"]),  # before a later line
        (b"01234\n6789", 8, [b"01234\n", b"6789"]),  # the last line where there is no blank one
        (b"0123\n\r\n789", 8, [b"0123\n\r\n", b"789"]),
        (b"0123\n5\n789", 8, [b"0123\n5\n", b"789"]),
        ("012é567".encode(), 4, [b"012", "é56".encode(), b"7"]),  # no character is cut in two
        ("€€€".encode(), 1, ["€".encode()] * 3),  # none even where it is longer than a piece
        ("a€b".encode(), 2, [b"a", "€".encode(), b"b"]),
        ("€€€".encode(), 4, ["€".encode()] * 3),
        ("€€€".encode(), 5, ["€".encode()] * 3),
        ("€€€".encode(), 6, ["€€".encode(), "€".encode()]),
        (b"", 8, []),
    ],
)  # fmt: skip
def test_where_a_text_is_cut(content, piece, pieces, tmp_path):
    assert cut(content, piece, tmp_path / "a.txt") == pieces


def test_a_piece_is_a_mebibyte_and_a_licence_is_near_an_end(tmp_path, monkeypatch):
    assert (texts.PIECE, texts.EDGE) == (1_048_576, 131_072)
    monkeypatch.setattr(texts, "EDGE", 64)
    begin, end = b"*** START OF THE GUTENBERG\n", b"\n*** END OF THE GUTENBERG"
    for before, behind in ((64 - len(begin), 65 - len(end)), (0, 0)):
        text = b"\n" * before + begin + b"x" * 200 + end + b"y" * behind
        assert cut(text, 1000, tmp_path / "a.txt") == [b"x" * 200 + b"\n"]
    text = b"\n" * 38 + begin + b"x" * 200 + end + b"y" * 41
    assert cut(text, 1000, tmp_path / "a.txt") == [text], "further inside it is part of the text"


def test_a_licence_is_cut_at_the_first_begin_and_the_last_end(tmp_path):
    begin, end = b"***START OF A GUTENBERG ***\n", b"***END OF A GUTENBERG"
    assert cut(begin + b"a\n" + begin + b"b\n" + end + b"\nc\n" + end, 1000, tmp_path / "a.txt") == [
        b"a\n" + begin + b"b\n" + end + b"\nc\n"
    ]
    for nothing in (begin + end, end + b"\nc"):
        assert cut(nothing, 1000, tmp_path / "a.txt") == []


def test_a_piece_names_its_bytes_and_where_it_is_no_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf one\r\ntwo \n" + b"caf\xe9")
    assert texts.read(texts.Span(str(path), 0, 14)) == Chat((), "", "", f"{path} (bytes 0 to 14)", "one\ntwo")
    assert texts.read(texts.Span(str(path), 4, 7)) == Chat((), "", "", f"{path} (bytes 4 to 7)", "one")
    assert texts.read(texts.Span(str(path), 7, 9)) is None
    with pytest.raises(BadInput) as caught:
        texts.read(texts.Span(str(path), 14, 18))
    assert str(caught.value) == f"data {path}: not UTF-8 text (byte 17)"
    for look in (texts.read, lambda span: list(texts.spans(tmp_path / "none"))):
        with pytest.raises(BadInput) as caught:
            look(texts.Span(str(tmp_path / "none"), 0, 1))
        assert str(caught.value) == f"data {tmp_path}/none: cannot be read: No such file or directory"
