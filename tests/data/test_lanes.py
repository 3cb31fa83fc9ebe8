"""A lane by itself, over a made-up data set: which row comes next, what is counted, and where it goes on."""

import json
from itertools import islice

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import Tally
from cria_tricks.data.rows import Chat
from cria_tricks.data.stream_lanes import Lane


class Items:
    """As much of ``datasets.IterableDataset`` as a lane asks for: its state is the number of items given."""

    def __init__(self, items):
        self.items, self.at, self.epochs = items, 0, []

    def __call__(self, epoch):
        self.epochs.append(epoch)
        return self

    def load_state_dict(self, state):
        self.at = state["at"] if state else 0

    def state_dict(self):
        return {"at": self.at, "epoch": 0}

    def __iter__(self):
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]


def lane(items=("abc", "", "d", "ef")) -> Lane:
    """An item is a word, each of its letters a row; row ``b`` has two tokens, of which one is trained."""

    def read(item, tally):
        tally.count("read", Chat((), "", "", "", item))
        return [{"input_ids": [ord(letter), 0], "labels": [-100, 0 if letter == "b" else -100]} for letter in item]

    return Lane(Items(items), read, 7)


def letters(found, many: int) -> str:
    return "".join(chr(row["input_ids"][0]) for row in islice(found, many))


def test_rows_come_in_their_order_pass_after_pass():
    assert letters(lane(), 15) == "abcdefabcdefabc"


def test_what_it_has_given_is_counted():
    made = lane()
    found, states = iter(made), []
    for _ in range(8):
        next(found)
        states.append([getattr(made, name) for name in ("epoch", "given", "in_epoch", "rows", "tokens", "trained")])
    assert states == [
        [0, 1, 1, 1, 2, 0], [0, 2, 2, 2, 4, 1], [0, 3, 3, 3, 6, 1], [0, 1, 4, 4, 8, 1], [0, 1, 5, 5, 10, 1],
        [0, 2, 6, 6, 12, 1], [1, 1, 1, 7, 14, 1], [1, 2, 2, 8, 16, 2],
    ]  # fmt: skip
    assert made.tally.rows["read"] == 5, "each item once a pass, also the one without rows"
    assert made.state() == {
        "before": None, "epoch": 1, "given": 2, "in_epoch": 2, "rows": 8, "tokens": 16, "trained": 2,
        "tally": {"read": {"rows": 5, "words": 4}}, "kinds": {},
    }  # fmt: skip


@pytest.mark.parametrize("stop", range(1, 14))
def test_it_goes_on_behind_any_row_and_counts_an_item_once(stop):
    whole, first = lane(), lane()
    islice(whole, 0)
    letters(first, stop)
    resumed = lane()
    resumed.go_on(json.loads(json.dumps(first.state())))
    assert letters(resumed, 20 - stop) == letters(lane(), 20)[stop:]
    letters(whole, 20)
    assert resumed.state() == whole.state()


def test_a_lane_asks_for_the_items_of_each_pass():
    made = lane()
    letters(made, 13)
    assert made.dataset.epochs == [0, 1, 2]


def test_a_position_of_a_version_in_which_datasets_counted_the_passes_is_gone_on_from():
    first, resumed = lane(), lane()
    letters(first, 10)
    state = first.state()
    resumed.go_on({**state, "before": {**state["before"], "epoch": 1}})
    assert resumed.state() == state


def test_a_lane_without_any_row_is_refused():
    with pytest.raises(BadInput) as caught:
        letters(lane(("", "")), 1)
    assert str(caught.value) == (
        "data.stream=true: there are not enough rows for each of the 7 micro-batches of a step to have its own, or "
        "those of one were all left out; set data.stream=false, or a smaller tricks.gradient_accumulation"
    )


def test_a_new_lane_has_given_nothing():
    assert Lane(lambda epoch: (), lambda item, tally: [], 1).state() == {
        "before": None, "epoch": 0, "given": 0, "in_epoch": 0, "rows": 0, "tokens": 0, "trained": 0, "tally": {},
        "kinds": {},
    }  # fmt: skip
    assert isinstance(lane().tally, Tally)
