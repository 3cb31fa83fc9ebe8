# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Interconnect: when more cards stop helping
# > **Promise.** You build the ring that adds gradients up, describe a link by two numbers, and predict the time of a
# > call that you have not measured. Then you say for three strategies and four links when another card stops helping,
# > before you rent it.
#
# > **Card.** saves the rent of cards that wait / costs some arithmetic / bytes as counted; seconds of a step as a
# > range, as in [the lesson on choosing hardware](choose_your_hardware.py) / 35 minutes / after [hybrid
# > parallelism](hybrid.py)
#
# The job: QLoRA of Llama-3.2-1B on 107 training rows, eight rows a step. The last lessons shared the step in every way,
# and counted what processes send. Here we ask how long a byte takes, and how long a *call*, a collective, takes even
# with few bytes.

# %% Imports and settings tags=["hide-input"]
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from functools import partial
from unittest import mock

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import torch
import torch.distributed as dist

from cria_tricks import course, recipes
from cria_tricks.bench.style import Theme
from cria_tricks.bill.calls import Call, CountCollectives, ring_share
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import STRATEGIES, ring_collectives
from cria_tricks.predict import links
from cria_tricks.predict.links import (
    LINKS,
    Timing,
    compute_seconds,
    step_seconds,
    when_it_stops,
)
from cria_tricks.recipe import with_settings

# four processes, joined by gloo as in data_parallel.py; they end with this notebook
ranks = Ranks(4)
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
# torch 2.13 has new names for two of the functions
ranks.run(warnings.simplefilter, "ignore", FutureWarning)
torch.manual_seed(0)
MIB = 2**20


def trial(all_reduce, dtype=torch.int64):
    """Our sum and torch's of 1,024 numbers, and what this process sent: in bytes, in
    calls."""
    torch.manual_seed(dist.get_rank())
    ours = (100 * torch.randn(1024)).to(dtype)
    dist.all_reduce(theirs := ours.clone())
    with CountCollectives() as count:
        all_reduce(ours)
    return ours, theirs, count.bytes["send"], count.calls["send"]


def sent_by_each(all_reduce):
    """Bytes over those of the tensor, rank by rank."""
    found = ranks.run(trial, all_reduce)
    assert all(torch.equal(ours, theirs) for ours, theirs, *_ in found)
    return [size / (8 * 1024) for *_, size, _ in found]


# %% [markdown]
# ## 1. The bill
# Two A100s have NVLink between them: 300 GB a second one way, says the data sheet. Data parallelism sends 45 MB a step,
# tensor parallelism 119 times as much. Divide bytes by the rate, then compare with this lesson's estimate. For which of
# the two is the division badly wrong?

# %%
A100, shape = CARDS["a100"], find_shape("llama-3.2-1b")
job = recipes.capstone(A100.device)
# sharding wants it
plain_adamw = with_settings(
    job, ["tricks.optimizer=adamw", "tricks.paged_optimizer=false"]
)
# as in the lesson on tensor parallelism
bf16 = with_settings(
    plain_adamw, ["tricks.quantization=none", "tricks.double_quantization=false"]
)
RECIPES = {"ddp": job, "fsdp": plain_adamw, "tensor": bf16}
nvlink, parts = LINKS["nvlink_a100"], {}
for way in ("ddp", "tensor"):
    calls = STRATEGIES[way].traffic(RECIPES[way], shape, 2)
    number, sent = sum(call.times for call in calls), sum(call.sent for call in calls)
    estimated = sum(map(nvlink.seconds, calls))
    parts[way] = 1 - sent / nvlink.rate / estimated  # what is not spent on bytes
    print(
        f"{way:7}{sent / 1e6:6,.0f} MB, calls: {number:,}; "
        f"{1000 * sent / nvlink.peak:.2f} ms by division",
        end=", ",
    )
    print(f"{1000 * estimated:.2f} by estimate; latency is {parts[way]:.0%} of that")
assert parts["ddp"] < 0.1 < 0.25 < parts["tensor"]
assert number == 641


