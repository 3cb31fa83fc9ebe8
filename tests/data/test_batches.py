"""Padding: at the right, masked, and never a label."""

import torch

from cria_tricks.data.batches import PadToLongest, real_tokens


def test_rows_are_padded_to_the_longest():
    rows = [{"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}, {"input_ids": [7], "labels": [-100]}]
    batch = PadToLongest(pad_id=2)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 2], [-100, -100, -100]], "2 is a label where it is an end token"


def test_packed_rows_have_positions_and_no_mask():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "position_ids": [0, 1, 0]},
        {"input_ids": [8], "labels": [-100], "position_ids": [0]},
    ]
    batch = PadToLongest(pad_id=3)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 3, 3]],
        "position_ids": [[0, 1, 0], [0, 0, 0]],
        "labels": [[-100, 6, -100], [-100, -100, -100]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_tokens_that_are_no_padding_are_counted():
    assert real_tokens({"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}).item() == 4
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    assert real_tokens({"position_ids": positions}).item() == 5 + 2 + 6
