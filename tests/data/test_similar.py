"""Alike is what people would call alike: an evaluation row under another name, a text with a changed word."""

import hashlib
import re
from dataclasses import replace

import pytest

from cria_tricks.data import duplicates, sources
from cria_tricks.data.duplicates import LEAK, NEAR, Guard, Leak, Repeats, digest, shingles, sign, words
from cria_tricks.data.rows import Chat, read_file


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
    train, held_out = (read_file(real_data / f"kwanzaa_{part}.jsonl") for part in ("train", "eval"))
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


@pytest.mark.parametrize("near", [False, True])
def test_two_rows_without_a_word_are_the_same_only_if_they_look_the_same(near):
    repeats = Repeats(near)
    assert repeats.reason(text("==>/???")) is None
    assert repeats.reason(text("😀 /+")) is None
    assert repeats.reason(text("😀 /+")) == "duplicate"
    assert Guard([chat("!!")]).find(chat("??")) is None
    assert Guard([chat("!!")]).find(chat("!! ")).similarity == 1


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
        assert repeats.reason(text(long)) == "duplicate"
        assert repeats.reason(text(long.upper() + "!")) == ("near duplicate" if near else None)
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


def test_words_and_their_digest():
    assert words("The 2nd Ujima-day, it's über_all!") == ["the", "2nd", "ujima", "day", "it", "s", "über_all"]
    assert digest(["a", "b"]) == digest(words("A, b.")) == int(hashlib.blake2b(b"a b", digest_size=8).hexdigest(), 16)
    assert digest(["b", "a"]) != digest(["a", "b"])


@pytest.mark.parametrize(
    ("trained", "similarity"),
    [
        ("one two three four", 1.0),
        ("one two three five", 0.5),  # pairs: two of four
        ("one two four", None),  # of the words three of four, but of the pairs one of four
        ("four three two one", None),  # the same words, and no pair of them
        ("one two five", None),
        ("", None),
    ],
)
def test_how_near_a_question_is(trained, similarity):
    """A row with half of the shingles is one of the evaluation's; one with less is not."""
    leak = Guard([chat("nothing like it", where="e:1"), chat("one two three four", where="e:2")]).find(chat(trained))
    assert leak == (similarity and Leak("here", "e:2", similarity, same=similarity == 1))


def test_words_count_only_as_far_as_the_documents_agree():
    documents = " ".join(f"word{number}" for number in range(20))
    guard = Guard([chat(f"{documents}\n\nQuestion: What does Umoja ask of us")])
    assert guard.find(chat(f"{documents}\n\nQuestion: What does Nia ask of us")).similarity == 5 / 7, "words: 5 of 7"
    assert guard.find(chat("Question: What does Nia ask of us")) is None
    found = guard.find(chat(f"{documents} Query: other\n\nQuestion: Of us does Nia what ask"))
    assert found.similarity == 20 / 34, "words of the last question in any order; of the whole turns' pairs 20 of 34"


@pytest.mark.parametrize(
    ("trained", "similarity"),
    [
        ("a b c d e f g h", 1.0),
        ("a b c d e f g h i", 1.0),  # the whole of the smaller one
        ("x b c d e f g h i", None),
        ("a b c d e f g", None),
    ],
)
def test_a_text_is_compared_by_runs_of_eight_words(trained, similarity):
    leak = Guard([chat("other words"), text("a b c d e f g h", where="e:2")]).find(text(trained))
    assert leak == (similarity and Leak("here", "e:2", similarity, same=trained == "a b c d e f g h"))


def test_half_of_a_texts_runs_are_enough():
    assert Guard([text("a b c d e f g h i")]).find(text("a b c d e f g h j")).similarity == 0.5
    assert Guard([text("a b c d e f g h i j")]).find(text("a b c d e f g h x y")) is None, "one of three"


def test_the_same_word_again_and_again_is_one_shingle():
    assert Guard([text("a " * 9)]).find(text("a " * 30)).similarity == 1
    assert Guard([chat("a a a")]).find(chat("a a a a")).similarity == 1


