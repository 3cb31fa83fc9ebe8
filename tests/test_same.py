"""What ``python -m tools.same`` calls a difference."""

import pytest

from tools import same

BILL = {"needed": 5, "update, batch": [1, 2]}


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        (BILL, {"needed": 5, "update, batch": [1, 2]}, []),
        (BILL, {"needed": 6, "update, batch": [1, 2]}, ["needed"]),
        (BILL, {"needed": 5, "update, batch": [2, 1]}, ["update, batch"]),
        (BILL, {"needed": 5}, ["update, batch"]),
        (BILL, {**BILL, "new": None}, ["new"]),
        (BILL, {"needed": 5.0000000001, "update, batch": [1, 2]}, ["needed"]),
        ({"rows": [{"bytes": 1}, {"bytes": 2}]}, {"rows": [{"bytes": 1}]}, ["rows.length", "rows.*.bytes"]),
        ({"refused": "in these words"}, {"refused": "in others"}, []),
        ({"refused": "why"}, BILL, ["refused"]),
        (BILL, {"refused": "why"}, ["refused"]),
        ({"warnings": []}, {"warnings": {}}, ["warnings"]),
    ],
)
def test_every_number_counts_and_the_words_of_a_refusal_do_not(before, after, keys):
    assert list(same.differences(before, after)) == keys


def test_a_difference_is_a_fault_unless_it_is_named():
    before, after = {"case 1": BILL, "case 2": BILL}, {"case 1": BILL, "case 2": {**BILL, "needed": 6}}
    lines, met = same.compare("bills", before, after, {})
    assert (lines[0], met) == ("bills: 1 of 2 equal (0 of them refused by both)", set())
    assert lines[1].startswith("  DIFFERS: needed in 1, first in case 2\n")
    lines, met = same.compare("bills", before, after, {"bills need*": "the margin is another", "plans *": "not met"})
    assert lines[1].startswith("  named, the margin is another: needed")
    assert met == {"bills need*"}


def test_settings_get_their_new_names():
    drawn = {"plans": {"plan 1": {"settings": ["tricks.peft=lora", "lora.r=8"]}}}
    assert same.renamed(drawn, {"tricks.peft": "adapter.kind"})["plans"]["plan 1"]["settings"] == [
        "adapter.kind=lora",
        "lora.r=8",
    ]
