"""Bytes are exact integers."""

import bitsandbytes as bnb
import pytest
import torch

from cria_tricks.common.units import human
from cria_tricks.measure.memory import INSIDE, LiveBytes, Meter, every_tensor
from tests.helpers import prepare, train

KIB = torch.zeros(256)  # 256 fp32 elements: 1 KiB


def test_storages_are_counted_once_and_taken_off_when_freed():
    with LiveBytes() as count:
        a = KIB + 1
        b = a.view(16, 16).T  # a view: the same storage
        assert count.live == 1024
        c = a + b.reshape(256)  # the transposed reshape copies
        del b
        assert count.live == 2048
        assert count.peak == 3072
        del a, c
        assert count.live == 0
        assert count.peak == 3072


def test_tensors_from_outside_count_when_tracked():
    outside = torch.zeros(256)
    with LiveBytes() as count:
        count.track(outside)
        count.track(outside[:10])
        assert count.live == 1024


def test_what_autograd_saves_is_alive_until_backward():
    weight = torch.randn(256, 256, requires_grad=True)
    with LiveBytes() as count:
        loss = (KIB.reshape(1, 256) @ weight).tanh().sum()
        assert count.live == 2 * 1024 + 4, "the input and tanh's output are kept; the product itself is gone"
        loss.backward()
        assert count.peak >= 256 * 256 * 4, "the weight's gradient"
        assert count.live == 1024 + 256 * 256 * 4 + 4


def test_phases_nest_and_the_inner_one_has_its_peak():
    meter = Meter("cpu")
    with meter.watch():
        with meter.phase("outer"):
            a = KIB + 1
            with meter.phase("inner"):
                b = torch.cat([a, a, a])
                del b
            c = a + 1
        del a, c
    assert meter.phases["inner"]["allocated_bytes"] == 4 * 1024
    assert meter.phases["outer"]["allocated_bytes"] == 2 * 1024
    assert meter.phases["outer"]["process_bytes"] > 2**20


@pytest.mark.parametrize("double", [False, True])
def test_a_quantised_model_is_counted_to_the_byte(double, tiny_model):
    sets = ("tricks.peft=lora", "tricks.quantization=nf4", f"tricks.double_quantization={double}")
    _, _, loaded = prepare(tiny_model, *sets)
    meter = Meter("cpu")
    with meter.phase("load"):
        meter.track(every_tensor(loaded.model))
    layers, linears = 14, 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    blocks = linears // 64
    scales = blocks + blocks // 256 * 4 + layers * (256 * 4 + 4) if double else blocks * 4
    levels, rotary = layers * 16 * 4, sum(buffer.nbytes for buffer in loaded.model.buffers())
    embedding, norms = 512 * 256 * 4, 5 * 256 * 4
    adapter = sum(p.numel() * 4 for p in loaded.model.parameters() if p.requires_grad)
    expected = linears // 2 + scales + levels + rotary + embedding + norms + adapter
    assert meter.phases["load"]["allocated_bytes"] == expected


@pytest.mark.parametrize("setting", ["tricks.peft=lora", "tricks.peft=none", "tricks.chunked_loss=true"])
def test_what_is_watched_gives_the_peak_of_watching_everything(setting, tiny_model, rows, tmp_path, monkeypatch):
    sets = ("tricks.peft=lora", setting, "tricks.gradient_accumulation=2", "train.max_steps=6")

    def peaks(folder):
        meter = Meter("cpu")
        run, _ = train(tiny_model, rows, tmp_path / folder, *sets, eval_rows=rows, meter=meter)
        return meter.phases, [entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry]

    some, entries = peaks("some")
    monkeypatch.setattr(Meter, "may_set_a_peak", lambda *size: True)
    everything, all_entries = peaks("all")
    assert len(all_entries) == 6
    assert len(entries) < 6, "something was spared"
    batches = 2 * 3 * 8 * 30  # int64 rows of a window, which are made before it is watched
    for phase in ("train", "evaluate"):
        assert some[phase]["allocated_bytes"] == pytest.approx(everything[phase]["allocated_bytes"], abs=batches)


def test_bytes_in_words():
    assert [human(n) for n in (0, 1023, 1024, 980 * 2**20, 15_828_320_256)] == [
        "0 B", "1023 B", "1.0 KiB", "980.0 MiB", "14.7 GiB"
    ]  # fmt: skip


def allocated_at_most(call) -> int:
    """The most bytes that torch's CPU allocator handed out at once while a call ran, by its own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    del kept
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("name", INSIDE)
def test_what_an_operation_needs_inside_is_what_the_allocator_says(name):
    packed, state = bnb.functional.quantize_4bit(torch.randn(256, 512), quant_type="nf4")
    calls = {
        "aten::logsumexp": lambda: torch.logsumexp(big, -1, keepdim=True),
        "aten::_safe_softmax": lambda: torch._safe_softmax(big, -1),
        "bitsandbytes::gemm_4bit": lambda: torch.ops.bitsandbytes.gemm_4bit(
            big, packed, state.shape, state.absmax, state.blocksize, "nf4"
        ),
    }
    big = torch.randn(64, 512)
    with LiveBytes() as count:
        kept = calls[name]()
        del kept
    truly = allocated_at_most(calls[name])
    assert count.peak == pytest.approx(truly, rel=0.02), "but for vectors, and scales that need no unpacking"
