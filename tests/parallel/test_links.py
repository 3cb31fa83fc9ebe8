"""Seconds of a call by hand, and of a step."""

import pytest

from cria_tricks.bill.calls import Call
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.links import LINKS, Link, compute_seconds, step_seconds
from cria_tricks.predict.per_process import local
from cria_tricks.recipe import with_settings
from cria_tricks.recipes import kwanzaa
from cria_tricks.switches import folds

CARD, SHAPE = CARDS["a100"], find_shape("llama-3.2-1b")
HALF = ["tricks.quantization=none", "tricks.double_quantization=false", "tricks.optimizer=adamw"]
LORA = with_settings(kwanzaa(CARD.device), [*HALF, "tricks.paged_optimizer=false"])
FULL = with_settings(LORA, ["tricks.peft=none", "tricks.lean_preparation=false"])
ROUND = Link("a round one", 2e9, 0.5, 1e-3, 1e-2, "made up")


def test_what_links_are_sold_as():
    assert LINKS["pcie3"].peak == pytest.approx(8e9 * 16 * 128 / 130 / 8, rel=1e-3)
    assert LINKS["pcie4"].peak == pytest.approx(16e9 * 16 * 128 / 130 / 8, rel=1e-3)
    for name, gbits in (("hdr", 200), ("10gbe", 10)):
        assert LINKS[name].peak == gbits * 1e9 / 8
    for name, both_ways in (("nvlink_a100", 600e9), ("nvlink_h100", 900e9)):
        assert LINKS[name].peak == both_ways / 2


def test_the_ports_of_a_machine_add_up_as_measured():
    """Two machines of eight A100s: 86 GB/s over four HDR ports, 24 over one (nccl-tests issue 175, nccl issue 1048)."""
    port = LINKS["hdr"]
    assert port.over(1) == port
    assert port.rate == pytest.approx(24e9)
    assert port.over(4).rate == pytest.approx(86e9)
    assert port.over(1 / 4).rate == pytest.approx(6e9), "four groups share it"
    call = Call("all_gather", 8_000_000_000, 1, 8, "seven of eight gigabytes")
    assert port.over(4).seconds(call) == pytest.approx(7e9 / 86e9, rel=2e-3)
    assert port.seconds(call) == pytest.approx(7e9 / 24e9, rel=2e-3)


def test_a_hop_takes_what_nccl_reckons_with():
    """Microseconds, of its src/graph/tuning.cc for a ring of large calls; any call starts with 8.4."""
    microseconds = {name: round(1e6 * link.hop, 3) for name, link in LINKS.items()}
    networks = dict.fromkeys(("hdr", "10gbe"), 14.0)
    assert microseconds == {"pcie3": 5.7, "pcie4": 5.7, "nvlink_a100": 3.4, "nvlink_h100": 3.4} | networks
    assert {round(1e6 * link.start, 3) for link in LINKS.values()} == {8.4}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_what_of_it_is_reached_has_a_source(link):
    assert 0.7 < link.reached < 1
    assert link.rate == link.peak * link.reached
    assert link.hop > 0
    assert len(link.source) > 20


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # 4 GB among 5, thrice: a start, the hops, and what a process sends at a gigabyte a second.
        ("all_reduce", 3 * (0.01 + 8 * 0.001 + 4 * 8 / 5)),
        ("all_gather", 3 * (0.01 + 4 * 0.001 + 4 * 4 / 5)),
        ("reduce_scatter", 3 * (0.01 + 4 * 0.001 + 4 * 4 / 5)),
        ("send", 3 * (0.01 + 0.001 + 4)),
    ],
)
def test_a_call_takes_its_start_its_hops_and_its_bytes(kind, seconds):
    assert ROUND.seconds(Call(kind, 4_000_000_000, 3, 5, "")) == pytest.approx(seconds)


@pytest.mark.parametrize(("overlap", "hidden"), [(0.0, 0.0), (0.25, 0.5), (1.0, 1.01)])
def test_a_step_computes_and_sends_and_hides_no_more_than_there_is(overlap, hidden):
    call = Call("send", 1_000_000_000, 1, 2, "a gigabyte")
    step = step_seconds(2.0, [call], ROUND, overlap)
    communication = 1 + 0.001 + 0.01
    assert step.calls == (("send: a gigabyte", pytest.approx(communication)),)
    assert step.hidden == pytest.approx(min(hidden, communication), abs=1e-3)
    assert step.seconds == pytest.approx(2.0 + communication - step.hidden)
    assert step_seconds(2.0, [call, call], ROUND).seconds == pytest.approx(2.0 + 2 * communication), "nothing is hidden"