# %% [markdown]
# For tensor parallelism: the estimate is nearly twice the division. No link reaches its data sheet's rate. And each of
# 641 calls takes some time however few bytes it has, its *latency*: three tenths of the whole.
#
# ## 2. From scratch, in four steps
# A message takes $t = \alpha + s / \beta$: the latency $\alpha$, and its $s$ bytes at a rate $\beta$. An all-reduce is
# made of messages. How many, and how large? That depends on how it is done.
#
# **One adds up for all.** Everyone sends to process 0, which adds, and sends the sum back. (`sent_by_each` calls it in
# four processes, compares the sum with torch's, and counts.)


# %%
def star(x):
    others = range(1, dist.get_world_size())
    if dist.get_rank() > 0:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    for other in others:
        dist.recv(received := torch.empty_like(x), other)
        x += received
    for other in others:
        dist.send(x, other)


print("of a tensor each process sends", sent := sent_by_each(star))
assert sent == [3, 1, 1, 1]

# %% [markdown]
# The sum is right. But process 0 sends $N - 1$ tensors and receives as many: with twice the processes it takes about
# twice as long.
#
# **Only neighbours talk, and only in pieces.** Put the processes in a ring, and cut the tensor into $N$ pieces. In each
# round everyone sends *one* piece to the right, and adds what comes from the left. So a sum goes round and grows. After
# $N - 1$ rounds everyone has one complete piece: a *reduce-scatter*.


# %%
def exchange(sent, to, received, source):
    """Send and receive at once. If all sent first, nobody would receive, and all would
    wait forever."""
    both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def reduce_scatter(pieces):
    rank, N = dist.get_rank(), dist.get_world_size()
    for turn in range(N - 1):
        growing = pieces[(rank - turn - 1) % N]
        exchange(
            pieces[(rank - turn) % N],
            (rank + 1) % N,
            received := torch.empty_like(growing),
            (rank - 1) % N,
        )
        growing += received


# %% [markdown]
# **Hand complete pieces on.** $N - 1$ more rounds, without adding: an *all-gather*. **Put both together.** How much of
# the tensor does each of four processes send now? Count the rounds before you run.

# %% Your guess: times the tensor that each sends tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def all_gather(pieces):
    rank, N = dist.get_rank(), dist.get_world_size()
    for turn in range(N - 1):
        exchange(
            pieces[(rank + 1 - turn) % N],
            (rank + 1) % N,
            pieces[(rank - turn) % N],
            (rank - 1) % N,
        )


def ring(x):
    # views: what happens to them happens to x
    pieces = x.tensor_split(dist.get_world_size())
    reduce_scatter(pieces)
    all_gather(pieces)


print("of a tensor each process sends", sent := sent_by_each(ring))
assert sent == [1.5] * 4
course.reveal(guess, sent[0], "times")


# %% Draw figure 1 tags=["hide-input"]
def rounds(theme: Theme):
    """How many processes' numbers are in each piece, round by round, as the code above
    moves them."""
    sketch = course.Sketch(theme, 46, 13.4)
    inside = [[1] * 4 for _ in range(4)]
    for turn in range(7):
        left = 4.6 + 6 * turn
        head = "at first" if turn == 0 else f"round {turn}"
        sketch.text(left + 2.6, 0.6, head)
        for rank in range(4):
            if turn == 0:
                sketch.text(0, 2.9 + 2.6 * rank, f"rank {rank}", align="left")
            for piece in range(4):
                held = inside[rank][piece]
                box = (left + 1.3 * piece, 1.9 + 2.6 * rank, 1.2, 2)
                sketch.tensor(
                    *box, str(held), color=1 if held == 4 else 0, kept=held > 1
                )
        before = [list(row) for row in inside]
        for rank in range(4):
            piece = (rank - turn - 1) % 4 if turn < 3 else (rank - turn + 3) % 4
            inside[rank][piece] = before[rank - 1][piece] + (
                before[rank][piece] if turn < 3 else 0
            )
    sketch.text(4.6 + 6 * 2 + 2.6, 12.8, "reduce-scatter: sums grow", quiet=True)
    sketch.text(4.6 + 6 * 5 + 2.6, 12.8, "all-gather: sums are handed on", quiet=True)
    return sketch.figure


