# ---
# jupyter:
#   question: If a card is 100 % busy and the run is slow, how do you look into the run, and which numbers can you
#     believe?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Monitoring: a card that is 100 % busy and does nothing
# > **Promise.** Your GPU is 100 % busy, and the run is slow. Or `nvidia-smi` shows 14 GiB, although the tensors of the
# > run take 2. You will build a sampler, a trace and a memory snapshot, and find a stall and a memory leak with them,
# > and a hanging process with two ready tools. You also learn what "100 % busy" counts, and four numbers for "the
# > memory".
# >
# > **Card.** saves hours of guessing / costs less than a thousandth of the run for samples, on a CPU; a trace slows
# > three steps / exact: no bit of the run changes by samples and a trace / about 25 minutes / after [data at
# > scale](data_at_scale.py)
#
# We predicted our job, QLoRA of Llama-3.2-1B on a T4. Now we look at a run.
#
# ## 1. The bill
# Four numbers are called "the memory of the run":
#
# - **Allocated** are the bytes of living tensors, `torch.cuda.memory_allocated()`. Our bill predicts this number.
# - **[Reserved](../docs/glossary.md#reserved)** is what torch's allocator has taken from the driver: the allocated
#   bytes, and freed pieces that the allocator keeps.
# - **The card's memory** is what `nvidia-smi` shows: the reserved bytes, the CUDA context of every process, and what
#   libraries such as NCCL take without torch.
# - **The process's memory** is its [resident memory](../docs/glossary.md#rss) on the host. Tensors of a CPU are in it,
#   next to Python and its libraries.
#
# At the peak, our job has allocated 1,532 MiB (1,516 in its step, and 16 for the library cuBLAS), and we bill a context
# with 400 MB ([the bill](the_bill.py)). How many MiB does `nvidia-smi` show at least?

# %% Your guess: MiB that nvidia-smi shows tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import atexit
import gzip
import shutil
import tempfile

from rich.console import Console

from cria_tricks import Recipe, course, train
from cria_tricks.course import CUDA_CONTEXT as CONTEXT
from cria_tricks.course import (
    T4,
    LiveBytes,
    Monitor,
    Theme,
    panels,
    table,
    with_settings,
)
from cria_tricks.course import read_monitor as read
from cria_tricks.course import summarise_monitor as summarise

disk = tempfile.TemporaryDirectory()
_ = atexit.register(disk.cleanup)  # "_ =", so that the cell shows no value

# %%
bill = course.bill(course.so_far("monitoring"))
print(f"allocated {bill.allocated_bytes / 2**20:,.0f} MiB (predicted)")
course.reveal(guess, (bill.allocated_bytes + CONTEXT) / 2**20, "MiB")


# %% Draw figure 1 tags=["hide-input"]
def of_the_numbers(theme: Theme):
    """What each of three numbers contains."""
    sketch = course.Sketch(theme, 45, 13)
    for number, (width, name, who) in enumerate(
        (
            (24, "tensors", "allocated: torch counts"),
            (31, "pieces kept for later", "reserved: torch counts"),
            (36, "context", "the card: the driver counts"),
        )
    ):
        top = 1 + 4 * number
        sketch.tensor(0.5, top, 24, 2.4, "tensors", color=0)
        if number > 0:
            sketch.tensor(24.5, top, 7, 2.4, "kept", color=1)
        if number > 1:
            sketch.tensor(31.5, top, 5, 2.4, name, color=2)
        sketch.text(width + 1, top + 1.2, who, quiet=True, align="left")
    return sketch.figure


course.show(
    of_the_numbers,
    "Figure 1. The memory of one card has three numbers. Each contains the number "
    "above it, and more. In our job 1,532.4 MiB are allocated at the peak, the context "
    "takes 381.5, and a T4 has 15,095.1.",
)
_sizes = (bill.peak_bytes, bill.allocated_bytes, CONTEXT, T4.memory_bytes)
assert [round(size / 2**20, 1) for size in _sizes] == [1516.2, 1532.4, 381.5, 15095.1]

