"""The ring against torch's all-reduce and the formula of its bytes; timings and their line."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import links
from benchmarks.links import FittedLine, Timing, fit_line
from cria_tricks.bill.calls import ring_share
from cria_tricks.measure.counting import CountCollectives
from cria_tricks.parallel import ring_collectives


def around_the_ring(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The ring's sum, torch's, and what the ring sent: bytes, calls."""
    torch.manual_seed(dist.get_rank())
    ours = torch.randn(shape).mul(100).to(dtype)
    theirs = ours.clone()
    dist.all_reduce(theirs)
    with CountCollectives() as counted:
        ring_collectives.ring_all_reduce(ours)
    return ours, theirs, counted.bytes["send"], counted.calls["send"]


@pytest.mark.parametrize("shape", [(8,), (3, 4, 5), (7,), (2,), ()], ids=str)
def test_the_ring_gives_all_processes_torchs_sum_to_the_bit_in_whole_numbers(four, shape):
    for ours, theirs, _, _ in four.run(around_the_ring, shape, torch.int64):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pool", ["two", "four"])
def test_the_ring_gives_all_processes_the_same_sum_and_it_is_torchs_but_for_rounding(request, pool):
    found = request.getfixturevalue(pool).run(around_the_ring, (1000,), torch.float32)
    for ours, theirs, _, _ in found:
        assert torch.equal(ours, found[0][0]), "each piece is added up in one order, wherever it ends"
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-4)  # sums of four around 100, in another order


@pytest.mark.parametrize(("pool", "processes"), [("two", 2), ("four", 4)])
def test_the_ring_sends_what_the_formula_says(request, pool, processes):
    found = request.getfixturevalue(pool).run(around_the_ring, (1024,), torch.float32)
    assert {sent for _, _, sent, _ in found} == {4 * 1024 * ring_share("all_reduce", processes)}
    assert {calls for _, _, _, calls in found} == {2 * (processes - 1)}


def test_pieces_of_unequal_size_are_sent_no_more_often(four):
    found = four.run(around_the_ring, (1023,), torch.float32)
    assert sum(sent for _, _, sent, _ in found) == 4 * (4 * 1023) * ring_share("all_reduce", 4)


def test_the_line_through_exact_timings_is_theirs():
    line = FittedLine(latency=3e-4, rate=2e9)
    timings = [Timing("all_gather", size, 4, line.latency + 0.75 * size / line.rate) for size in links.SIZES]
    assert fit_line(timings) == pytest.approx(line)


def test_the_line_weighs_errors_by_their_share():
    line = FittedLine(latency=3e-4, rate=2e9)
    exact = [Timing("all_reduce", size, 2, line.latency + size / line.rate) for size in links.SIZES]
    small, large = exact[0], exact[-1]
    # A tenth off at the largest size is 3 ms, ten times a small call: it must not become the latency.
    off = [*exact[:-1], Timing("all_reduce", large.bytes, 2, 1.1 * large.seconds)]
    found = fit_line(off)
    assert found.latency + small.sent / found.rate == pytest.approx(small.seconds, rel=0.05)


@pytest.mark.parametrize("seconds", [(1e-3, 4e-3), (2e-3, 1e-3)], ids=["below zero", "falling"])
def test_a_line_that_no_link_can_have_goes_through_zero(seconds):
    timings = [Timing("all_reduce", size, 2, t) for size, t in zip((1000, 2000), seconds, strict=True)]
    line = fit_line(timings)
    assert line.latency == 0
    assert line.rate > 0


@pytest.mark.parametrize("seed", range(50))
def test_timings_of_one_size_give_a_line_through_zero(seed):
    """Many lines go through one point: rounding alone decided between them, or divided by zero."""
    seconds = [10 ** random.Random(seed).uniform(-6, 0)] * (1 + seed % 3)
    line = fit_line([Timing("all_reduce", 4096, 2, t) for t in seconds])
    assert line == (0, pytest.approx(4096 / seconds[0]))


def test_every_process_gets_the_same_timings(two):
    first, second = two.run(links.measured_collectives, (4096, 4098))
    assert first == second
    assert [(timing.kind, timing.bytes) for timing in first] == [
        (kind, size) for size in (4096, 4096) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert all(timing.seconds > 0 and timing.processes == 2 for timing in first)


def loopback() -> int:
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def bytes_of_a_reduce_scatter(size: int) -> tuple[int, int]:
    """What all processes together send: by the count of the machine, and of the tensors."""
    whole, piece = torch.zeros(size // 4), torch.zeros(size // 4 // dist.get_world_size())
    dist.barrier()
    before = loopback()
    with CountCollectives() as counted:
        dist.reduce_scatter_tensor(piece, whole)
    dist.barrier()
    return loopback() - before, counted.bytes["reduce_scatter"]


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="needs Linux's count of what went over an interface")
def test_gloo_sends_as_much_for_a_reduce_scatter_as_for_an_all_reduce(two):
    size = 2**24
    sent, counted = two.run(bytes_of_a_reduce_scatter, size)[0]
    assert counted == size
    assert sent >= 2 * size * ring_share("all_reduce", 2), "gloo can do it by now"
