# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Monitoring: a card that is 100 % busy and does nothing
# > **Promise.** You build three instruments, a sampler, a trace and a snapshot, in some twenty lines each, find a stall
# > and a leak with them, and see four numbers for one memory, all of them right.
#
# > **Card.** saves hours of guessing / costs less than a thousandth of the run, seconds where a trace is written /
# > exact: no bit of a run changes / 30 minutes / after [resuming](checkpoint_and_resume.py)
#
# The job is QLoRA of Llama-3.2-1B on 107 training rows, on a T4 with 14.74 GiB. So far you predicted what a step takes.
# This lesson looks at a step while it runs, and asks first of each number: who counted, and when?

# %% Imports and settings tags=["hide-input"]
import atexit
import collections
import contextlib
import gzip
import json
import linecache
import os
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cria_tricks import course
from cria_tricks.bench.style import Theme, panels
from cria_tricks.bill.bill import CONTEXT
from cria_tricks.common.errors import BadInput
from cria_tricks.course import hang_demo
from cria_tricks.doctor import hang
from cria_tricks.hardware import T4
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.measure.monitor import Monitor, read, summarise
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.run import train

torch.manual_seed(0)
torch.set_num_threads(1)
MIB = 2**20
disk = tempfile.TemporaryDirectory()
atexit.register(disk.cleanup)
place = Path(disk.name)

# %% [markdown]
# ## 1. The bill
# Four numbers are called "the memory of the run":
#
# - **allocated**: bytes of living tensors, `torch.cuda.memory_allocated`. This is what our bill predicts
# - **reserved**: what torch's allocator has taken from the driver, freed pieces that it keeps for later included
# - **the card**: what `nvidia-smi` shows, reserved bytes and CUDA's own context, of every process
# - **the process**: resident memory on the host, where tensors of a CPU live beside Python and its libraries
#
# Each of the first three contains the one before it. Our job's tensors take 1.5 GiB at the peak, and we bill a context
# with 400 MB ([the bill](the_bill.py)). How many MiB will `nvidia-smi` show at the least? Guess, then run.

# %% Your guess: MiB that nvidia-smi shows tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
bill = course.bill(course.so_far("monitoring"))
at_least = bill.allocated_bytes + CONTEXT
print(
    f"allocated {bill.allocated_bytes / MIB:,.0f} MiB, "
    f"the card shows {at_least / MIB:,.0f} MiB or more"
)
course.reveal(guess, at_least / MIB, "MiB")


# %% Draw figure 1 tags=["hide-input"]
def of_the_numbers(theme: Theme):
    """Who counts what."""
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
    "Figure 1. One memory on a card, counted three times: "
    "each sees what the one above sees, and more.",
)

# %% [markdown]
# ## 2. From scratch, in three instruments
# **A sampler.** A thread that looks again and again, and writes down what it sees. That is all a monitor is.


# %%
class Sampler(threading.Thread):
    def __init__(self, seconds):
        super().__init__(daemon=True)  # it never keeps a process alive
        self.seconds, self.ended, self.samples = seconds, threading.Event(), []

    def run(self):
        process = psutil.Process()
        while not self.ended.wait(self.seconds):
            self.samples.append((time.perf_counter(), process.memory_info().rss))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.join()


# %% [markdown]
# Let it watch a tensor of 64 MiB: made but empty, then filled, then let go. A tensor counter reports 64, 64 and 0 MiB.
# What does the *process* show each time? Guess.


# %%
def resident(watch):
    seen = len(watch.samples)
    while len(watch.samples) < seen + 2:  # two more looks
        time.sleep(0.01)
    return watch.samples[-1][1] / MIB


with Sampler(0.02) as watch:
    before = resident(watch)
    x = torch.empty(64 * MIB, dtype=torch.uint8)
    made = resident(watch) - before
    x.fill_(1)
    filled = resident(watch) - before
    del x
    gone = resident(watch) - before