# %% [markdown]
# ## 2. From scratch, in three instruments
# **Instrument 1: a sampler.** A thread reads a number repeatedly, and writes it down. Ours reads its own process's
# resident memory.
#
# It watches a tensor of 64 MiB, which we create with `torch.empty`, fill, and delete. A tensor counter reports 64, 64
# and 0 MiB. How many MiB larger is the *process* after `torch.empty`?

# %% Your guess: MiB more in the process, after torch.empty tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
import collections
import contextlib
import json
import linecache
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MIB = 2**20


def resident_bytes():
    try:  # Linux: the second number is pages in memory
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * mmap.PAGESIZE
    except FileNotFoundError:  # macOS: KiB
        command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
        return 1024 * int(subprocess.check_output(command))


class Sampler(threading.Thread):
    def __init__(self, read, seconds):
        super().__init__(daemon=True)  # it never keeps a process alive
        self.read, self.seconds = read, seconds
        self.ended, self.samples = threading.Event(), []

    def run(self):
        while not self.ended.wait(self.seconds):
            self.samples.append(self.read())

    def next(self):  # the second from now, because the next may have begun already
        seen = len(self.samples)
        while len(self.samples) < seen + 2:
            time.sleep(0.01)
        return self.samples[-1]


watch = Sampler(resident_bytes, 0.02)
watch.start()
before = watch.next()
x = torch.empty(64 * MIB, dtype=torch.uint8)
created = round((watch.next() - before) / MIB)
x.fill_(1)
filled = round((watch.next() - before) / MIB)
del x
deleted = round((watch.next() - before) / MIB)
watch.ended.set()

# %% Print the samples, and compare your guess tags=["hide-input"]
print(f"created {created:+} MiB, filled {filled:+} MiB, deleted {deleted:+} MiB")
course.reveal(guess, created, "MiB")
assert max(abs(created), abs(deleted)) < 16
assert 48 < filled < 80
torch.manual_seed(0)
torch.set_num_threads(1)
place = Path(disk.name)

# %% [markdown]
# The process does not grow at first, because `torch.empty` writes nothing, and the system hands out a page of memory at
# its first use. So a process can be smaller than its tensors, and be killed later, when they are filled.
#
# **Instrument 2: a [trace](../docs/glossary.md#trace).** It is a list of *spans* with a name, a start and a duration in
# microseconds. Written as JSON, this is Chrome's trace format, which the viewer Perfetto (ui.perfetto.dev) draws. Here
# we trace six training steps whose batches come from a slow drive.

# %%
events: list[dict] = []  # "ph": "X" is a span; "pid", "tid": its process and thread


@contextlib.contextmanager
def span(name):
    begin = time.perf_counter()
    try:
        yield
    finally:  # also if the run dies here
        times = {"ts": 1e6 * begin, "dur": 1e6 * (time.perf_counter() - begin)}
        events.append({"name": name, "ph": "X", "pid": 0, "tid": 0, **times})


D, N = 256, 64  # width, rows of a batch
up, down = torch.nn.Linear(D, 4 * D), torch.nn.Linear(4 * D, D)
optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()])


def loss_of(x):
    hidden = up(x)
    y = down(F.gelu(hidden))
    return y.square().mean()


for number in range(6):
    with span("fetch"):
        time.sleep(0.05)  # a network drive
        x = torch.randn(N, D)
    with span(f"step {number}"):
        loss_of(x).backward()
        optimizer.step()
        optimizer.zero_grad()
trace = Path(tempfile.mkdtemp()) / "trace.json"
trace.write_text(json.dumps({"traceEvents": events}))  # drop it on ui.perfetto.dev
fetching = sum(event["dur"] for event in events if event["name"] == "fetch")
total = events[-1]["ts"] + events[-1]["dur"] - events[0]["ts"]
print(f"fetching takes {fetching / total:.0%} of the time")

# %% Draw figure 2 tags=["hide-input"]
trace.unlink()
trace.parent.rmdir()
assert [event["name"].split()[0] for event in events] == 6 * ["fetch", "step"]
assert all(event["dur"] > 49_000 for event in events if event["name"] == "fetch")


