"""Alike is what people would call alike: an evaluation row under another name, a text with a changed word."""

import re
from dataclasses import replace

import pytest

from cria_tricks.data import sources
from cria_tricks.data.chat import Chat, read_jsonl
from cria_tricks.data.similar import LEAK, NEAR, Guard, Repeats, shingles, sign, words


def chat(user: str, answer: str = "An answer.", where: str = "here") -> Chat:
    return Chat(({"role": "user", "content": user}, {"role": "assistant", "content": answer}), "", "", where)


def text(content: str, where: str = "here") -> Chat:
    return Chat((), "", "", where, content)


SLOTS = [
    ("Ujima", "Imani"), ("Montgomery", "Tallahassee"), ("NAACP", "SNCC"), ("mkeka", "kinara"), ("Raisin", "Fig"),
    ("Greensboro", "Nashville"), ("Voting Rights", "Housing Rights"), (r"\b(1[89])\d\d\b", r"\g<1>77"),
]  # fmt: skip


def slot_paraphrases(row: Chat) -> list[Chat]:
    """The row with another name or number wherever there was one."""
    user = [message["content"] for message in row.messages if message["role"] == "user"][-1]
    changed = [re.sub(pattern, other, user) for pattern, other in SLOTS]
    return [
        replace(row, messages=({"role": "user", "content": new}, row.messages[-1])) for new in changed if new != user
    ]


@pytest.fixture(scope="module")
def ours() -> dict[str, list[Chat]]:
    return {part: sources.find("nguzo_saba", part).rows for part in ("train", "eval")}


def test_every_planted_evaluation_row_is_found_whatever_its_answer_and_spelling(ours):
    guard = Guard(ours["eval"])
    for row in ours["eval"]:
        assert guard.find(row).similarity == 1
        user = [message["content"] for message in row.messages if message["role"] == "user"][-1]
        question = user.rpartition("Question: ")[2]
        leak = guard.find(chat(f"Other documents.\n\nQuery: {question.upper()} ?!", "Something else."))
        assert (leak.similarity, leak.held_out) == (1, row.where)


def test_every_planted_paraphrase_by_slot_is_found(ours):
    guard, planted = Guard(ours["eval"]), 0
    for row in ours["eval"]:
        for paraphrase in slot_paraphrases(row):
            planted += 1
            leak = guard.find(paraphrase)
            assert leak is not None, paraphrase.messages
            assert leak.held_out == row.where
    assert planted >= 16


def test_our_own_training_rows_are_no_evaluation_rows(ours):
    guard = Guard(ours["eval"])
    assert [guard.find(row) for row in ours["train"]] == [None] * len(ours["train"])


def test_what_the_guard_finds_in_the_real_data(real_data):
    """Two questions are in both parts; six of evaluation have one in training with another name or subject in it."""
    train, held_out = (read_jsonl(real_data / f"kwanzaa_{part}.jsonl") for part in ("train", "eval"))
    guard = Guard(held_out)
    assert sum(guard.find(row) is not None for row in train) == 15
    alone = [[leak for row in train if (leak := Guard([one]).find(row))] for one in held_out]
    assert sum(any(leak.similarity == 1 for leak in leaks) for leaks in alone) == 2
    assert sum(bool(leaks) for leaks in alone) == 8


def test_another_question_on_the_same_documents_is_another_row():
    documents = "[1] Baraza: The kinara of Amani Hall holds seven candles. Ruth Adeyemi carved it in 1969.\n\n"
    guard = Guard([chat(f"{documents}Question: Who carved the kinara of Amani Hall?")])
    assert guard.find(chat(f"{documents}Question: How many candles are there?")) is None
    assert guard.find(chat("[1] Other.\n\nQuestion: Who carved the kinara of Amani Hall?")).similarity == 1