def test_processes_compute_their_own_micro_batches():
    assert LORA.tricks.gradient_accumulation == 8
    whole = folds.time_of(LORA, SHAPE, CARD)
    alone = next(part.seconds for part in whole.parts if part.name == "optimizer")
    for n in (2, 4, 8):
        found = compute_seconds(LORA, SHAPE, CARD, "ddp", n)
        fewer = local(LORA, SHAPE, "ddp", n)[0]
        assert found == folds.time_of(fewer, SHAPE, CARD).seconds
        assert found == pytest.approx((whole.seconds - alone) / n + alone, rel=0.01)
    assert compute_seconds(LORA, SHAPE, CARD, "ddp", 16) == compute_seconds(LORA, SHAPE, CARD, "ddp", 8)


def test_fsdp_divides_the_optimizers_work_too():
    step = folds.time_of(local(FULL, SHAPE, "fsdp", 4)[0], SHAPE, CARD)
    optimizer = next(part.seconds for part in step.parts if part.name == "optimizer")
    saved = compute_seconds(FULL, SHAPE, CARD, "ddp", 4) - compute_seconds(FULL, SHAPE, CARD, "fsdp", 4)
    assert saved == pytest.approx(optimizer * 3 / 4)


def test_tensor_parallelism_divides_the_blocks_and_not_the_head():
    whole, part = (folds.time_of(*local(LORA, SHAPE, "tensor", n), CARD) for n in (1, 4))
    by_name = [{each.name: each.flops for each in step.parts} for step in (whole, part)]
    for name, divided in (("blocks forward", 4), ("attention", 4), ("head", 1)):
        assert by_name[0][name] == divided * by_name[1][name], name
    assert compute_seconds(LORA, SHAPE, CARD, "tensor", 4) == part.seconds


@pytest.mark.parametrize(("strategy", "processes", "pieces"), [("tensor", 4, 4), ("ddp_tensor", 8, 2)])
def test_sequence_parallelism_divides_the_seconds_of_norms_and_sums(strategy, processes, pieces):
    # Rows so long that the card, and not the host that starts its kernels, takes the time.
    grouped = with_settings(LORA, [f"parallel.tensor_size={pieces}", "data.max_length=8192"])
    plain, divided = (
        compute_seconds(with_settings(grouped, [f"parallel.sequence={on}"]), SHAPE, CARD, strategy, processes)
        for on in ("false", "true")
    )
    # In 16 bits 84 bytes for each number of the residual stream forward, and 188 backward. No block is checkpointed.
    tokens = 8192 * 8 / (processes / pieces)
    moved = tokens * SHAPE.layers * SHAPE.width * (84 + 188)
    rate = CARD.memory_rate * CARD.reached.memory
    assert plain - divided == pytest.approx(moved * (1 - 1 / pieces) / rate, rel=1e-6)


def test_the_ring_repeats_keys_and_values_itself_so_it_never_takes_the_kernel_for_grouped_heads():
    t4 = CARDS["t4"]
    grouped = with_settings(kwanzaa(t4.device), ["tricks.expand_kv=false", "data.max_length=16384"])
    repeated = with_settings(grouped, ["tricks.expand_kv=true"])

    def seconds(recipe, shape=SHAPE):
        return {part.name: part.seconds for part in folds.time_of(recipe, shape, t4).parts}

    assert seconds(repeated)["attention"] < seconds(grouped)["attention"] / 4, "a T4 has no kernel for grouped heads"
    own = seconds(*local(grouped, SHAPE, "context", 4))
    expected = sum(own.values()) - own["attention"] + seconds(repeated)["attention"] / 4
    assert compute_seconds(grouped, SHAPE, t4, "context", 4) == pytest.approx(expected)


def test_a_pipelines_optimizer_runs_once_a_step():
    def compute(micro_batches: int) -> float:
        recipe = with_settings(FULL, [f"tricks.gradient_accumulation={micro_batches}"])
        return compute_seconds(recipe, SHAPE, CARD, "pipeline", 4)

    # Each further micro-batch takes as long as it takes the slowest stage, so the rest is no multiple of their number.
    each = (compute(64) - compute(16)) / 48
    assert compute(32) == pytest.approx(compute(16) + 16 * each)
    first_and_optimizer = compute(16) - 15 * each
    parts = {part.name: part.seconds for part in folds.time_of(FULL, SHAPE, CARD).parts}
    micro_batch = sum(seconds for name, seconds in parts.items() if name != "optimizer") / 8
    assert first_and_optimizer == pytest.approx(micro_batch + parts["optimizer"] / 4, rel=0.3)