def of_the_stall(theme: Theme):
    """The spans, as Perfetto draws them."""
    drawn, (axes,) = panels(1, 1.6)
    zero = events[0]["ts"]
    for event in events:
        stalls = event["name"] == "fetch"
        axes.barh(
            0,
            event["dur"] / 1000,
            left=(event["ts"] - zero) / 1000,
            height=0.6,
            color=theme.alarm if stalls else theme.series[0],
            edgecolor=theme.ink,
            linewidth=0.4,
        )
    axes.set_yticks([])
    axes.set(xlabel="milliseconds; fetching a batch in red, training steps in blue")
    return drawn


course.show(
    of_the_stall,
    "Figure 2. The trace of six steps. Before each step the processor waits for its "
    "batch. The first step is longer, because the optimizer creates its states.",
)

# %% [markdown]
# The run spends most of its time waiting. Tokens a second show *that* a run is slow, and only the trace shows *where*.
# Tokenize before training, or let a `DataLoader` fetch batches in other processes.
#
# On a card an operation returns before its [kernel](../docs/glossary.md#kernel) has run, so our spans would be wrong.
# There call `torch.cuda.synchronize()` at both ends of a span, or use `torch.profiler`.
#
# **Instrument 3: a [snapshot](../docs/glossary.md#snapshot).** For every living tensor that was created since it began,
# it has the bytes and the line of code. On a card `torch.cuda.memory` writes one, with the whole stack of calls. On a
# CPU a *dispatch mode* sees the result of every operation, as in [the bill](the_bill.py). `our_line` walks up the stack
# to a line of this notebook.