course.show(
    rounds,
    "Figure 1. Four processes, four pieces, and how many processes' numbers are in "
    "each. After three rounds every "
    "process has one complete piece, after six all of them.",
)

# %% [markdown]
# Six rounds of a quarter; in general $2 (N - 1)$ rounds of $1 / N$, always less than twice the tensor. So with $N$ the
# bytes hardly grow, but the number of messages does:
#
# $$t = 2 (N - 1)\,\alpha + \frac{2 (N - 1)}{N} \cdot \frac{s}{\beta}$$
#
# ## 3. Prove it
# Sums of whole numbers were equal to torch's, to the bit. Floats are added in another order: *exact within rounding*.
# But all processes must hold the same bits, or replicas drift apart. And the package's ring and ours must send what the
# formula says.

# %%
for name, all_reduce in (("ours", ring), ("package", ring_collectives.ring_all_reduce)):
    found = ranks.run(trial, all_reduce, torch.float32)
    ours, theirs, sent, calls = found[0]
    print(
        f"{name:8} off by {(ours - theirs).norm() / theirs.norm():.0e}; "
        f"{sent:,} bytes sent in {calls} calls"
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-4)
    assert all(torch.equal(ours, other) for other, *_ in found)
    assert (sent, calls) == (4 * 1024 * ring_share("all_reduce", 4), 2 * 3)

# %% [markdown]
# **Two numbers from measurements.** Seconds against bytes sent lie on a line. Its height at zero bytes is the latency
# of a call, and its slope is $1 / \beta$. We want the smallest *relative* errors, or the largest size would decide
# alone. So we divide by the measured seconds. Timings that we made up must give their line back.


# %%
def line_through(timings):
    """Latency and rate: least squares of latency / t + (sent / t) / rate = 1."""
    A = torch.tensor(
        [[1 / one.seconds, one.sent / one.seconds] for one in timings],
        dtype=torch.float64,
    )
    latency, slope = (
        torch.linalg.lstsq(A, torch.ones(len(A), 1, dtype=torch.float64))
        .solution[:, 0]
        .tolist()
    )
    return latency, 1 / slope


made_up = [
    Timing("all_reduce", size, 4, 3e-4 + 1.5 * size / 2e9)
    for size in (10**3, 10**5, 10**7)
]
for found in (line_through(made_up), links.fit_line(made_up)):
    assert all(
        abs(one / right - 1) < 1e-6
        for one, right in zip(found, (3e-4, 2e9), strict=True)
    )

# %% [markdown]
# ## 4. What it costs
# **Measured here.** Three collectives of torch between two processes of this machine, over gloo, in five sizes.
# NVIDIA's nccl-tests name two bandwidths. The *algorithm bandwidth* is the tensor's bytes over the seconds. The *bus
# bandwidth* is what each process *sends* over the seconds, so it can be compared with a link's rate. An all-gather
# sends half of what an all-reduce does. Which of its two should be near the all-reduce's? (The all-reduce's two are
# equal for two processes.)


