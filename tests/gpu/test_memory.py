"""Where bytes are on a CUDA card: offloaded activations, paged states, compiled blocks. ``pytest -m gpu``."""

import contextlib
import copy
import gc
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cria_tricks.hardware import this_device
from cria_tricks.load import overlapped_offload
from cria_tricks.load.overlapped_offload import Overlapped, copy_stream
from cria_tricks.load.streaming import stream
from cria_tricks.switches.stream_layers import SLOTS
from cria_tricks.techniques import keep_attention
from cria_tricks.techniques.activation_offload import Offloaded
from cria_tricks.techniques.gradient_checkpointing import checkpointed
from cria_tricks.techniques.paged_optimizer import PagedAdamW, Pager
from tests.helpers import train
from tests.techniques.attention import Kernels
from tests.tolerances import COMPILED_MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

L, B, T, D = 8, 4, 512, 256
LORA = ["tricks.peft=lora", "lora.r=8", "train.batch_size=2", "train.max_steps=6", "train.learning_rate=5e-3"]


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(L)]
    return nn.ModuleList(made).cuda()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_offloaded_activations_leave_the_card_and_come_back_bit_for_bit(checkpointing):
    found, held = {}, {}
    for name in ("here", "offloaded"):
        stack, x = blocks(), torch.ones(B, T, D, device="cuda", requires_grad=True)
        there = Offloaded(stack.parameters())
        gc.collect()  # what an earlier test has left must not be freed in between
        before = torch.cuda.memory_allocated()
        with there if name == "offloaded" else torch.enable_grad():
            y = x
            for block in stack:
                y = checkpointed(block, y) if checkpointing else block(y)
        held[name] = torch.cuda.memory_allocated() - before
        y.sum().backward()
        found[name] = [x.grad, *(p.grad for p in stack.parameters())]
        if name == "offloaded":
            assert there.bytes_to_device == there.bytes_to_host >= L * x.nbytes
            assert held[name] <= y.nbytes + 2**20, "the output, and what the allocator rounds up"
    print(f"{this_device().name}: {held} bytes on the card after the forward pass")
    assert held["here"] >= (L - 1) * 4 * B * T * D
    assert all(map(torch.equal, found["here"], found["offloaded"]))


def seconds_of(run, many: int = 5) -> float:
    """The least of some runs, in seconds of the card."""
    found = []
    for _ in range(many):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return min(found)


def test_overlapped_copies_change_no_bit_and_hide_behind_the_blocks():
    """Long enough that a block computes for longer than the copy of its input takes, on any card."""
    wide, tokens, copies = 2048, 8192, copy_stream("cuda")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)) for _ in range(L)]
    stack = nn.ModuleList(layers).cuda().half().requires_grad_(False)
    x = torch.randn(1, tokens, wide, device="cuda", dtype=torch.float16, requires_grad=True)

    def step(context) -> list[torch.Tensor]:
        x.grad = None
        with context:
            y = x
            for block in stack:
                y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
        return [y.detach(), x.grad]

    ways = {
        "here": contextlib.nullcontext,
        "synchronous": lambda: Offloaded(stack.parameters()),
        "overlapped": lambda: Overlapped(stack.parameters(), stack, copies=copies),
    }
    found, seconds, peaks = {}, {}, {}
    for name, make in ways.items():
        for _ in range(3):  # the first one pins memory; several, because a race need not show at once
            found[name] = [tensor.clone() for tensor in step(make())]
            assert all(map(torch.equal, found[name], found["here"])), name
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(make())
        peaks[name] = torch.cuda.max_memory_allocated() - before
        seconds[name] = seconds_of(lambda make=make: step(make()))
    added = seconds["synchronous"] - seconds["here"]
    hidden = 1 - (seconds["overlapped"] - seconds["here"]) / added
    print(f"{this_device().name}: {seconds} s, {hidden:.0%} of the copies hidden; {peaks} bytes more at the peak")
    assert peaks["here"] - peaks["overlapped"] >= (L - 4) * x.nbytes
    assert hidden > 0.5
    assert copies.begun == copies.awaited