# %%
class Snapshot(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.alive = {}  # the line and the bytes of each storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        key = storage._cdata  # the same for all views
        if key not in self.alive:
            self.alive[key] = our_line(), storage.nbytes()
            # calls self.alive.pop(key, None) when the storage is freed
            weakref.finalize(storage, self.alive.pop, key, None)

    def by_line(self):
        sizes = collections.Counter()
        for line, size in self.alive.values():
            sizes[line] += size
        return sizes


def our_line():
    frame = sys._getframe(3)  # 0 to 2 are our_line, add and __torch_dispatch__
    while frame.f_back and frame.f_globals is not globals():  # still in torch
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


# %% [markdown]
# The evaluation below keeps one fp32 loss of 4 bytes for each batch. How many bytes does each batch really leave in
# memory?

# %% Your guess: bytes that each batch leaves in memory tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
losses = []


def evaluate(batches):
    for _ in range(batches):
        x = torch.randn(N, D)
        losses.append(loss_of(x))


def growth():
    """The bytes that each batch leaves in memory, by line."""
    with Snapshot() as snapshot:
        evaluate(5)
        five = snapshot.by_line()
        evaluate(5)
        more = snapshot.by_line() - five
    return {line: size / 5 for line, size in more.most_common()}


left = growth()
with torch.no_grad():
    cured = growth()

# %% Print both, compare your guess, and hold the numbers of the text tags=["hide-input"]
course.reveal(guess, sum(left.values()), "bytes")
for line, size in left.items():
    print(f"{size:9,.0f} bytes  {line}")
print("with no_grad:", cured)
print("(The line of y: 65,536 bytes of y, and 262,144 of gelu's result.)")
assert left["y = down(F.gelu(hidden))"] == 65_536 + 262_144 == (1 + 4) * 4 * N * D
assert sum(left.values()) == 4 + 4 * (1 + 4 + 4 + 1) * N * D == 655_364
assert sum(cured.values()) == 4

# %% [markdown]
# Each loss holds its graph, and the graph holds all activations, because no backward pass frees them:
# $4\,(1{+}4{+}4{+}1)\,N D + 4$ bytes. The free memory divided by this growth tells at which batch the run dies. With
# `torch.no_grad()` no graph exists, so only the 4 bytes remain. (In training, keep `loss.item()`.)
#
# ## 3. Prove it
# The claim is *exact*: no bit of a run changes. We train a toy with dropout twice, once with the package's sampler and
# trace, and once without. (Its snapshot needs a card, so it is not tested here.) Losses and weights must be equal.

# %% Helpers: a toy run tags=["hide-input"]
rows = [
    {"prompt": f"Count to {n}.", "completion": " ".join(map(str, range(n)))}
    for n in range(10, 22)
]
(place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
settings = [
    "model=random:tiny",
    "tricks.peft=lora",
    "lora.dropout=0.1",
    "tricks.gradient_accumulation=2",
]
settings += [
    f"data.train={place / 'rows.jsonl'}",
    f"data.eval={place / 'rows.jsonl'}",
    "train.max_steps=6",
]


def run(name, *more):
    return train(
        with_settings(Recipe(), [*settings, *more]),
        place / name,
        console=Console(quiet=True),
    )


def result(report):
    """The loss of each step, and the bytes of the adapter."""
    losses = [entry["loss"] for entry in report["history"] if "loss" in entry]
    adapter = Path(report["adapter"]) / "adapter_model.safetensors"
    return losses, adapter.read_bytes()


# %%
plain = run("plain", "train.monitor_seconds=0")
report = run("watched", "train.monitor_seconds=0.1", "train.profile=true")
assert result(plain) == result(report)
print("the same losses and the same adapter, bit for bit")

# %% [markdown] tags=["deep"]
# ### Deeper: the trace agrees with another clock
# With `train.profile=true` two steps pass, one warms the profiler up, and steps 4 to 6 are traced. Each of them has two
# micro-batches and an optimizer step. (On a GPU the trace has each of these spans twice: `user_annotation` is the span
# on the CPU, and `gpu_user_annotation` that of its kernels. We take the CPU's.)
#
# The trainer has a clock of its own. It starts when the span of a step has begun. It stops after the end of this span
# and before the next one, `between steps`. So its seconds must lie between two lengths in the trace, on a busy machine
# too. These are wide bounds. They show that both clocks measure the same step, and no more.

# %% tags=["deep"]
with gzip.open(place / "watched" / "profile" / "trace.json.gz") as file:
    ours = ("step ", "micro-batch ", "optimizer step", "between steps")
    spans = [
        event
        for event in json.load(file)["traceEvents"]
        # without the category, a GPU's trace has each span a second time
        if event.get("cat") == "user_annotation" and event["name"].startswith(ours)
    ]
spans.sort(key=lambda event: (event["ts"], -event["dur"]))
names = [event["name"] for event in spans]
for number in (4, 5, 6):
    here = names.index(f"step {number}")
    assert names[here + 1 : here + 4] == [
        "micro-batch 1",
        "micro-batch 2",
        "optimizer step",
    ]
clock = {
    entry["step"]: entry["step_seconds"]
    for entry in report["history"]
    if "loss" in entry
}
for number in (4, 5):
    step, _, second, _, between, *_ = spans[names.index(f"step {number}") :]
    ends = step["ts"] + step["dur"]
    least, most = (ends - second["ts"]) / 1e6, (between["ts"] - step["ts"]) / 1e6
    print(
        f"step {number}: {clock[number]:.4f} s by the trainer's clock; "
        f"by the trace {least:.4f} to {most:.4f}"
    )
    # the two clocks differ by less than a millisecond
    assert least - 0.001 < clock[number] < most + 0.001

# %% [markdown]
# ## 4. What it costs
# For a sample, the package's monitor reads a few files under `/proc`, and asks the driver of a card five questions. We
# take 200 samples:

# %%
with Monitor(place / "cost.jsonl", 0.05) as monitor:
    time.sleep(0.2)
began = time.thread_time()
for _ in range(200):
    monitor.sample()
each = (time.thread_time() - began) / 200
print(f"{1e6 * each:.0f} microseconds a sample: {each:.4%} of a core at one a second")


# %% Draw figure 3, and hold the report to the samples tags=["hide-input"]
assert each < 0.001  # a thousandth of the run
[_of_report] = report["monitor"]
assert _of_report == summarise(read(place / "watched" / "monitor.jsonl"))
assert _of_report["rss_bytes"]["peak"] > report["peak_bytes"]


def of_the_run(theme: Theme):
    """What the monitor of section 3 saw."""
    samples = read(place / "watched" / "monitor.jsonl")
    drawn, (memory, cores) = panels(2, 2.6)
    seconds = [sample["time"] - samples[0]["time"] for sample in samples]
    memory.plot(
        seconds,
        [sample["rss_bytes"] / MIB for sample in samples],
        color=theme.series[0],
    )
    memory.set(xlabel="seconds", ylabel="process, MiB", ylim=(0, None))
    cores.plot(
        seconds, [sample["cpu_cores"] for sample in samples], color=theme.series[1]
    )
    cores.set(xlabel="seconds", ylabel="cores busy", ylim=(0, None))
    for step in range(1, 7):
        done = min(
            second
            for second, sample in zip(seconds, samples, strict=True)
            if sample["step"] >= step
        )
        for axes in (memory, cores):
            axes.axvline(done, color=theme.quiet, linewidth=0.8, linestyle=":")
    return drawn


course.show(
    of_the_run,
    "Figure 3. The samples of the watched run: it loads and evaluates, takes six steps "
    "(a dotted line is the end of a step), writes the trace, and evaluates again.",
)

# %% [markdown]
# In the middle of a step a sample takes about 250 microseconds, so one a second costs 0.025 % (`make bench-monitor`,
# two quiet AMD EPYC cores). A card's driver has not been measured.
#
# A trace costs more, because torch records every operator. So we trace only three steps.
#
# ## 5. The production switch
# In plain PyTorch, the profiler writes a trace, and the allocator writes a snapshot:
#
# ```python
# from torch.profiler import profile, schedule
#
#
# def save(profiler):
#     profiler.export_chrome_trace("trace.json.gz")
#
#
# three = schedule(wait=2, warmup=1, active=3)
# with profile(schedule=three, on_trace_ready=save) as profiler:
#     for batch in batches:
#         train_step(batch)
#         profiler.step()
#
# torch.cuda.memory._record_memory_history(max_entries=100_000)  # needs a card
# train_step(batch)
# torch.cuda.memory._dump_snapshot("snapshot.pickle")  # for pytorch.org/memory_viz
# torch.cuda.memory._record_memory_history(enabled=None)  # off
# ```
#
# With this package it is one command. The monitor is on by default, and all files stay in the run's folder.
#
# ```bash
# cria train smoke --set train.profile=true
# ```
#
# The report of our watched run has the peaks of the samples, and the operators that took most time.
# (`PythonDispatchMode` is the trainer's tensor counter.)

# %%
[found] = report["monitor"]
print(f"peak of the process {found['rss_bytes']['peak'] / MIB:,.0f} MiB")
print(f"peak of the tensors {report['peak_bytes'] / MIB:,.0f} MiB")
operators = report["profile"]["operators"][:4]
lines = [(row["name"], str(row["calls"]), f"{row['share']:.1%}") for row in operators]
course.show_table(table(("operator", "calls", "share of the time"), lines))

# %% [markdown] tags=["deep"]
# ### Deeper: TensorBoard, and where trackio sends your curves
# `pip install 'cria_tricks[monitor]'` brings TensorBoard and Trackio, and `--set train.report_to=tensorboard,trackio`
# switches them on.
#
# Libraries that report have defaults. trackio (0.43) asks the Hugging Face hub for your name, and sends the curves to
# the Space that the variable `TRACKIO_SPACE_ID` names. The cure is to read what `report_to` switches on, and to unset
# that variable. Our tracker ignores it and writes files.
#
# Weights & Biases collects such curves, too. NVIDIA's DCGM counts how busy the tensor cores are, which `nvidia-smi`
# does not, and Nsight Systems draws a trace of a card's kernels. A loss that jumps, or a gradient norm that grows, says
# that the training itself is ill: our report has both for each step. [Many cards](many_cards.py) computes the share of
# a card's peak that a run reaches (MFU).

# %% [markdown]
# ## 6. Where it breaks
# **The card is 100 % busy, and the run is slow.** A card counts as busy while any kernel runs, whatever the kernel does
# ([utilisation](../docs/glossary.md#utilisation)). As an analogy, a core runs two loops: one multiplies large matrices,
# and the other adds to a single number. *Busy* is the share of the time in which their work runs. How many times as
# many operations a second does the first loop reach?

# %% Your guess: times as many operations a second tags=["predict"]
guess = 0  # @param {type:"number"}


# %% Helper: measure the rate of a loop tags=["hide-input"]
def rate(work, flops, seconds=0.4):
    """Work for a while: operations in a second of processor time, and the share of the
    time in which work ran, which is what a card calls busy."""
    began, before, times, busy = time.perf_counter(), time.process_time(), 0, 0.0
    while (start := time.perf_counter()) - began < seconds:
        work()
        busy += time.perf_counter() - start
        times += 1
    return times * flops / (time.process_time() - before), busy / (start - began)


# %%
A, one = torch.randn(512, 512), torch.zeros(1)


def add_often():  # a kernel that does nearly nothing, again and again
    for _ in range(10_000):
        one.add_(1)


products, busy = rate(lambda: A @ A, 2 * 512**3)
print(f"large matrices: {busy:4.0%} busy, {products:16,.0f} operations a second")
sums, busy_adding = rate(add_often, 10_000)
print(f"one number:     {busy_adding:4.0%} busy, {sums:16,.0f} operations a second")
course.reveal(guess, products / sums, "times")
assert products > 1000 * sums
assert min(busy, busy_adding) > 0.9  # whatever else the machine does

# %% [markdown]
# Compare tokens a second with the estimate, and look at the power: a T4 whose kernels only wait stays far below its 70
# W. Then a trace shows which kernels fill the time: products, small ones that only move memory, or those of NCCL, which
# wait for other cards.
#
# **The monitor never showed more than 2 GiB, but the run needed 3 and stopped.** A peak of some milliseconds can lie
# between two samples. We sample before and after such a peak, and count with `LiveBytes`, the tensor counter of [the
# bill](the_bill.py):

# %%
with LiveBytes() as live:
    samples = [resident_bytes()]
    spike = torch.ones(256 * MIB, dtype=torch.uint8)
    del spike
    samples.append(resident_bytes())
print(f"sampled {(max(samples) - samples[0]) / MIB:.0f} MiB more")
print(f"counted {live.peak / MIB:.0f} MiB")
assert live.peak >= 256 * MIB > 4 * (max(samples) - samples[0])

# %% [markdown]
# The cure is the allocator's own peak, `torch.cuda.max_memory_allocated()`, which the report compares with the bill.
#
# **`nvidia-smi` shows 14 GiB for a job of 2, and another run does not fit.** The allocator keeps what was freed ([a
# full card](a_full_card.py)). If *reserved* is far above *allocated*, either a peak has passed, and
# `torch.cuda.empty_cache()` gives its memory back. Or rows of many lengths have cut it into small pieces. Then set
# `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` (new name: `PYTORCH_ALLOC_CONF`) before the start. It is a *leak*
# if *allocated* rises from epoch to epoch.
#
# **A run of several processes stands still, and prints nothing.** Each process waits for the others in the next
# collective ([data parallelism](data_parallel.py)), so one that never arrives stops all of them. torch's *flight
# recorder* keeps the last 2,000 collectives of each process, and *py-spy* reads the stack of a running process:
#
# ```bash
# py-spy dump --pid PID  # one process, if the system allows it
# ```
#
# Below, two processes sum a tensor once a step, and rank 1 waits for rows that nobody sends. One process will be in
# `all_reduce`. Is it the wrong one?


# %% Helper: a program that hangs, and the stacks that py-spy finds tags=["hide-input"]
PROGRAM = """\
import datetime, os, pathlib, queue, sys, threading, time

import torch
import torch.distributed as dist

folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])


def next_rows(step):
    if (rank, step) == (1, 3):
        queue.SimpleQueue().get()  # nobody puts anything in
    return torch.full((1000,), float(step))


def train():
    for step in range(10):
        rows = next_rows(step)
        dist.all_reduce(rows)


def record(recorder=torch._C._distributed_c10d):
    # A thread, because the main thread of a process that hangs writes nothing.
    part = folder / f"{rank}.part"
    while True:
        part.write_bytes(recorder._dump_fr_trace_json(True, False))
        part.replace(folder / f"{rank}.json")  # nobody reads half a file
        time.sleep(0.3)


try:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    dist.barrier()  # both have come; from here on they wait 15 seconds at most
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=15))
    threading.Thread(target=record, daemon=True).start()
    train()
except RuntimeError as error:
    print("error:", error, file=sys.stderr, flush=True)
    os._exit(1)  # Python's own exit would wait for the process that hangs
"""


@contextlib.contextmanager
def hanging(folder):
    """Start the program as two processes, wait until they hang, and end them."""
    folder.mkdir()
    (folder / "hangs.py").write_text(PROGRAM)
    small = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "100"}
    processes = []
    for rank in "01":
        words = [sys.executable, folder / "hangs.py", folder, rank]
        started = subprocess.Popen(words, env=small, stderr=subprocess.PIPE, text=True)
        processes.append(started)
    try:
        # the barrier and three steps have ended, and rank 0 has begun the fourth
        while [collectives(folder, rank) for rank in range(2)] != [(5, 4), (4, 4)]:
            for process in processes:
                assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def collectives(folder, rank):
    """How many collectives a process has begun and ended, by its recorder."""
    path = folder / f"{rank}.json"
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    return len(entries), sum(entry["retired"] for entry in entries)


def print_stacks(processes):
    """Print the innermost calls of each process's main thread."""
    # the folder of this Python may not be on the path
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    spy = shutil.which("py-spy", path=path)
    if spy is None:
        print("there is no py-spy here: pip install py-spy")
        return
    for rank, process in enumerate(processes):
        command = [spy, "dump", "--pid", str(process.pid)]
        plain = os.environ | {"CLICOLOR_FORCE": "0"}  # a notebook asks for colours
        done = subprocess.run(command, capture_output=True, text=True, env=plain)
        if done.returncode:  # this machine lets no process read another
            print(f"rank {rank}: {' '.join(done.stderr.split())}")
            continue
        _, _, main = done.stdout.partition('"MainThread"\n')
        calls = [line.strip() for line in main.splitlines()[:3]]
        print(f"rank {rank}: {' < '.join(calls)}")


# %%
with hanging(place / "hang") as processes:
    for rank in range(2):
        begun, ended = collectives(place / "hang", rank)
        print(f"rank {rank}: {begun} collectives begun, {ended} ended")
    print_stacks(processes)  # py-spy dump --pid, for each
    code = processes[0].wait()
    print(f"rank 0, exit code {code}: {processes[0].stderr.read().strip()}")
assert code == 1

# %% [markdown]
# It is the other one, because rank 0 began its fifth collective, and rank 1 did not. Without the tools you would read
# only the last line, which the *waiting* process printed. So look at the rank that is in no collective. (On cards a
# collective of NCCL only starts work, so stacks tell less. There read the recorder, which NCCL writes to a file at a
# timeout: [When it hangs](../docs/guide/when_it_hangs.md).) The program
# `hangs.py` waits 15 seconds; `parallel.timeout` ends a run of `cria train` that hangs, by default after 10 minutes.
#
# ## 7. Exercises
# 1. **Predict.** On a free T4, others trained Llama-3.2-1B by QLoRA with checkpointing, at 1,060 tokens a second. A
#    token takes 6 operations for each of the 973 million weights of the blocks: 2 forward, 2 when that is repeated, and
#    2 backward. It takes 4 for each of the head's 263 million, where nothing is repeated. What share of the T4's fp16
#    peak, 65e12 operations a second, did the run reach? (It is the HFU, because repeated work counts.)
# 2. **Build.** Fill in `stalls(events)`, the sum of the seconds from the end of a span whose name begins with `step` to
#    the beginning of the next such span. Steps do not overlap, other spans do not count, the list is not sorted, and
#    `ts` and `dur` are microseconds. With fewer than two steps the answer is 0.
# 3. **Reach.** A run leaks 3 MiB a step: step 1 peaks 3 MiB above the bill's `allocated_bytes`, step 2 peaks 6 MiB
#    above it, and so on. CUDA's context takes `CONTEXT` of a T4's `T4.memory_bytes` (all three in MiB: Figure 1). What
#    is the number of the first step that does not fit, if the allocator keeps nothing?

# %% tags=["exercise"]
share_of_the_peak = None


def stalls(events):
    """Return the seconds between steps, a number. FILL ME IN."""


failing_step = None


# %% Check the exercises tags=["hide-input"]
def of_stalls(answer):
    steps = [("step 1", 2, 2), ("step 2", 5, 1), ("step 3", 6.5, 1)]
    later = [("step 10", 13, 1), ("step 9", 10, 1), ("step 11", 16, 1)]
    cases = (
        (
            steps,
            1.5,
            "wait from the end of a step, ts + dur, to the beginning of the next "
            "one, in seconds",
        ),
        (
            [("fetch", 1, 1), *steps, ("save", 9, 1)],
            1.5,
            "only spans whose name begins with step count",
        ),
        (
            [steps[1], ("fetch", 1, 1), steps[0], steps[2]],
            1.5,
            "nobody sorted the list: put the steps in order",
        ),
        (later, 4, "put the steps in the order of their time, not of their names"),
        (steps[:1], 0, "nothing waits between steps where there are fewer than two"),
        ([], 0, "nothing waits between steps where there are fewer than two"),
    )
    for spans, right, hint in cases:
        made = [
            {"name": name, "ts": 1e6 * begin, "dur": 1e6 * took}
            for name, begin, took in spans
        ]
        if (found := answer(made)) is None:
            raise NotImplementedError
        names = ", ".join(name for name, *_ in spans)
        assert abs(found - right) < 1e-6, (
            f"{found} instead of {right} for the spans [{names}]; {hint}"
        )


free = T4.memory_bytes - CONTEXT - bill.allocated_bytes
of_share = course.about(
    (6 * 973e6 + 4 * 263e6) * 1060 / 65e12,
    "add up the blocks' operations and the head's, each weight with its own number; "
    "divide by the peak, and not by 100",
)
of_leak = course.equal(
    free // (3 * MIB) + 1,
    "free is what the context and the bill leave; is yours the last step that fits, "
    "or the first that does not?",
)
course.check(1, share_of_the_peak, of_share, "a number from 0 to 1")
course.check(
    2,
    stalls,
    of_stalls,
    "a function (events) -> a number of seconds, 0 for fewer than two steps",
)
course.check(3, failing_step, of_leak, "the number of a step, a whole number")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # 11 %. (With attention and the adapter it is 11.8 %: many_cards.py. In
# # choose_your_hardware.py it is 0.31, which counts memory traffic as work, too.)
# share_of_the_peak = (6 * 973e6 + 4 * 263e6) * 1060 / 65e12
#
#
# def stalls(events):
#     steps = sorted(
#         (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("step")
#     )
#     return sum(later[0] - earlier[1] for earlier, later in zip(steps, steps[1:])) / 1e6
#
#
# failing_step = (T4.memory_bytes - CONTEXT - bill.allocated_bytes) // (3 * MIB) + 1
# ```
#
# </details>
#
# ## In one breath
# - **Saves** guessing: a sampler shows *that* something grows or waits, a trace shows *when*, and a snapshot shows
#   *which line*.
# - **Costs** less than a thousandth of the run for samples. A trace slows three steps down, and takes seconds to write.
#   A snapshot slows every operation down.
# - **Exact**: samples and a trace change no bit of the run.
# - **When**: samples always, a trace if tokens a second are below the estimate, and a snapshot if *allocated* rises.
# - **When not**: do not trace a whole run, and conclude nothing from "100 %".
#
# ## Sources
# - NVML API reference, `nvmlUtilization_t` (busy while a kernel executes) and `nvmlMemory_t` (what a card counts).
# - Chrome's *Trace Event Format*, section *Complete Events*. torch 2.13, `torch.profiler` and `torch.cuda.memory`.
# - PyTorch, *Understanding CUDA Memory Usage* (snapshots) and *CUDA semantics*, memory management (reserved, segments).
# - Korthikanti et al. 2022, arXiv 2205.05198, appendix A (operations a weight and token; recomputing).
# - 1,060 tokens a second: a workshop's notes of 2026-09-20, a Colab T4, rows of 403 tokens in batches of 4, evaluations
#   and checkpoints included; `docs/benchmarks.md`, *Published figures*. The T4's peak: NVIDIA's datasheet.
# - py-spy 0.4.3, its README. torch 2.13, `FlightRecorder.hpp`. HFU: Chowdhery et al. 2022, arXiv 2204.02311, section
#   4.1.
# - Linux, `proc(5)`: resident set size. trackio 0.43, `trackio/__init__.py`, `run.py`.
# - Ours: `monitor.py` and `profiler.py` in `cria_tricks/measure/`, `cria_tricks/trainer/trackers.py`; their tests;
#   `benchmarks/results/cpu/monitor.json`.