print(f"made {made:+.0f} MiB, filled {filled:+.0f} MiB, let go {gone:+.0f} MiB")
assert max(abs(made), abs(gone)) < 16
assert 48 < filled < 80

# %% [markdown]
# Memory that nobody wrote to is not there yet, because the system hands out a page at its first touch. So a process can
# be smaller than its tensors, and be killed an hour later, when they are filled.
#
# **A trace.** A list of spans, each with a name, a beginning and a duration in microseconds. Written as JSON it is
# Chrome's format, and the viewer Perfetto (ui.perfetto.dev) draws it. Here six training steps fetch their batches from
# far away.

# %%
events: list[dict] = []


@contextlib.contextmanager
def span(name):
    begin = time.perf_counter()
    yield
    microseconds = {"ts": 1e6 * begin, "dur": 1e6 * (time.perf_counter() - begin)}
    events.append({"name": name, "ph": "X", "pid": 0, "tid": 0, **microseconds})


D, N = 256, 64  # width, rows of a batch
up, down = torch.nn.Linear(D, 4 * D, bias=False), torch.nn.Linear(4 * D, D, bias=False)
optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()])


def loss_of(x):
    hidden = up(x)
    y = down(F.gelu(hidden))
    return y.square().mean()


def fetch():
    time.sleep(0.05)  # a network drive
    return torch.randn(N, D)


for number in range(6):
    with span("fetch"):
        x = fetch()
    with span(f"step {number}"):
        loss_of(x).backward()
        optimizer.step()
        optimizer.zero_grad()
(place / "trace.json").write_text(json.dumps({"traceEvents": events}))


def share(events, name):
    """Of the time from the first span's beginning to the last one's end, what spans of
    this name take."""
    begin, end = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    return sum(e["dur"] for e in events if e["name"].startswith(name)) / (end - begin)


print(
    f"fetching takes {share(events, 'fetch'):.0%} of the time, "
    f"the steps {share(events, 'step'):.0%}"
)
assert [event["name"].split()[0] for event in events] == 6 * ["fetch", "step"]
assert all(event["dur"] > 49_000 for event in events if event["name"] == "fetch")


# %% Draw figure 2 tags=["hide-input"]
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
    axes.set(xlabel="milliseconds; a batch's way from the drive in red, steps in blue")
    return drawn


course.show(
    of_the_stall,
    "Figure 2. The trace of six steps: before each the processor waits for a batch.",
)

# %% [markdown]
# (The first step is longer: the optimizer makes its states.) Tokens a second would have told *that* it is slow; only
# the trace tells *where*. Cure: tokenise before, or let a `DataLoader` fetch in other processes.
#
# **A snapshot.** For every tensor that is alive: its bytes, and the line that made it. On a card `torch.cuda.memory`
# writes one, with the whole stack of calls. On a CPU [the lesson on the bill](the_bill.py)'s dispatch mode sees every
# operation's result, and `our_line` climbs from there to a line of this lesson.


# %%
class Snapshot(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if (
                isinstance(tensor, torch.Tensor)
                and (key := tensor.untyped_storage()._cdata) not in self.alive
            ):
                self.alive[key] = our_line(), tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.alive.pop, key, None)
        return out

    def by_line(self):
        sizes = collections.Counter()
        for line, size in self.alive.values():
            sizes[line] += size
        return sizes


def our_line():
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals is not globals():
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


# %% [markdown]
# Now an evaluation that keeps one number a batch, an fp32 loss of 4 bytes. It looks like many. How many bytes really
# stay for each? (`loss_of`, `N` and `D` are above.)

# %%
losses = []


def evaluate(batches):
    for _ in range(batches):
        x = torch.randn(N, D)
        losses.append(loss_of(x))


def growth():
    """Bytes a batch that stay, by line."""
    with Snapshot() as snapshot:
        evaluate(5)
        five = snapshot.by_line()
        evaluate(5)
        return {
            line: size / 5 for line, size in (snapshot.by_line() - five).most_common()
        }