def test_dropout_on_the_card_is_replayed_by_our_checkpoint():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D)).cuda()
    x = torch.randn(B, T, D, device="cuda", requires_grad=True)
    found = []
    for way in (block, lambda x: checkpointed(block, x)):
        torch.manual_seed(1)
        found.append([*torch.autograd.grad(way(x).sum(), [x, *block.parameters()]), torch.cuda.get_rng_state()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rows", [1, 2], ids=["without a mask", "with a mask"])
def test_kept_attention_runs_the_cards_kernel_once(rows):
    """The kept output and log-sum-exp come back in place of a second run: the same loss, half of the runs."""
    torch.manual_seed(0)
    mask = None if rows == 1 else torch.ones(rows, 1, T, T, dtype=torch.bool, device="cuda").tril()
    x = torch.randn(rows, 4, T, 64, device="cuda", dtype=torch.float16, requires_grad=True)

    def attend(x):
        return nn.functional.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)

    runs, found = [], []
    for more in ({}, {"context_fn": keep_attention.contexts}):
        with Kernels() as seen:
            y = checkpoint(attend, x, use_reentrant=False, **more)
            found.append([y.detach(), torch.autograd.grad(y.float().sum(), x)[0]])
        runs.append(seen.runs.total())
    print(f"{this_device().name}: {seen.runs}")
    assert runs == [2, 1]
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=5e-3)  # backward kernels add in no fixed order


def test_offloading_in_the_trainer_keeps_the_run(tiny_model, rows, tmp_path):
    runs = {}
    for value in ("false", "true"):
        settings = [*LORA, "tricks.gradient_checkpointing=true", f"tricks.activation_offload={value}"]
        runs[value], _ = train(tiny_model, rows[:2], tmp_path / value, *settings)
    losses = [[entry["loss"] for entry in run.training] for run in runs.values()]
    # Backward passes on a card add up in no fixed order, so two runs differ even without a toggle.
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.parametrize("width", [D, 8 * D], ids=["short copies", "long copies"])
def test_streamed_blocks_compute_the_same_bits(width):
    """Two blocks on the card; ten passes, in which copies and kernels race if an event is missing."""
    x = torch.randn(T, width, device="cuda", requires_grad=True)
    found, held = {}, {}
    for name in ("here", "streamed"):
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        stack = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()).cuda() for _ in range(L))
        fetching = stream(stack.requires_grad_(False), "cuda") if name == "streamed" else None
        held[name] = torch.cuda.memory_allocated() - before
        found[name] = []
        for _ in range(10):
            y = x
            for block in stack:
                y = checkpoint(block, y, use_reentrant=False)
            found[name] += [y.detach(), *torch.autograd.grad(y.sum(), x)]
        if fetching:
            assert fetching.fetched == L + 10 * (L - SLOTS) + 9 * (L - SLOTS)
    print(f"{this_device().name}: {held} bytes of weights on the card")
    assert held["here"] >= L * width * width * 4
    assert held["streamed"] <= SLOTS * width * width * 4 + 2**20
    assert all(map(torch.equal, found["here"], found["streamed"]))


def test_copies_of_streamed_blocks_are_hidden_by_long_rows():
    """The time of a pass with streaming against both times alone. Printed, and only bounded by their sum."""
    width = 4096
    stack = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()).half() for _ in range(L))
    resident = copy.deepcopy(stack).requires_grad_(False).cuda()
    fetching = stream(stack.requires_grad_(False).cuda(), "cuda")
    x = torch.randn(16_384, width, device="cuda", dtype=torch.float16, requires_grad=True)

    def seconds(go) -> float:
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            go()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return sorted(times[1:])[2]

    def through(blocks) -> None:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False)
        y.float().sum().backward()

    def copies() -> None:
        for number in range(2 * (L - SLOTS)):
            fetching.slots[number % SLOTS].copy_(fetching.buffers[number % L], non_blocking=True)

    alone, link, together = seconds(lambda: through(resident)), seconds(copies), seconds(lambda: through(stack))
    hidden = (alone + link - together) / min(alone, link)
    print(f"{this_device().name}: {alone:.4f} s of kernels, {link:.4f} s of copies, {together:.4f} s together; "
          f"{hidden:.0%} of the shorter one hidden")  # fmt: skip
    assert together < 1.1 * (alone + link)


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_streaming_in_the_trainer_keeps_the_run(tiny_model, rows, tmp_path, quantization):
    runs = {}
    for value in ("false", "true", "file"):
        settings = [*LORA, "tricks.gradient_checkpointing=true", f"tricks.quantization={quantization}"]
        runs[value], _ = train(tiny_model, rows[:2], tmp_path / value, *settings, f"tricks.stream_layers={value}")
    losses = [[entry["loss"] for entry in run.training] for run in runs.values()]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0] == pytest.approx(losses[2], abs=1e-3)


