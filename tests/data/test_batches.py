"""Padding: at the right, masked, and never a label."""

from cria_tricks.data.batches import PadToLongest


def test_rows_are_padded_to_the_longest():
    rows = [{"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}, {"input_ids": [7], "labels": [-100]}]
    batch = PadToLongest(pad_id=2)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 2], [-100, -100, -100]], "2 is a label where it is an end token"