kept = growth()
print(*(f"{size:9,.0f} bytes a batch  {line}" for line, size in kept.items()), sep="\n")
print(f"{sum(kept.values()):,.0f} bytes for each 4")
assert sum(kept.values()) == 4 + 4 * (1 + 4 + 4 + 1) * N * D

# %% [markdown]
# Each loss holds its graph, and the graph holds every activation, because there is no `torch.no_grad()` and no backward
# pass to free them. The snapshot names the lines. Divide what is free by the growth, and you know at which batch the
# run will die.

# %%
losses.clear()
with torch.no_grad():
    print("with no_grad", growth())
    assert sum(growth().values()) == 4

# %% [markdown]
# ## 3. Prove it
# Looking changes nothing: two runs with dropout, one with the package's sampler and trace and one without, have the
# same losses. (The snapshot needs a card.)
#
# And the trace is right. Two steps pass, one warms the profiler up, and steps 4 to 6 are traced: each has two
# micro-batches and an optimizer step. The trainer has a clock of its own. It starts after the step's span has begun,
# and stops after that span and before the next one, `between steps`. So its seconds must lie between two lengths in the
# trace, on a busy machine, too.

# %%
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
watched = ["train.monitor_seconds=0.1", "train.profile=true"]


def run(name, *more):
    return train(
        with_settings(Recipe(), [*settings, *more]),
        place / name,
        console=Console(quiet=True),
    )


plain = run("plain", "train.monitor_seconds=0")
report = run("watched", *watched)
step_losses = [
    [entry["loss"] for entry in one["history"] if "loss" in entry]
    for one in (plain, report)
]
assert step_losses[0] == step_losses[1]
weights = [
    (Path(one["adapter"]) / "adapter_model.safetensors").read_bytes()
    for one in (plain, report)
]
assert weights[0] == weights[1]

with gzip.open(place / "watched" / "profile" / "trace.json.gz") as file:
    ours = ("step ", "micro-batch ", "optimizer step", "between steps")
    trace = [
        event
        for event in json.load(file)["traceEvents"]
        if event.get("name", "").startswith(ours)
    ]
trace.sort(key=lambda event: (event["ts"], -event["dur"]))
names = [event["name"] for event in trace]
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
    step, _, second, _, between, *_ = trace[names.index(f"step {number}") :]
    ends = step["ts"] + step["dur"]
    least, most = (ends - second["ts"]) / 1e6, (between["ts"] - step["ts"]) / 1e6
    print(
        f"step {number}: {clock[number]:.4f} s by the trainer's clock; "
        f"by the trace {least:.4f} to {most:.4f}"
    )
    # the two clocks differ by less than a millisecond
    assert least - 0.001 < clock[number] < most + 0.001
print("the same losses and the same adapter, bit for bit")

# %% [markdown]
# ## 4. What it costs
# One sample is a few files under `/proc`, and on a card five questions to the driver. Once a second. Guess the share of
# a processor.

# %%
with Monitor(place / "cost.jsonl", 0.05) as monitor:
    time.sleep(0.2)
began = time.thread_time()
for _ in range(200):
    monitor.sample()
each = (time.thread_time() - began) / 200
print(f"{1e6 * each:.0f} microseconds a sample: {each:.4%} of a core at one a second")
assert each < 0.01


# %% Draw figure 3 tags=["hide-input"]
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
    "Figure 3. Section 3's run, sample by sample: loading and an evaluation, "
    "six steps (dotted: one is done), then the "
    "trace is written and all is evaluated again.",
)