def test_of_rows_that_are_the_same_the_first_is_named():
    rows = [chat("Who is it?", where=f"e:{number}") for number in range(3)]
    assert Guard(rows).find(chat("who is it")).held_out == "e:0"
    assert Guard(rows).find(chat("who is it now")).held_out == "e:0"


def test_of_a_completion_the_prompt_is_compared_and_without_one_all_of_it():
    guard = Guard([Chat((), "one two three four", "five", "e:1"), Chat((), " ", "six seven", "e:2")])
    assert guard.find(Chat((), "one two three four", "six", "t:1")) == Leak("t:1", "e:1", 1.0, same=True)
    assert guard.find(Chat((), "", "six seven", "t:2")) == Leak("t:2", "e:2", 1.0, same=True)
    assert guard.find(Chat((), "", "five", "t:3")) is None


def test_all_turns_of_the_user_count_and_none_of_the_assistant():
    def turns(*said: str) -> Chat:
        roles = ("user", "assistant")
        return Chat(tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(said)), "", "", "here")

    guard = Guard([turns("one two", "answer", "three four")])
    assert guard.find(turns("one two", "other", "three four", "end")).similarity == 1
    assert guard.find(turns("one two", "answer", "five six")) is None


def test_the_sizes_that_near_duplicates_are_found_with(monkeypatch):
    bands = Repeats(near=True).bands
    assert (bands.b, bands.r, len(sign(["a"]).hashvalues)) == (16, 8, 128)
    asked, honest = [], duplicates.shingles
    monkeypatch.setattr(
        duplicates, "shingles", lambda found, size: asked.append((len(found), size)) or honest(found, size)
    )
    sign(["a"] * 4001)
    assert asked == [(4000, 5)]
    repeats = Repeats(near=False)
    assert (repeats.bands, repeats.reason(text("a")), repeats.signatures) == (None, None, [])


@pytest.mark.parametrize(("equal", "reason"), [(102, None), (103, "near duplicate"), (128, "near duplicate")])
def test_from_four_fifths_of_the_numbers_on_it_is_a_near_duplicate(equal, reason, monkeypatch):
    """102 of 128 are 0.797, 103 are 0.805. The two meet in a band whatever it is."""
    first = sign(words("a b c d e f"))
    values = first.hashvalues.copy()
    values[equal:] += 1
    other = type(first)(seed=first.seed, hashvalues=values, scheme=first.scheme)
    signed = iter([first, other])
    monkeypatch.setattr(duplicates, "sign", lambda found: next(signed))
    repeats = Repeats(near=True)
    assert repeats.reason(text("a")) is None
    assert repeats.reason(text("b")) == reason
    assert len(repeats.signatures) == (2 if reason is None else 1)
    assert repeats.reason(text("a")) == "duplicate"


@pytest.mark.parametrize(("one", "other"), [("x = a + b", "x = a - b"), ("I like C", "I like C++"), ("US", "us")])
def test_rows_that_differ_in_a_sign_or_a_letters_case_are_no_exact_repeats(one, other):
    repeats = Repeats(near=False)
    assert [repeats.reason(text(said)) for said in (one, other, one)] == [None, None, "duplicate"]


INSTRUCTION = "Classify the sentiment of this review as positive, negative or neutral, and answer with one word only."


def test_rows_that_share_an_instruction_are_no_leak():
    reviews = ["The soup was cold.", "A long queue outside.", "Great music tonight!", "Seats were too narrow."]
    guard = Guard([chat(f"{INSTRUCTION}\n\n{review}") for review in reviews])
    assert guard.find(chat(f"{INSTRUCTION}\n\nMy phone broke after a week.")) is None
    assert guard.find(chat(f"{INSTRUCTION}\n\nGreat music tonight!")).similarity == 1
    assert guard.find(chat(f"{INSTRUCTION}\n\nGreat music here tonight! Great music tonight!")) is not None
