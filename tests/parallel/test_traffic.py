"""What a collective counts, by tables: every operator of torch's dispatcher, every share of a ring, every sum."""

from typing import Any

import pytest
import torch

from cria_tricks.bill.calls import Call, ring_share, totals
from cria_tricks.measure.counting import _KIND, CountCollectives


@pytest.mark.parametrize(
    ("kind", "of_two", "of_five"),
    [
        ("all_reduce", 2 * 1 / 2, 2 * 4 / 5),
        ("all_gather", 1 / 2, 4 / 5),
        ("reduce_scatter", 1 / 2, 4 / 5),
        ("broadcast", 1 / 2, 4 / 5),
        ("send", 1, 1),
    ],
)
def test_each_process_sends_its_share_of_a_ring(kind, of_two, of_five):
    assert (ring_share(kind, 2), ring_share(kind, 5)) == (of_two, of_five)
    call = Call(kind, 700, 3, 5, "")
    assert call.total == 2100
    assert call.sent == 2100 * of_five


def test_bytes_of_a_step_are_added_up_by_kind():
    calls = [
        Call("send", 5, 1, 2, ""),
        Call("all_reduce", 7, 2, 4, ""),
        Call("send", 3, 4, 2, ""),
        Call("broadcast", 0, 9, 2, ""),
    ]
    assert totals(calls) == {"all_reduce": 14, "send": 17}


class Operator:
    """An operator by its name, which gives back a tensor of 64 bytes."""

    def __init__(self, name: str):
        self.name = lambda: name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert kwargs in ({}, {"wait": True})
        return [torch.zeros(16)]


GIVEN = (torch.zeros(2), [torch.zeros(3), torch.zeros(1, dtype=torch.float16)], torch.zeros(5))
"""8 bytes, 12 + 2 bytes, 20 bytes."""


@pytest.mark.parametrize("name", _KIND)
def test_each_operator_counts_the_whole_tensor(name):
    counted = CountCollectives()
    counted.__torch_dispatch__(Operator(name), (), GIVEN)
    counted.__torch_dispatch__(Operator(name), (), GIVEN, {"wait": True})
    made = name == "_c10d_functional::all_gather_into_tensor"
    second = name in ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")
    whole = 64 if made else 14 if second else 8
    assert (counted.calls, counted.bytes) == ({_KIND[name]: 2}, {_KIND[name]: 2 * whole})


def test_what_moves_nothing_between_processes_is_not_counted():
    counted = CountCollectives()
    assert len(counted.__torch_dispatch__(Operator("aten::add"), (), GIVEN)) == 1
    assert (counted.calls, counted.bytes) == ({}, {})