# %% [markdown]
# In the midst of a run a sample takes more, some 250 microseconds: a hundred a second added 2.8 % to a step's seconds,
# so one a second adds 0.03 % (`make bench-monitor`, 60 pairs of steps, two quiet AMD EPYC cores). What a card's
# answers take has not been measured yet.
#
# A trace is another matter. While it is taken every operator is written down, and afterwards all of it goes to the
# disk. So it is three steps and not a run, and the seconds of those three steps are no benchmark.
#
# ## 5. The production switch
# `cria train smoke --set train.profile=true --set train.report_to=tensorboard,trackio` (the monitor is on by itself;
# `pip install 'cria_tricks[monitor]'` brings the other two). All of it lies in the run's folder, and nothing is sent.
# The report has the means and peaks, and the operators that took most. Section 3's report says:

# %%
[found] = report["monitor"]
assert found == summarise(read(place / "watched" / "monitor.jsonl"))
print(
    f"peaks: process {found['rss_bytes']['peak'] / MIB:,.0f} MiB, "
    f"tensors {report['peak_bytes'] / MIB:,.0f} MiB"
)
for row in report["profile"]["operators"][:4]:
    print(f"{row['share']:6.1%}  {row['calls']:5} calls  {row['name']}")
assert found["rss_bytes"]["peak"] > report["peak_bytes"]

# %% [markdown]
# `PythonDispatchMode` is the trainer itself: on a CPU it counts tensors as [the lesson on the bill](the_bill.py) did,
# on a card the allocator does.
#
# ## 6. Where it breaks
# **The card is 100 % busy, and the run is slow.** A card is "busy" while any kernel runs, whatever it does; a core
# while any instruction does. (Others on the machine take their share of the core.) One loop multiplies large matrices,
# one adds to a single number. By which factor do their rates differ?


# %%
def rate(work, flops, seconds=0.4):
    """Work for a while: products and sums in a second of processor time, and the cores
    that were busy."""
    began, before, times = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        work()
        times += 1
    busy = time.process_time() - before
    return times * flops / busy, busy / (time.perf_counter() - began)


A, one = torch.randn(512, 512), torch.zeros(1)
rates = {
    "large products": rate(lambda: A @ A, 2 * 512**3),
    "one number": rate(lambda: one.add_(1), 1),
}
for name, (flops, cores) in rates.items():
    print(f"{name:15} {cores:4.0%} busy  {flops:16,.0f} operations in a busy second")
assert rates["large products"][0] > 1000 * rates["one number"][0]

# %% [markdown]
# Cure: believe tokens a second, and the power draw: a T4 whose kernels only wait stays far below its 70 W. If the clock
# falls while the temperature stays at its highest, the card is too hot.
#
# **The monitor shows 2 GiB, and the run dies of 3.** Samples see what is there when they look. A peak of milliseconds
# lies between two of them. Which number finds it? (`LiveBytes` is [the lesson on the bill](the_bill.py)'s counter.)

# %%
process, sampled = psutil.Process(), []
with LiveBytes() as live:
    sampled.append(process.memory_info().rss)
    spike = torch.ones(256 * MIB, dtype=torch.uint8)
    del spike
    sampled.append(process.memory_info().rss)
print(
    f"sampled {(max(sampled) - sampled[0]) / MIB:.0f} MiB more, "
    f"counted {live.peak / MIB:.0f} MiB"
)
assert live.peak >= 256 * MIB > 4 * (max(sampled) - sampled[0])

# %% [markdown]
# Cure: the allocator's own peak, `max_memory_allocated`, which the report holds beside the bill. Samples show trends.
#
# **`nvidia-smi` shows 14 GiB for a job of 2, and another run does not fit.** The allocator keeps what was freed
# ([allocated and reserved memory](a_full_card.py)). Cure: compare *reserved* with *allocated*. When they
# are far apart, a peak has passed (`torch.cuda.empty_cache()` gives its segments back), or rows of many lengths have
# cut memory into pieces too small for the next (set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the
# start). A *leak* is when *allocated* itself rises from epoch to epoch.
#
# **A curve on a server that you never chose.** Libraries that report have defaults: trackio (0.43) asks the hub for
# your name, and sends to the Space that `TRACKIO_SPACE_ID` names. Cure: read what `report_to` switches on, and unset
# that variable; our tracker ignores it and writes files.
#
# **A run of several processes stands still, and prints nothing.** Each waits for the others in the next collective
# ([data parallelism](data_parallel.py)), so one process that never comes there stops all. Below, two processes sum a
# tensor once a step, and rank 1 waits for rows that nobody sends (`cria_tricks/course/hang_demo.py`). Two tools look
# from outside. torch's *flight recorder* keeps the last collectives of each process; `TORCH_FR_BUFFER_SIZE=100`
# switches it on. *py-spy* reads the stack of a running process, and `cria doctor --hang PID` asks it for every process
# of a run. One will be in `all_reduce`. Is it the one that is wrong?