def test_a_page_of_a_book_is_in_the_book():
    book = " ".join(f"word{number}" for number in range(2000))
    page = " ".join(f"word{number}" for number in range(700, 900))
    other = " ".join(f"other{number}" for number in range(200))
    assert Guard([text(page)]).find(text(book)) is not None
    assert Guard([text(book)]).find(text(page)) is not None
    assert Guard([text(page), text(book)]).find(text(other)) is None


@pytest.mark.parametrize("row", [text("?!"), chat("..."), Chat((), "", " ?", "here")])
def test_rows_without_a_word_do_not_break_it(row):
    assert Guard([text("A text of a few words.")]).find(row) is None
    assert Guard([row, text("A text of a few words.")]).find(text("A text of a few words.")).similarity == 1
    assert Repeats(near=True).reason(row) is None


def test_the_guard_computes_the_similarity_of_two_sets():
    guard = Guard([chat("one two three four five six seven"), chat("nothing like it at all")])
    leak = guard.find(chat("one two three four five six eight"))
    assert leak.similarity == pytest.approx(5 / 7)
    assert guard.find(chat("one two three")) is None
    assert 2 / 6 < LEAK < 5 / 7


def test_shingles_are_the_different_runs_of_words():
    assert len(shingles(words("a b a b a"), 2)) == 2
    assert len(shingles(words("a b"), 5)) == 1
    assert len(shingles([], 5)) == 0
    assert set(shingles(words("x a b"), 2)) & set(shingles(words("a b y"), 2)) == set(shingles(words("a b"), 2))
    assert not set(shingles(words("a b"), 2)) & set(shingles(words("b a"), 2))


def test_exact_repeats_are_told_from_near_ones():
    long = " ".join(f"word{number % 97} and{number}" for number in range(300))
    changed = long.replace("word3 ", "another ")
    for near in (False, True):
        repeats = Repeats(near)
        assert repeats.reason(text(long)) is None
        assert repeats.reason(text(long.upper() + "!")) == "duplicate"
        assert repeats.reason(text(changed)) == ("near duplicate" if near else None)
        assert repeats.reason(text(" ".join(reversed(long.split())))) is None


def test_the_signature_estimates_the_similarity():
    """Within four standard deviations of 128 numbers, and equal in every process."""
    base = [f"w{number}" for number in range(1000)]
    for same in (0.95, 0.5):
        other = base[: int(1000 * same)] + [f"v{number}" for number in range(1000 - int(1000 * same))]
        mine, its = set(shingles(base, 5)), set(shingles(other, 5))
        true = len(mine & its) / len(mine | its)
        assert abs(sign(base).jaccard(sign(other)) - true) < 4 * (true * (1 - true) / 128) ** 0.5
    assert int(sign(words("a b c d e f")).hashvalues[0]) == 1047519915
    assert NEAR == 0.8


def test_the_same_answer_to_another_question_is_no_duplicate():
    def said(question: str) -> Chat:
        turns = (("user", question), ("assistant", "I do not know."))
        return Chat(tuple({"role": role, "content": content} for role, content in turns), "", "", "made:1")

    repeats = Repeats(near=False)
    assert repeats.reason(said("Who built the hall?")) is None
    assert repeats.reason(said("Who wrote the letter?")) is None
    assert repeats.reason(said("Who built the hall?")) == "duplicate"


def test_rows_that_share_a_band_and_little_else_both_stay():
    """Bands only choose who is compared: of rows a good half alike some share one, and none is a near duplicate."""
    base, shared = [f"w{number}" for number in range(400)], 0
    for attempt in range(12):
        other = base[:300] + [f"v{attempt}x{number}" for number in range(100)]
        repeats = Repeats(near=True)
        assert repeats.reason(text(" ".join(base))) is None
        shared += bool(repeats.bands.query(sign(other)))
        assert sign(base).jaccard(sign(other)) < NEAR
        assert repeats.reason(text(" ".join(other))) is None
    assert shared >= 1, "no pair met in a band: the test would show nothing"
