"""The allowance for what the allocator reserves, against replays of its model; and the trace that is replayed."""

import json

import pytest
from transformers import AutoConfig

from benchmarks import reserved as study
from cria_tricks.bill.bill import EXPANDABLE, SEGMENTS, WORKSPACES
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.predict.allocator import MIB, OutOfMemory, Settings
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.predict.memory_trace import Event, memory_trace, replay
from cria_tricks.resolve import resolve
from tests.memory.cases import CPU, T4, bill, recipe

CASES = json.loads(study.RESULTS.read_text())["cases"]
WAYS = {"expandable": EXPANDABLE, "segments": SEGMENTS}


@pytest.mark.parametrize("kind", WAYS)
def test_no_committed_replay_is_underestimated_by_more_than_promised(kind):
    assert len(CASES) == 204
    errors = study.errors(CASES, kind, WAYS[kind])
    assert min(errors) >= -study.UNDER - 1e-3
    more = [case[kind] / case["allocated"] - 1 for case in CASES.values()]
    assert min(more) > -0.01, "they are allocated without expandable segments, where a block may be a little larger"


@pytest.mark.parametrize("kind", WAYS)
def test_smaller_shares_would_underestimate_some(kind):
    activations, *others = WAYS[kind]
    assert min(study.errors(CASES, kind, (0.9 * activations, *others))) < -study.UNDER


def test_expandable_segments_reserve_less():
    assert sum(case["expandable"] for case in CASES.values()) < 0.95 * sum(case["segments"] for case in CASES.values())
    assert bill("lora").unused.bytes < bill("lora train.expandable_segments=false").unused.bytes
    assert bill("lora", device=CPU).unused.bytes == 0


@pytest.mark.parametrize("number", [0, 7])
def test_a_committed_replay_is_what_is_replayed_today(number):
    one = list(study.settings(number + 1))[number]
    small = study.replace(one, blocks=2)
    assert str(one) in CASES
    found = study.replayed(small)
    assert found["allocated"] <= found["expandable"]
    assert found["allocated"] <= found["segments"]


def tiny_trace(toggles: str, batch: int = 1, tokens: int = 256, device=T4, **more) -> list[Event]:
    config = {**CONFIGS["smollm2"], "num_hidden_layers": 2}
    plan = resolve(recipe(toggles, batch, tokens), device)
    return memory_trace(plan, AutoConfig.for_model(**config), batch, tokens, **more)


TOGGLES = ["", "lora fp16 sdpa chunked checkpoint", "lora nf4 fp16 sdpa", "lora int8 fp16 sdpa accumulate 8bit"]


@pytest.mark.parametrize("toggles", TOGGLES)
def test_every_release_has_an_allocation_and_what_lives_on_is_the_state(toggles):
    live: dict[int, Event] = {}
    for event in tiny_trace(toggles):
        if event.size:
            assert event.tensor not in live
            live[event.tensor] = event
        else:
            assert live.pop(event.tensor, event).line == event.line
    assert {event.line for event in live.values()} <= {"weights", "optimizer states", "workspace"}


@pytest.mark.parametrize("toggles", TOGGLES)
def test_its_peak_is_that_of_the_dry_run_and_workspaces(toggles):
    """A dry run counts the last micro-batch of a window. The trace holds the same one, and rounds to 512 bytes."""
    config = AutoConfig.for_model(**{**CONFIGS["smollm2"], "num_hidden_layers": 2})
    plan = resolve(recipe(toggles, 1, 256), T4)
    counted = dry_run(plan, config, 1, 256).peak_bytes + WORKSPACES
    events = tiny_trace(toggles, shorter=1.0)
    traced = replay(events, Settings(expandable_segments=True)).allocated_bytes
    most = max(512 * sum(event.size > 0 for event in events), 1)
    assert counted <= traced <= 1.02 * counted + most


def test_a_longer_row_after_a_shorter_one_reserves_more_than_the_longer_alone():
    alone = replay(tiny_trace("lora fp16 sdpa", tokens=1024, shorter=1.0))
    after = replay(tiny_trace("lora fp16 sdpa", tokens=1024))
    assert after.reserved_bytes > alone.reserved_bytes
    grown = replay(tiny_trace("lora fp16 sdpa", tokens=1024), Settings(expandable_segments=True))
    assert grown.reserved_bytes < after.reserved_bytes
    assert "1,024 tokens" in after.moment
    assert 0 < after.unused_bytes < after.reserved_bytes


def test_it_fits_in_what_it_reserves_and_not_in_less_than_it_allocates():
    events = tiny_trace("lora fp16 sdpa chunked checkpoint")
    found = replay(events)
    assert replay(events, limit=found.reserved_bytes).reserved_bytes == found.reserved_bytes
    with pytest.raises(OutOfMemory):
        replay(events, limit=found.allocated_bytes - MIB)
    assert replay([], limit=0).reserved_bytes == 0


def test_lines_say_what_takes_the_memory():
    events = tiny_trace("lora fp16 sdpa accumulate 8bit", tokens=512)
    lines = {event.line for event in events if event.size}
    assert lines == {"weights", "batch", "activations", "logits", "gradients", "optimizer states", "workspace"}
    logits = [event for event in events if event.line == "logits" and event.size]
    vocabulary = CONFIGS["smollm2"]["vocab_size"]
    assert all(event.size % (2 * vocabulary) == 0 for event in logits)
    workspaces = [event.size for event in events if event.line == "workspace"]
    assert workspaces == [8320 * 1024] * 2
    plan = resolve(recipe("lora fp16 sdpa accumulate 8bit", 1, 512), T4)
    config = AutoConfig.for_model(**{**CONFIGS["smollm2"], "num_hidden_layers": 2})
    weights = sum(event.size for event in events if event.line == "weights")
    assert weights == dry_run(plan, config, 1, 512).weights_bytes
