"""A stream gives every row once a pass, whoever reads it, and goes on where it was to the row."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource
from cria_tricks.data.stream import Stream
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings


class Words:
    """A tokenizer of one token a word: the word's number in the order in which words are met."""

    eos_token_id = 0

    def __init__(self):
        self.ids = {"<end>": 0}

    def __len__(self) -> int:
        return 10**6

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in text.split()]}

    def read(self, row: dict[str, list[int]]) -> str:
        back = {number: word for word, number in self.ids.items()}
        return " ".join(back[token] for token in row["input_ids"] if token)


TOKENIZER = Words()


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"Question {n}", "completion": "answer " * (n % 5) + f"end{n}"}) for n in range(97)]
    lines.insert(40, json.dumps({"text": " ".join(f"long{n}" for n in range(50))}))
    path.write_text("\n".join([*lines[:10], "", *lines[10:]]))  # an empty line, and no line break at the end
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "texts"
    path.mkdir()
    for book in range(9):
        paragraphs = [" ".join(f"b{book}p{n}w{word}" for word in range(12)) for n in range(3 + book * 4 % 11)]
        (path / f"{book}.txt").write_text("\n\n".join(paragraphs) + "\n")
    return path


def stream(path, *settings: str, world: World | None = None, held_out=(), say=print) -> Stream:
    recipe = with_settings(
        Recipe(),
        ["data.max_length=16", "data.overlap=2", "data.stream=true", "train.max_steps=1",
         f"data.train={path}", *settings],
    )  # fmt: skip
    source = sources.open_rows(str(path), "train", stream=True)
    return Stream(recipe, source, DataSource(list(held_out), ""), TOKENIZER, world or World(), say)


def key(row) -> str:
    return json.dumps([row["input_ids"], row["labels"]])


def one_pass(made: Stream) -> list[str]:
    found = []
    for row in made:
        if made.passes:
            break
        found.append(key(row))
    return found


@pytest.mark.parametrize("processes", [1, 3, 4])
@pytest.mark.parametrize("kind", ["rows", "folder"])
def test_a_pass_has_every_row_once(kind, processes, request):
    path = request.getfixturevalue(kind)
    found = [
        row for rank in range(processes) for row in one_pass(stream(path, world=World(rank, processes, processes)))
    ]
    assert max(Counter(found).values()) == 1
    said = " ".join(TOKENIZER.read({"input_ids": [t for t, label in zip(*json.loads(row), strict=True) if label >= 0]})
                    for row in found).split()  # fmt: skip
    chats = sources.find(str(path), "train").rows
    words = Counter(word for chat in chats for word in (chat.text or chat.completion).split())
    firsts = Counter(chat.text.split()[0] for chat in chats if chat.text)
    assert Counter(said) == words - firsts, "all words are trained once, but the first of a text"


