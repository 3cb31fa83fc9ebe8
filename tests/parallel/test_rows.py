"""No row twice, none left out, and the same windows for any number of processes."""

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from cria_tricks.data.batches import PadToLongest
from cria_tricks.trainer.training import Share, with_filler

ROWS = 107


def shares(batch_size: int, number: int) -> list[list[list[int]]]:
    order = SequentialSampler(range(ROWS))
    return [list(Share(order, batch_size, share, number, filler=ROWS)) for share in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_every_row_is_read_once_and_all_shares_are_equally_long(batch_size: int, number: int):
    found = shares(batch_size, number)
    assert {len(share) for share in found} == {len(Share(range(ROWS), batch_size, 0, number, ROWS))}
    read = [row for share in found for batch in share for row in batch if row != ROWS]
    assert sorted(read) == list(range(ROWS))


@pytest.mark.parametrize("number", [2, 4])
def test_a_window_holds_the_same_rows_for_any_number_of_shares(number: int):
    window, alone, found = 8, shares(2, 1)[0], shares(2, number)
    each = window // number
    for start in range(0, len(alone), window):
        first = start // number
        together = [batch for share in found for batch in share[first : first + each] if batch != [ROWS]]
        assert sorted(together) == sorted(alone[start : start + window])


def test_accelerate_reads_a_row_of_the_107_twice():
    from accelerate.data_loader import BatchSamplerShard

    batches = BatchSampler(SequentialSampler(range(ROWS)), 1, drop_last=False)
    read = [row for share in range(2) for batch in BatchSamplerShard(batches, 2, share) for row in batch]
    assert len(read) == ROWS + 1
    assert sorted(read) != list(range(ROWS))


def test_the_filler_is_a_row_in_which_nothing_is_trained():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    batch = PadToLongest(0)([with_filler(rows, 0)[-1]])
    assert batch["input_ids"].shape == (1, 2)
    assert (batch["labels"] == -100).all()
    packed = [{**rows[0], "position_ids": [0, 1, 2]}]
    assert PadToLongest(0)([with_filler(packed, 0)[-1]])["position_ids"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("rows", "options", "found"),
    [
        (5, {}, [[0, 1], [2, 3], [4]]),
        (5, {"share": 0, "shares": 2}, [[0, 1], [4]]),
        (5, {"share": 1, "shares": 2}, [[2, 3], [-1]]),
        (4, {"share": 0, "shares": 2}, [[0, 1]]),
        (4, {"share": 1, "shares": 2}, [[2, 3]]),
        (1, {"share": 2, "shares": 3, "filler": 9}, [[9]]),
        (7, {"share": 2, "shares": 3, "filler": 9}, [[4, 5], [9]]),
        (0, {"share": 1, "shares": 3}, []),
    ],
)
def test_the_micro_batches_of_a_share(rows, options, found):
    share = Share(SequentialSampler(range(rows)), 2, **options)
    assert list(share) == found
    assert len(share) == len(found)


def test_a_filler_comes_behind_no_rows_too():
    assert list(with_filler([], 7)) == [{"input_ids": [7, 7], "labels": [-100, -100]}]