# %%
def measure(sizes):
    """Medians of ten calls in our first two processes; the others sit still."""
    pair, found = dist.new_group([0, 1]), []
    for size in sizes if dist.get_rank() < 2 else ():
        whole, piece = torch.zeros(size // 4), torch.zeros(size // 8)
        calls = {
            "all_reduce": partial(dist.all_reduce, whole, group=pair),
            "all_gather": partial(
                dist.all_gather_into_tensor, whole, piece, group=pair
            ),
            "reduce_scatter": partial(
                dist.reduce_scatter_tensor, piece, whole, group=pair
            ),
        }
        took = {kind: [] for kind in calls}
        # by turns: what slows one down slows all
        for kind, call in 11 * list(calls.items()):
            start = time.perf_counter()
            call()
            took[kind].append(time.perf_counter() - start)
        found += [
            Timing(kind, size, 2, statistics.median(seconds[1:]))
            for kind, seconds in took.items()
        ]
    return found


SIZES, KINDS = (
    [2**power for power in (12, 15, 18, 21, 24)],
    ("all_reduce", "all_gather", "reduce_scatter"),
)
timings = ranks.run(measure, SIZES)[0]
for kind, last in zip(KINDS, timings[-3:], strict=True):
    print(
        f"{kind:15}",
        *(f"{1000 * one.seconds:7.2f}" for one in timings if one.kind == kind),
        "ms;",
        end=" ",
    )
    print(
        f"at 16 MiB {last.bytes / last.seconds / 1e9:.2f} GB/s algorithm, "
        f"{last.sent / last.seconds / 1e9:.2f} bus"
    )

# %% [markdown]
# The bus bandwidth, because a link takes time for what is sent. But here the all-gather's is lower: torch lets gloo
# gather into another tensor, and copies all of it. A reduce-scatter's is lower still: gloo has none, so torch runs an
# all-reduce.
#
# Now the lines, and a prediction of a sixth size: 8 MiB.

# %%
lines = {
    kind: line_through([one for one in timings if one.kind == kind]) for kind in KINDS
}
for found in ranks.run(measure, [8 * MIB])[0]:
    latency, rate = lines[found.kind]
    predicted, took = 1000 * (latency + found.sent / rate), 1000 * found.seconds
    print(
        f"{found.kind:15}{1000 * latency:6.2f} ms + sent / {rate / 1e9:.2f} GB/s: "
        "predicted",
        end=" ",
    )
    print(
        f"{predicted:.1f} ms, measured {took:.1f}, off by {predicted / took - 1:+.0%}"
    )


# %% Draw figure 2 tags=["hide-input"]
def measured_lines(theme: Theme):
    """Seconds against bytes: what was measured, and the lines."""
    drawn, axes = course.figure(height=3.2)
    grid = [2 ** (power / 4) for power in range(48, 98)]
    for (kind, (latency, rate)), colour, marker in zip(
        lines.items(), theme.series, "osD", strict=False
    ):
        own = [one for one in timings if one.kind == kind]
        times = [1000 * (latency + size * ring_share(kind, 2) / rate) for size in grid]
        axes.plot(grid, times, color=colour, linewidth=1)
        label = kind.replace("_", "-")
        axes.scatter(
            [t.bytes for t in own],
            [1000 * t.seconds for t in own],
            color=colour,
            marker=marker,
            label=label,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes of the tensor",
        ylabel="milliseconds of a call",
    )
    axes.grid()
    axes.legend()
    return drawn


course.show(
    measured_lines,
    "Figure 2. Measured when this page was built, two processes and gloo. "
    "Left, calls of any size take the same time; "
    "right, twice the bytes take twice as long.",
)

# %% [markdown]
# An error of tens of per cent is usual, and good enough to choose by.
#
# **Links, by data sheet.** `LINKS` has for each link the rate that it is sold at and the part that collectives reach.
# Latency comes in two parts there: a *start* for each call, and a *hop* for each round. NVLink has 300 GB/s, of which
# 232.5 are reached, 8.4 µs and 3.4 µs. At which size do bytes take half of an all-reduce's time, between two cards?


# %%
def seconds(call, link):
    rounds = (2 if call.kind == "all_reduce" else 1) * (call.processes - 1)
    return call.times * (link.start + rounds * link.hop) + call.sent / link.rate


NAMES = ("nvlink_a100", "pcie4", "hdr", "10gbe")
for name in NAMES:
    link, (gradients,) = LINKS[name], STRATEGIES["ddp"].traffic(job, shape, 2)
    assert abs(seconds(gradients, link) / link.seconds(gradients) - 1) < 1e-9
    # between two cards, which send as much as the tensor has
    half_way = (link.start + 2 * link.hop) * link.rate
    print(
        f"{link.name:18}{link.rate / 1e9:7.2f} of {link.peak / 1e9:.2f} GB/s;", end=" "
    )
    print(
        f"gradients {1000 * seconds(gradients, link):5.2f} ms; "
        f"half of the time is bytes at {half_way / 1e6:.2f} MB"
    )

# %% [markdown]
# The faster the link and the longer its hops, the larger that size. Below 3.5 MB NVLink waits more than it sends.
# Tensor parallelism's sums have 8 MiB each. A sum at each of LoRA's whole matrices would have 64 KiB (2,048 tokens,
# rank 16), so our switch makes none: it adds up their gradients once a step.
#
# **When do more cards stop helping?** A step takes [the lesson on choosing hardware](choose_your_hardware.py)'s
# computing, divided among $N$ cards, and its calls, of which none is hidden here. We double $N$ as long as the step
# becomes 1.5 times as fast. Three strategies, four links: which pairs stop at one card?

# %%
fixed = {}
for way, recipe in RECIPES.items():
    for name in NAMES:
        found = when_it_stops(
            recipe, shape, A100, LINKS[name], way, STRATEGIES[way].traffic
        )
        fixed[way, name] = found
        last = found.points[-1]
        said = (
            f"stops at {found.stops}; "
            f"{last.processes} are {last.speedup:.2f} times as fast"
        )
        print(f"{way:7}{LINKS[name].name:18}{said}")
assert {found.stops for (way, _), found in fixed.items() if way == "ddp"} == {8}
assert {found.stops for (way, _), found in fixed.items() if way == "tensor"} == {1}
assert 1.4 < fixed["tensor", "nvlink_a100"].points[-1].speedup < 1.5
assert [fixed["fsdp", name].stops for name in NAMES] == [8, 8, 8, 1]


# %% Draw figure 3 tags=["hide-input"]
def of_speed(theme: Theme):
    """Times as fast as one card, by strategy and link."""
    drawn, axes = course.figure(height=3.4)
    styles = {
        "nvlink_a100": ("-", "o"),
        "pcie4": ((0, (4, 2)), "s"),
        "10gbe": ((0, (1, 1.5)), "D"),
    }
    axes.plot((1, 8), (1, 8), color=theme.quiet, linewidth=0.8)
    for (way, recipe), colour in zip(RECIPES.items(), theme.series, strict=False):
        for name, (dashes, marker) in styles.items():
            traffic = STRATEGIES[way].traffic
            points = when_it_stops(
                recipe, shape, A100, LINKS[name], way, traffic, gain=0, most=8
            ).points
            many, speed = (
                [point.processes for point in points],
                [point.speedup for point in points],
            )
            label = f"{way}, {LINKS[name].name}"
            axes.plot(
                many,
                speed,
                color=colour,
                linestyle=dashes,
                marker=marker,
                markersize=4,
                label=label,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="A100 cards",
        ylabel="times as fast as one, estimated",
    )
    axes.set_xticks((1, 2, 4, 8), list("1248"))
    axes.set_yticks((0.25, 0.5, 1, 2, 4, 8), ["1/4", "1/2", *"1248"])
    axes.minorticks_off()
    axes.grid()
    axes.legend(fontsize=6.5, loc="upper left", ncols=3)
    axes.set_ylim(0.08, 40)
    return drawn


course.show(
    of_speed,
    "Figure 3. Eight rows a step on one to eight A100s; "
    "on the thin line N cards are N times as fast. Data parallelism "
    "stays nearest to it, over any link. "
    "Over Ethernet, two cards of either other strategy are slower than one.",
)

# %% [markdown]
# Five: tensor parallelism over any link, and sharding over Ethernet. Over NVLink tensor parallelism just misses our
# limit of 1.5. For `ddp` not the link is the limit, but the *rows*: there are eight. If the window grows with the
# cards, each has as much to compute as before. Then over Ethernet 256 cards are 244 times as fast. But they take 2,048
# rows a step, and we have 107: with 14 cards an epoch is one step. That is another training.

# %%
growing = when_it_stops(
    job, shape, A100, LINKS["10gbe"], "ddp", STRATEGIES["ddp"].traffic, growing=True
)
print(
    f"{growing.points[-1].processes} cards are {growing.points[-1].speedup:.0f} "
    f"times as fast; {growing.why}"
)
assert growing.stops is None
assert round(growing.points[-1].speedup) == 244

# %% [markdown]
# **Amdahl's law** is about the part of a step that does not shrink. If that is a share $a$ of one card's step, $N$
# cards are $1 / (a + (1 - a) / N)$ times as fast, and never more than $1 / a$. Full fine-tuning under `ddp` has such a
# share before any byte is sent: every card's optimizer updates *all* weights. Find $a$ from one card and eight, and
# predict two and four. Then add what is sent: with many cards, twice the gradients.

# %%
full = with_settings(bf16, ["tricks.peft=none", "tricks.lean_preparation=false"])
computing = {N: compute_seconds(full, shape, A100, "ddp", N) for N in (1, 2, 4, 8)}
stays = (8 * computing[8] - computing[1]) / 7  # computing[N] is stays + shrinks / N
a = stays / computing[1]
for N in (2, 4):
    assert abs(computing[1] / computing[N] * (a + (1 - a) / N) - 1) < 1e-3
print(
    f"{a:.1%} of the step stays: at most {1 / a:.1f} times as fast, "
    "if sending took no time;",
    end=" ",
)
most = {
    name: computing[1] / (stays + 2 * 4 * shape.weights / LINKS[name].rate)
    for name in NAMES
}
print(", ".join(f"{LINKS[name].name} {times:.1f}" for name, times in most.items()))
assert most["10gbe"] < 1 < most["pcie4"] < most["nvlink_a100"] < 1 / a

# %% [markdown]
# On Ethernet, any number of cards is slower than one.
#
# **Hide it.** Gradients travel while the backward pass goes on ([data parallelism](data_parallel.py)). Each of eight
# cards has one row. With checkpointing, which runs blocks forward again, its backward pass is two thirds of our
# computing. The last bucket cannot hide: when it is full, nothing is left to compute. So take small buckets? But each
# is a call. Which number is best on Ethernet: 1, 2, 16, 128 or 1,024?

# %%
backward = 2 / 3 * compute_seconds(job, shape, A100, "ddp", 8)
waits = {}
for buckets in (1, 2, 16, 128, 1024):
    one = LINKS["10gbe"].seconds(
        Call("all_reduce", 45_088_768 // buckets, 1, 8, "a bucket")
    )
    # the first is full after one part
    waits[buckets] = max(one, backward / buckets + buckets * one - backward)
    print(
        f"{buckets:5} buckets of {45_088_768 / buckets / MIB:5.2f} MiB: "
        f"{1000 * waits[buckets]:6.1f} ms of waiting"
    )
assert min(waits, key=waits.get) == 128
assert waits[1024] > waits[1]

# %% [markdown]
# ## 5. The production switch
# There is nothing to switch on. But measure before you believe a data sheet. The command starts a process for each
# card, or two on a CPU. We show its lines.

# %%
command = [sys.executable, "-m", "cria_tricks", "doctor", "--collectives"]
print("$ cria doctor --collectives")
done = subprocess.run(
    command, capture_output=True, encoding="utf-8", env=os.environ | {"COLUMNS": "120"}
)
print(*(line for line in done.stdout.splitlines() if "sent" in line), sep="\n")
assert done.returncode == 0, done.stderr

# %% [markdown]
# ## 6. Where it breaks
# **The link is hardly used, but the step waits for it.** Many small calls: one for each matrix, or for each number that
# somebody logs. Predict the time of 1 MiB in 1,024 calls by the line above. Cure: buckets; log once a step, all numbers
# in one tensor.


# %%
def in_pieces(calls):
    pair, pieces = dist.new_group([0, 1]), torch.zeros(2**18).chunk(calls)
    if dist.get_rank() > 1:
        return 0.0
    dist.all_reduce(torch.zeros(1), group=pair)  # connects
    start = time.perf_counter()
    for piece in pieces:
        dist.all_reduce(piece, group=pair)
    return time.perf_counter() - start


latency, rate = lines["all_reduce"]
for calls in (1, 1024):
    predicted, took = (
        calls * latency + MIB / rate,
        min(ranks.run(in_pieces, calls)[0] for _ in range(2)),
    )
    print(
        f"{calls:5} calls: predicted {1000 * predicted:6.1f} ms, "
        f"measured {1000 * took:6.1f}"
    )

# %% [markdown]
# **`all_reduce` takes a third of the step, on a link that should need a hundredth.** All wait for the slowest process.
# A profiler counts their waiting as communication, in every process but the slow one. Cure: look for the rank that
# waits *least*, and ask what it does before the call. Here it is rank 2:


# %%
def waiting(slow):
    dist.barrier()
    if dist.get_rank() == slow:
        time.sleep(0.3)  # a longer row, a hot card, a slow disk
    start = time.perf_counter()
    dist.all_reduce(torch.zeros(1024))
    return time.perf_counter() - start


print(
    "seconds in an all-reduce of 4 KiB:",
    *(f"{found:.3f}" for found in ranks.run(waiting, 2)),
)

# %% [markdown]
# **Eight cards are slower than four, and all of them are 100 % busy.** Tensor parallelism crosses between machines. A
# ring is as fast as its slowest link, and every block waits for this one. `nvidia-smi` counts a kernel that waits as
# work, but the card draws less power. Cure: keep *tensor* inside a machine, and let *data* cross ([hybrid
# parallelism](hybrid.py)).

# %%
times = {"1 card": compute_seconds(bf16, shape, A100, "tensor", 1)}
crossing = (
    ("8 in two, InfiniBand", 8, LINKS["hdr"]),
    ("8 in two, Ethernet", 8, LINKS["10gbe"]),
)
for name, N, link in (("4 in a machine", 4, nvlink), *crossing):
    calls = STRATEGIES["tensor"].traffic(bf16, shape, N)
    times[name] = step_seconds(
        compute_seconds(bf16, shape, A100, "tensor", N), calls, link
    ).seconds
print(", ".join(f"{name}: {took:.2f} s" for name, took in times.items()))
assert times["8 in two, Ethernet"] > 5 * times["1 card"]
assert times["1 card"] > times["8 in two, InfiniBand"] > 1.3 * times["4 in a machine"]

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Eight cards: an all-reduce of 1 GiB takes 5.1 ms. What is its bus bandwidth, in bytes a second?
#    (Which of `LINKS` is it?)
# 2. **Build.** An all-reduce for *small* tensors. Swap whole tensors with the process whose rank differs in the lowest
#    bit, and add; then in the next bit, until all bits are done: $\log_2 N$ rounds. Fill in `doubling(x)`; it returns
#    the sum, a tensor shaped like `x`. (Six lines with `exchange`; $N$ is any power of two. `rank ^ 2` differs from
#    `rank` in the second bit.)
# 3. **Reach.** Doubling sends whole tensors, so for large ones the ring is faster. From which size of the tensor on, in
#    bytes, for 64 processes over InfiniBand HDR? Both start once, and each round costs a hop.
#    (`LINKS["hdr"].hop` is in seconds, `.rate` in bytes a second.)

# %% tags=["exercise"]
bus_bandwidth = None


def doubling(x):
    """Return the sum over all processes, a tensor shaped like x. FILL ME IN."""


break_even_bytes = None


# %% Check the exercises tags=["hide-input"]
def of_doubling(answer):
    def in_groups(N):
        """Our four processes as groups of N: with N = 2, ranks 0 and 1 are one, and 2
        and 3 another."""
        rank = dist.get_rank()
        x = torch.arange(100) * (rank + 1)
        right = sum(
            torch.arange(100) * (other + 1)
            for other in range(4)
            if other // N == rank // N
        )
        with (
            CountCollectives() as count,
            mock.patch.object(dist, "get_world_size", return_value=N),
        ):
            found = answer(x.clone())
        return found, right, count.calls["send"], count.bytes

    for N, needed in ((4, 2), (2, 1), (1, 0)):
        try:
            answers = ranks.run(in_groups, N)
        # a process's whole traceback, of which the last line says what is wrong
        except RuntimeError as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        for found, right, made, sizes in answers:
            if found is None:
                raise NotImplementedError
            same = found.shape == right.shape and torch.equal(found, right)
            hint = (
                "what you swap is the sum so far"
                if N == 4
                else "dist.get_world_size() says how many there are"
            )
            assert same, f"not the sum over all {N}, in every process: {hint}"
            assert set(sizes) <= {"send"}, "use nothing but exchange"
            assert made == needed, (
                f"{made} rounds; {N} processes need {needed}, a round for each bit"
            )


hdr = LINKS["hdr"]
break_even = hdr.hop * (2 * 63 - 6) * hdr.rate / (6 - 2 * 63 / 64)
of_bandwidth = course.about(
    2 * 7 / 8 * 2**30 / 5.1e-3,
    "count what each card sends in both phases of a ring of eight, "
    "in bytes; a GiB has 2^30",
)
of_break_even = course.about(
    break_even,
    "write down the seconds of both, rounds times a hop plus bytes sent over the "
    "rate, and set them equal",
)
course.check(1, bus_bandwidth, of_bandwidth, "a number of bytes a second")
course.check(
    2,
    doubling,
    of_doubling,
    "a function (x) -> the sum over all processes, a tensor shaped like x",
)
course.check(3, break_even_bytes, of_break_even, "a number of bytes")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# bus_bandwidth = 2 * 7 / 8 * 2**30 / 5.1e-3  # 368 GB/s: NVLink of an H100
#
#
# def doubling(x):
#     bit = 1
#     while bit < dist.get_world_size():
#         partner = dist.get_rank() ^ bit
#         exchange(x, partner, received := torch.empty_like(x), partner)
#         x, bit = x + received, 2 * bit
#     return x
#
#
# link = LINKS["hdr"]  # 6 hop + 6 s / rate = 126 hop + 126 / 64 s / rate
# # 10 MB; our gradients have 45
# break_even_bytes = (126 - 6) * link.hop * link.rate / (6 - 126 / 64)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** cards that would only wait.
# - **Costs** ten seconds of measuring, or a data sheet. A call takes its latency, plus the bytes sent over the rate.
# - **As good as** its two numbers: tens of per cent on gloo, a range for a step.
# - **When**: before you rent a second card. Few large calls go over any link; many small ones need NVLink.
# - **When not**: with LoRA and `ddp` on cards of one machine. There you run out of rows first, and the link does not
#   matter.
#
# ## Sources
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, section 3 (the
#   ring). Thakur, Rabenseifner and Gropp 2005, *Optimization of Collective Communication Operations in MPICH*, IJHPCA
#   19(1) (latency and rate; doubling for small messages).
# - nccl-tests, `doc/PERFORMANCE.md`: the two bandwidths. What links reach: the sources in `LINKS`.
# - Amdahl 1967, *Validity of the single processor approach*, AFIPS 30. Li et al. 2020, arXiv 2006.15704, section 3.2
#   (buckets, overlap).
# - NVML API reference, `nvmlUtilization_t`: a card is busy while a kernel executes, whatever it does. axolotl,
#   `docs/nccl.qmd`: busy, and less power than usual, while a collective hangs.
# - torch 2.13, `ProcessGroupGloo.cpp`: its reduce-scatter is an all-reduce, its all-gather has a copy.
# - Ours: `cria_tricks/doctor/collectives.py`, `links.py`; `tests/parallel/test_collectives.py`, `test_links.py`.