def test_processes_share_the_rows_of_one(tmp_path):
    """Where each row becomes one, so many rows are the same for one process, two and four."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "completion": "x"}) + "\n" for n in range(48)))
    alone = list(map(key, islice(stream(path), 24)))
    for size in (2, 4):
        parts = [list(islice(stream(path, world=World(rank, size, size)), 24 // size)) for rank in range(size)]
        assert sorted(key(row) for part in parts for row in part) == sorted(alone)


@pytest.mark.parametrize("kind", ["rows", "folder"])
def test_it_goes_on_from_any_row_as_if_it_had_not_stopped(kind, request):
    """Also in the middle of a text, at the end of a pass and behind it, and through JSON."""
    path = request.getfixturevalue(kind)
    settings = ["data.min_words=4", "data.leakage=ignore"]
    world = World(1, 2, 2)
    whole = stream(path, *settings, world=world)
    every, states = [], []
    for row in islice(whole, 130):
        every.append(key(row))
        states.append(json.loads(json.dumps(whole.state())))
    assert whole.passes >= 1
    for stop in range(0, 120, 3):
        resumed = stream(path, *settings, world=world)
        resumed.go_on({"0": {}, **states[stop]})
        rest = iter(resumed)
        assert [key(next(rest)) for _ in range(8)] == every[stop + 1 : stop + 9], stop
        assert resumed.state() == states[stop + 8], stop


def test_another_number_of_processes_is_refused(rows):
    made = stream(rows)
    list(islice(made, 5))
    with pytest.raises(BadInput, match=r"read by 1 processes, and now there are 2; start as many as before"):
        stream(rows, world=World(0, 2, 2)).go_on(made.state())


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "not valid JSON"), ('{"prompt": 1, "completion": "x"}', "must be text"), ("[]", "must be a JSON object")],
)
def test_a_wrong_row_names_file_and_line(line, said, rows):
    lines = rows.read_text().split("\n")
    lines[70] = line
    rows.write_text("\n".join(lines))
    with pytest.raises(BadInput, match=rf"rows.jsonl:71: .*{said}"):
        list(islice(stream(rows), 200))


def test_a_process_without_rows_is_refused(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    with pytest.raises(BadInput, match="has no row for process 3"):
        next(iter(stream(path, world=World(3, 4, 4))))
    with pytest.raises(BadInput, match="3 shorter than data.min_words"):
        next(iter(stream(path, "data.min_words=9")))


def test_filters_and_guard_work_as_rows_are_read(rows):
    held_out = Chat((), "Question 3", "?", "eval:1")
    said = []
    made = stream(rows, "data.min_words=4", "data.leakage=drop", held_out=[held_out])
    assert not any("Question 3 " in TOKENIZER.read({"input_ids": json.loads(row)[0]}) for row in one_pass(made))
    steps = made.position.tally.rows
    warned = stream(rows, held_out=[held_out], say=said.append)
    one_pass(warned)
    assert warned.position.tally.rows["in the evaluation set, and kept"] >= 1
    assert len(said) == 1
    assert said[0].startswith("warning: ")
    assert steps["shorter than data.min_words"] >= 19
    assert steps["in the evaluation set"] >= 1


def test_a_stream_says_what_it_cannot_know(rows):
    made = stream(rows)
    assert (made.longest, made.most_trained(3), made.highest_id) == (16, 48, 10**6 - 1)
    assert made.source.count is None
    list(islice(made, 30))
    made.add_up(World())
    assert made.count == 30
    assert made.tokens > made.trained_tokens > 0
    assert made.rows is made


def test_the_fingerprint_sees_a_changed_byte(rows):
    def fingerprint() -> str:
        return sources.open_rows(str(rows), "train", stream=True).sha256

    before = fingerprint()
    assert fingerprint() == before
    rows.write_bytes(rows.read_bytes().replace(b"end50", b"end51"))
    assert fingerprint() != before


def test_a_hub_set_is_streamed_in_its_own_order(rows, monkeypatch):
    """The hub is played by the library's own reader of a local file."""
    import datasets

    load = datasets.load_dataset
    lines = [line for line in rows.read_text().split("\n") if line and "text" not in json.loads(line)][:96]
    rows.write_text("\n".join(lines))

    def from_file(name, split, streaming):
        assert (name, streaming) == ("owner/name", True)
        return load("json", data_files=str(rows), split=split, streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", from_file)
    whole = stream("owner/name:train")
    every, states = [], []
    for row in islice(whole, 120):
        every.append(key(row))
        states.append(json.loads(json.dumps(whole.state())))
    assert len(set(every[:96])) == 96
    assert every[96:] == every[:24], "nothing is shuffled"
    for stop in (1, 94, 95, 96, 101):
        resumed = stream("owner/name:train")
        resumed.go_on(states[stop])
        assert list(map(key, islice(resumed, 8))) == every[stop + 1 : stop + 9], stop


def test_what_all_processes_have_given_is_added_up(tmp_path):
    """Of 16 rows two are too long by one word; in the words of the tokenizer: a row has its words and an end."""
    lines = [{"prompt": "a b", "completion": " ".join(["c"] * (14 if n in (3, 7) else 13))} for n in range(16)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for overflow, cut, dropped, rows in (("truncate", 2, 0, 16), ("drop", 0, 2, 14)):
        made = stream(path, f"data.overflow={overflow}")
        list(islice(made, rows))
        assert (made.count, made.tokens, made.cut) == (0, 0, 0), "not yet"
        made.add_up(SimpleNamespace(gather=lambda state: [state, {"1": state["0"]}, {"1": state["0"]}]))
        assert (made.count, made.tokens, made.trained_tokens) == (2 * rows, 2 * rows * 16, 2 * rows * 14)
        assert (made.cut, made.dropped) == (2 * cut, 2 * dropped)
        assert made.tally.rows["read"] == 32


def test_kinds_of_rows_are_counted_once_also_over_a_stop(tmp_path):
    pair = {"prompt": "a", "completion": "b"}
    lines = [pair, {"text": "It was the best of times. " * 40}, pair]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = stream(path, "data.max_length=64")
    given, before = len(one_pass(whole)), []
    assert given > 3, "the text becomes several rows"
    for stop in range(1, given):
        part = stream(path, "data.max_length=64")
        list(islice(part, stop))
        resumed = stream(path, "data.max_length=64")
        resumed.go_on(json.loads(json.dumps(part.state())))
        list(islice(resumed, given - stop))
        resumed.add_up(World())
        before.append(resumed.tally.kinds)
    assert before == [{"completion": 2, "text": 1}] * (given - 1)