# %%
with (
    tempfile.TemporaryDirectory() as away,
    hang_demo.hanging(Path(away), seconds=15) as processes,
):
    counts = [hang_demo.counts(one) for one in hang_demo.recorded(Path(away))]
    print(
        *(
            f"rank {rank}: {begun} begun, {ended} ended"
            for rank, (begun, ended) in enumerate(counts)
        ),
        sep="; ",
    )
    try:
        stacks = hang.look(os.getpid())
        print(
            hang.verdict(stacks),
            *(f"rank {one.rank}: {' < '.join(one.frames[:3])}" for one in stacks),
            sep="\n",
        )
    except BadInput as refused:
        # There is no py-spy, or this machine lets no process read another.
        print(refused)
    code = processes[0].wait()
    print(f"rank 0, exit code {code}: {processes[0].stderr.read().strip()}")
assert (counts, code) == ([(5, 4), (4, 4)], 1)

# %% [markdown]
# It is the other one. Rank 0 came to its fifth collective, and rank 1 did not (the barrier at the start is the first).
# Without the tools you would read only the last line, printed by the process that waited. Cure: look at the rank that
# is in no collective. (With NCCL a stack may not show the wait.) What ends a run that hangs is `parallel.timeout`, 10
# minutes unless you set it; here it was 15 seconds. Our watchdog ends a process 20 s after another one has died; it
# does not see one that lives and waits. [When it hangs](../docs/guide/when_it_hangs.md) has the rest.
#
# ## 7. Exercises
# 1. **Predict.** On a free T4, others trained Llama-3.2-1B by QLoRA with checkpointing at 1,060 tokens a second. A
#    token takes 6 operations for each of the 973 million weights of the blocks: 2 forward, 2 when that is repeated, 2
#    backward. It takes 4 for each of the head's 263 million, as nothing is repeated there. The fp16 peak is 65e12
#    operations a second. What share of it did the run reach? (A number from 0 to 1. Utilisation does not show it.)
# 2. **Build.** `stalls(events)` returns seconds, a number: from the end of a span whose name begins with `step` to the
#    beginning of the next such span, summed up. Spans of other names do not count, and nobody sorted the list. (`ts`,
#    `dur`: microseconds. With fewer than two steps it is 0.)
# 3. **Reach.** A run leaks 3 MiB a step: step 1 peaks 3 MiB above the bill's `allocated_bytes`, step 2 peaks 6 above,
#    and so on. Of a T4's `T4.memory_bytes` CUDA's context takes `CONTEXT`. Which is the first step that does not fit?
#    (Its number.)

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
# # 11 %, called HFU. (choose_your_hardware.py says 0.31 of the same run: it counts
# # the time for memory traffic as work, too.)
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
# - **Saves** guessing: a sampler tells *that* something grows or idles, a trace *when*, a snapshot *who*.
# - **Costs** less than a thousandth of the run; a trace slows three steps, and takes seconds to write.
# - **As good as** who counts: allocated, reserved, the card and the process are four numbers for one memory.
# - **When**: samples always; a trace when tokens a second are below the estimate; a snapshot when *allocated* rises.
# - **When not**: no trace over a whole run, and no conclusion from "100 %".
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
