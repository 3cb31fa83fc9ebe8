"""A stream gives every row once a pass, whoever reads it, and goes on where it was to the row."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cria_tricks.common.errors import BadInput
from cria_tricks.data import shards, texts
from cria_tricks.data.rows import Chat
from cria_tricks.data.shards import open_stream
from cria_tricks.data.sources import DataSource
from cria_tricks.data.stream import Stream
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings

QUIET = Console(quiet=True)


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


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many shards in little data."""
    monkeypatch.setattr(shards, "SHARD", 400)
    monkeypatch.setattr(texts, "PIECE", 300)


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


def stream(path, *settings: str, lanes: int = 4, world: World | None = None, held_out=(), say=print) -> Stream:
    recipe = with_settings(
        Recipe(),
        ["data.max_length=16", "data.overlap=2", "data.stream=true", "train.max_steps=1",
         f"data.train={path}", f"tricks.gradient_accumulation={lanes}", *settings],
    )  # fmt: skip
    source = open_stream(str(path), lanes)
    return Stream(recipe, source, DataSource(list(held_out), ""), TOKENIZER, world or World(), say)


def key(row) -> str:
    return json.dumps([row["input_ids"], row["labels"]])


def one_pass(made: Stream) -> list[str]:
    """Each lane's rows of its first pass."""
    found = []
    for lane in made.lanes.values():
        for row in lane:
            if lane.epoch:
                break
            found.append(key(row))
    return found


@pytest.mark.parametrize("lanes", [1, 3, 4])
@pytest.mark.parametrize("kind", ["rows", "folder"])
def test_a_pass_has_every_row_once(kind, lanes, request):
    path = request.getfixturevalue(kind)
    found = one_pass(stream(path, lanes=lanes))
    assert max(Counter(found).values()) == 1
    said = " ".join(TOKENIZER.read({"input_ids": [t for t, label in zip(*json.loads(row), strict=True) if label >= 0]})
                    for row in found).split()  # fmt: skip
    source = open_stream(str(path), lanes)
    words = Counter(
        word for chat in source.in_order(source.shards()) for word in (chat.text or chat.completion).split()
    )
    firsts = Counter(chat.text.split()[0] for chat in source.in_order(source.shards()) if chat.text)
    assert Counter(said) == words - firsts, "all words are trained once, but the first of a text"