def test_overlapped_offloading_in_the_trainer_keeps_the_run(tiny_model, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(overlapped_offload, "SMALL", 0)
    runs = {}
    for value in ("false", "overlapped"):
        settings = [*LORA, "tricks.gradient_checkpointing=true", f"tricks.activation_offload={value}"]
        runs[value], _ = train(tiny_model, rows[:2], tmp_path / value, *settings)
    losses = [[entry["loss"] for entry in run.training] for run in runs.values()]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_our_pager_on_the_card_is_torchs_adamw_bit_for_bit():
    torch.manual_seed(0)
    plain = [torch.randn(1000, 77, device="cuda", requires_grad=True) for _ in range(2)]
    paged = [weight.detach().clone().requires_grad_() for weight in plain]
    torchs = torch.optim.AdamW(plain, lr=0.1, foreach=False)
    ours = PagedAdamW(paged, pager := Pager(4, 4096, "cuda"), lr=0.1)
    for _ in range(5):
        for a, b in zip(plain, paged, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        torchs.step()
        ours.step()
    assert all(map(torch.equal, plain, paged))
    assert pager.frames_FE.is_cuda
    assert all(not page.is_cuda for page in pager.host.values())
    assert pager.bytes_to_device > 0


@pytest.mark.parametrize("pressure", [False, True], ids=["room", "full"])
def test_bitsandbytes_paged_states_are_the_unpaged_ones_also_when_the_card_is_full(pressure):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    start = torch.randn(4096, 1024, device="cuda")
    found, held = {}, {}
    for name, made in (("unpaged", bnb.optim.AdamW32bit), ("paged", bnb.optim.PagedAdamW32bit)):
        weight = nn.Parameter(start.clone())
        optimizer = made([weight], lr=0.1)
        draw = torch.Generator("cuda").manual_seed(1)
        filler = None
        for step in range(4):
            weight.grad = torch.randn(weight.shape, generator=draw, device="cuda")
            before = torch.cuda.memory_allocated()
            optimizer.step()
            if step == 0:
                held[name] = torch.cuda.memory_allocated() - before
            if pressure and name == "paged" and step == 1:
                free, _ = torch.cuda.mem_get_info()
                filler = torch.ones(max(free - 2**30, 2**20), dtype=torch.uint8, device="cuda")  # the states must go
        torch.cuda.synchronize()
        found[name] = weight.detach().clone()
        del filler, optimizer
        torch.cuda.empty_cache()
    print(f"{this_device().name}: {held} bytes of the allocator's for 33,554,432 bytes of states")
    assert held["unpaged"] >= 2 * start.nbytes
    assert held["paged"] < 2**20, "managed memory is not the allocator's"
    assert torch.equal(found["unpaged"], found["paged"])


def test_compiled_blocks_train_the_same_model(tiny_model, rows, tmp_path):
    runs = {}
    for value in ("false", "true"):
        torch._dynamo.reset()
        settings = [*LORA, "tricks.attention=sdpa", f"tricks.compile={value}"]
        runs[value], _ = train(tiny_model, rows[:4], tmp_path / value, *settings)
    losses = [[entry["loss"] for entry in run.training] for run in runs.values()]
    peaks = {value: max(entry["peak_bytes"] for entry in run.training) for value, run in runs.items()}
    kernels = {value: run.attention_kernel for value, run in runs.items()}
    print(f"{this_device().name}: peak {peaks} bytes, attention {kernels}, losses {losses}")
    assert losses[0] == pytest.approx(losses[1], abs=100 * COMPILED_MODEL)
    assert kernels["true"] == kernels["false"]