@pytest.mark.parametrize("kind", ["rows", "folder"])
def test_processes_read_parts_of_the_same_steps(kind, request):
    """Micro-batch i of a step is the same for one process, two and four; B is two."""
    path, many = request.getfixturevalue(kind), 6 * 4 * 2
    alone = list(map(key, islice(stream(path, "train.batch_size=2"), many)))
    for size in (2, 4):
        parts = [iter(stream(path, "train.batch_size=2", world=World(rank, size, size))) for rank in range(size)]
        together = [key(next(parts[batch % size])) for batch in range(many // 2) for _ in range(2)]
        assert together == alone


@pytest.mark.parametrize("kind", ["rows", "folder"])
def test_it_goes_on_from_any_step_as_if_it_had_not_stopped(kind, request):
    """Also in the middle of a text, at the end of a pass and behind it, and through JSON."""
    path = request.getfixturevalue(kind)
    settings = ["data.min_words=4", "data.leakage=ignore"]
    whole = stream(path, *settings, lanes=2)
    every, states = [], []
    for row in islice(whole, 260):
        every.append(key(row))
        states.append(json.loads(json.dumps(whole.state())))
    assert whole.passes >= 1
    for stop in range(1, 250, 2):  # each of the two lanes had its turn
        resumed = stream(path, *settings, lanes=2)
        resumed.go_on(states[stop])
        rest = iter(resumed)
        assert [key(next(rest)) for _ in range(8)] == every[stop + 1 : stop + 9], stop
        assert resumed.state() == states[stop + 8], stop


def test_a_state_of_two_processes_is_gone_on_from_by_one(rows):
    alone = list(map(key, islice(stream(rows), 24)))
    parts = [stream(rows, world=World(rank, 2, 2)) for rank in range(2)]
    for part in parts:
        list(islice(part, 6))  # three steps of two micro-batches each
    resumed = stream(rows)
    resumed.go_on({lane: state for part in parts for lane, state in part.state().items()})
    assert list(map(key, islice(resumed, 12))) == alone[12:]


def test_the_order_is_the_seeds_and_another_one_in_each_pass(rows):
    def first(seed: int) -> list[str]:
        return list(map(key, islice(stream(rows, f"train.seed={seed}", lanes=1), 220)))

    one, passes = first(1), len(one_pass(stream(rows, lanes=1)))
    assert one == first(1)
    assert one != first(2)
    assert sorted(one[:passes]) == sorted(one[passes : 2 * passes])
    assert one[:passes] != one[passes : 2 * passes]
    assert one[:20] != sorted(one[:20]), "the rows of a shard are shuffled"


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


def test_a_row_that_is_no_utf8_names_its_line(rows):
    rows.write_bytes(b"\xff\n" + rows.read_bytes())
    with pytest.raises(BadInput, match=r"rows.jsonl:1: not UTF-8"):
        list(islice(stream(rows), 200))


def test_a_row_without_room_for_its_answer_names_its_line(rows):
    rows.write_text(json.dumps({"prompt": "x " * 20, "completion": "y"}) + "\n" + rows.read_text())
    with pytest.raises(BadInput, match=r"rows.jsonl:1: the prompt alone takes 20 tokens"):
        list(islice(stream(rows), 200))


def test_a_lane_without_rows_is_refused(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    with pytest.raises(BadInput, match="not enough rows for each of the 8 micro-batches"):
        list(islice(stream(path, lanes=8), 8))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "d.txt").write_text("")
    for name in ("d.jsonl", "d.txt"):
        with pytest.raises(BadInput, match=r"no rows|no text"):
            open_stream(str(tmp_path / name), 1)


def test_filters_and_guard_work_as_rows_are_read(rows):
    held_out = Chat((), "Question 3", "?", "eval:1")
    said = []
    made = stream(rows, "data.min_words=4", "data.leakage=drop", lanes=1, held_out=[held_out])
    assert not any("Question 3 " in TOKENIZER.read(json.loads(f'{{"input_ids": {json.loads(row)[0]}}}')) for row in
                   one_pass(made))  # fmt: skip
    steps = made.lanes[0].tally.rows
    warned = stream(rows, lanes=1, held_out=[held_out], say=said.append)
    one_pass(warned)
    assert warned.lanes[0].tally.rows["in the evaluation set, and kept"] >= 1
    assert len(said) == 1
    assert said[0].startswith("warning: ")
    assert steps["shorter than data.min_words"] >= 19
    assert steps["in the evaluation set"] >= 1


@pytest.mark.parametrize("wanted", ["exact", "near"])
def test_duplicates_are_left_out_wherever_they_lie(wanted, rows, tmp_path, monkeypatch):
    text = " ".join(f"word{n}" for n in range(60))
    lines = [json.dumps({"text": said}) for said in (text, text.upper(), text.replace("word9 ", "other "))]
    rows.write_text("\n".join([lines[0], rows.read_text(), lines[1], lines[2]]))
    made = stream(rows, f"data.duplicates={wanted}", lanes=1)
    made.look_for_duplicates(tmp_path, World(), QUIET)
    kept = one_pass(made)
    counts = made.lanes[0].tally.rows
    assert counts["duplicate"] == 1
    assert counts["near duplicate"] == (wanted == "near")
    all_of_them = len(one_pass(stream(rows, lanes=1)))
    assert all_of_them - len(kept) == 5 * (1 + (wanted == "near")), "each takes five rows of sixteen tokens"

    again = stream(rows, f"data.duplicates={wanted}", lanes=1)
    monkeypatch.setattr(type(again.source), "in_order", lambda self, shards: pytest.fail("it is read again"))
    again.look_for_duplicates(tmp_path, World(), QUIET)
    assert one_pass(again) == kept
    other = stream(rows, f"data.duplicates={wanted}", "data.min_words=2", lanes=1)
    with pytest.raises(pytest.fail.Exception, match="read again"):
        other.look_for_duplicates(tmp_path, World(), QUIET)


def test_a_stream_says_what_it_cannot_know(rows):
    made = stream(rows, "train.batch_size=3")
    assert (made.longest, made.most_trained(3), made.highest_id) == (16, 48, 10**6 - 1)
    list(islice(made, 30))
    made.add_up(World())
    assert made.count == 30
    assert made.tokens > made.trained_tokens > 0
    assert made.rows is made


def test_the_fingerprint_sees_a_changed_byte_and_not_another_place(rows, tmp_path):
    before = open_stream(str(rows), 1).sha256
    copy = tmp_path / "elsewhere" / "other.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(rows.read_bytes())
    assert open_stream(str(copy), 1).sha256 == before
    copy.write_bytes(rows.read_bytes().replace(b"end50", b"end51"))
    assert open_stream(str(copy), 1).sha256 != before


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
    whole = stream("owner/name:train", lanes=2)
    every, states = [], []
    for row in islice(whole, 120):
        every.append(key(row))
        states.append(json.loads(json.dumps(whole.state())))
    assert len(set(every[:96])) == 96
    assert every[96:] == every[:24], "nothing is shuffled"
    for stop in (1, 11, 93, 95, 97, 101):
        resumed = stream("owner/name:train", lanes=2)
        resumed.go_on(states[stop])
        assert list(map(key, islice(resumed, 8))) == every[stop + 1 : stop + 9], stop


def test_a_pass_is_over_when_the_slowest_lane_is_through(rows):
    given = stream(rows, lanes=2)
    fast, slow = given.lanes.values()
    fast.epoch, slow.epoch = 3, 1
    assert given.passes == 1
    fast.epoch, slow.epoch = 0, 2
    assert given.passes == 0


def test_what_all_processes_have_given_is_added_up(tmp_path):
    """Of 16 rows two are too long by one word; in the words of the tokenizer: a row has its words and an end."""
    lines = [{"prompt": "a b", "completion": " ".join(["c"] * (14 if n in (3, 7) else 13))} for n in range(16)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for overflow, cut, dropped, rows in (("truncate", 2, 0, 16), ("drop", 0, 2, 14)):
        made = stream(path, f"data.overflow={overflow}", lanes=1)
        first = made.lanes[0]
        list(islice(first, rows))
        assert (made.count, made.tokens, made.cut) == (0, 0, 0), "not yet"
        made.add_up(SimpleNamespace(gather=lambda state: [state, {"1": state["0"]}, {"1": state["0"]}]))
        assert (made.count, made.tokens, made.trained_tokens) == (2 * rows, 2 * rows * 16, 2 * rows * 14)
        assert (made.cut, made.dropped) == (2 * cut, 2 * dropped)
        assert made.tally.rows["read"] == 32


def test_rows_of_a_text_come_in_another_order_with_another_seed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": " ".join(f"word{number}" for number in range(100))}))
    orders = {seed: [key(row) for row in islice(stream(path, f"train.seed={seed}", lanes=1), 8)] for seed in (1, 2)}
    assert sorted(orders[1]) == sorted(orders[2])
    assert orders[1] != orders[2]


def test_kinds_of_rows_are_counted_once_also_over_a_stop(tmp_path):
    pair = {"prompt": "a", "completion": "b"}
    lines = [pair, {"text": "It was the best of times. " * 40}, pair]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = stream(path, "data.max_length=64", lanes=1)
    given, before = len(one_pass(whole)), []
    assert given > 3, "the text becomes several rows"
    for stop in range(1, given):
        part = stream(path, "data.max_length=64", lanes=1)
        list(islice(part, stop))
        resumed = stream(path, "data.max_length=64", lanes=1)
        resumed.go_on(json.loads(json.dumps(part.state())))
        list(islice(resumed, given - stop))
        resumed.add_up(World())
        before.append(resumed.tally.kinds)
    assert before == [{"completion": 2, "text": 1}] * (given - 1)
