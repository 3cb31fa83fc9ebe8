# ---
# jupyter:
#   question: How long do cards take to exchange their tensors, and when does one more card stop making training faster?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Interconnect: when more cards stop helping
# > **Promise.** Two cards are rarely twice as fast as one, and over a slow link eight can be slower than one, because
# > they wait for each other's bytes. You will build the ring all-reduce in plain PyTorch, describe a link by its
# > latency and rate, and predict for three strategies and four links when another card stops helping, before you rent
# > it.
# >
# > **Card.** saves the rent of cards that wait / costs seconds of measuring, or a data sheet / bytes exact, seconds
# > within a range / about 25 minutes / after [hybrid parallelism](hybrid.py)
#
# ## 1. The bill
# Our job is QLoRA of Llama-3.2-1B, with eight [rows](../docs/glossary.md#row) a step. (Tensor parallelism refuses 4-bit
# weights, so there they have 16 bits.)
#
# Take two A100s on NVLink, whose data sheet says 300 GB a second in each direction. In one step, [data
# parallelism](data_parallel.py) sends 45 MB, and [tensor parallelism](tensor_parallel.py) 119 times as much. Divided by
# this rate, they take 0.15 ms and 17.9 ms. How many times these 17.9 ms will the calls of tensor parallelism take?

# %% Your guess: times as long as by division tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports, settings, and the bill tags=["hide-input"]
import logging
import statistics
import warnings
from functools import partial
from unittest import mock

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

from cria_tricks import course, recipes
from cria_tricks.course import (
    CARDS,
    LINKS,
    STRATEGIES,
    Call,
    Theme,
    compute_seconds,
    find_shape,
    ring_collectives,
    step_seconds,
    table,
    with_settings,
)

MIB = 2**20
A100, shape = CARDS["a100"], find_shape("llama-3.2-1b")
job = recipes.capstone(A100.device)
# sharding needs an optimizer of torch, and tensor parallelism weights in 16 bits
plain_adamw = with_settings(
    job, ["tricks.optimizer=adamw", "tricks.paged_optimizer=false"]
)
bf16 = with_settings(
    plain_adamw, ["tricks.quantization=none", "tricks.double_quantization=false"]
)
RECIPES = {"ddp": job, "fsdp": plain_adamw, "tensor": bf16}
NAMES = ("nvlink_a100", "pcie4", "hdr", "10gbe")
nvlink = LINKS["nvlink_a100"]

_lines, _found = [], {}
for way in ("ddp", "tensor"):
    calls = STRATEGIES[way].traffic(RECIPES[way], shape, 2)
    number, sent = sum(call.times for call in calls), sum(call.sent for call in calls)
    divided, predicted = sent / nvlink.peak, sum(map(nvlink.seconds, calls))
    latency = 1 - sent / nvlink.rate / predicted
    _found[way] = (number, sent, predicted / divided, latency)
    took = f"{1000 * divided:.2f}", f"{1000 * predicted:.2f}", f"{latency:.0%}"
    _lines.append((way, f"{number:,}", f"{sent / 1e6:,.0f}", *took))
_columns = ("strategy", "calls", "MB sent", "ms by division", "ms predicted", "latency")
course.show_table(table(_columns, _lines))
course.reveal(guess, _found["tensor"][2], "times")
assert _found["ddp"][0] == 1
assert _found["tensor"][0] == 641
assert round(_found["tensor"][1] / _found["ddp"][1]) == 119
assert [round(100 * _found[way][3]) for way in _found] == [7, 30]

# %% [markdown]
# They take nearly twice as long, for two reasons. No link reaches the rate of its data sheet. In addition, each of 641
# calls takes some time, however few bytes it has. This time is its *latency*, and here it is 30 % of the whole. (A call
# is one [collective](../docs/glossary.md#collective), such as an all-reduce. Each row takes five in each of 16 blocks:
# two forward, one repeated by checkpointing, and two backward.)
#
# ## 2. From scratch, in four steps
# A message of $s$ bytes takes $t = \alpha + s / \beta$, where $\alpha$ is the latency and $\beta$ is the rate. An
# [all-reduce](../docs/glossary.md#all-reduce) consists of messages, whose number and size depend on the algorithm.
#
# **Step 1: let one process add up.** All processes send their tensors to process 0, which adds them up, and sends the
# sum back. We count what each of four processes sends.

# %%
import time

import torch
import torch.distributed as dist

from cria_tricks.course import CountCollectives, Ranks


def star(x):
    others = range(1, dist.get_world_size())
    if dist.get_rank() > 0:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    for other in others:
        received = torch.empty_like(x)
        dist.recv(received, other)
        x += received
    for other in others:
        dist.send(x, other)


def trial(all_reduce, dtype=torch.int64):
    """Our sum, torch's sum, bytes that this process sends, and its number of sends."""
    torch.manual_seed(dist.get_rank())
    ours = (100 * torch.randn(1024)).to(dtype)
    theirs = ours.clone()
    dist.all_reduce(theirs)
    with CountCollectives() as count:
        all_reduce(ours)
    return ours, theirs, count.bytes["send"], count.calls["send"]


def sent_by_each(all_reduce):
    """What each process sends: 1 means as many bytes as the tensor has."""
    shares = []
    for ours, theirs, sent, _ in ranks.run(trial, all_reduce):
        assert torch.equal(ours, theirs)
        shares.append(sent / ours.nbytes)
    return shares


ranks = Ranks(4)  # four processes on this computer, joined by gloo
print("each process sends", sent_by_each(star))

# %% Silence log messages in all processes tags=["hide-input"]
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
# torch 2.13 has new names for two of the functions
_ = ranks.run(warnings.simplefilter, "ignore", FutureWarning)

# %% [markdown]
# The sum is right, but process 0 sends $N - 1$ tensors and receives as many. So with twice as many processes it takes
# about twice as long.
#
# **Step 2: send pieces around a ring, and add.** Now each process talks only to its two neighbours, and the tensor is
# cut into $N$ pieces. In each turn, every process sends *one* piece to the right, and adds the piece that comes from
# the left to its own. After $N - 1$ turns, each process has one complete piece of the sum. This is a
# [reduce-scatter](../docs/glossary.md#all-reduce).


# %%
def exchange(sent, to, received, source):
    """Send and receive at once. If all sent first, all could wait forever."""
    both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def reduce_scatter(pieces):
    rank, N = dist.get_rank(), dist.get_world_size()
    # Rank 1 sends piece 1 and adds to piece 0; then it sends piece 0, and adds to 3.
    for turn in range(N - 1):
        growing = pieces[(rank - turn - 1) % N]
        received = torch.empty_like(growing)
        sent = pieces[(rank - turn) % N]
        exchange(sent, (rank + 1) % N, received, (rank - 1) % N)
        growing += received


# %% [markdown]
# **Step 3: send the complete pieces around the ring.** This takes $N - 1$ more turns, in which nothing is added: an
# *all-gather*. Step 2 and step 3 together are the ring all-reduce. How many times the bytes of the tensor does each of
# four processes send now?

# %% Your guess: times the tensor that each sends tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def all_gather(pieces):
    rank, N = dist.get_rank(), dist.get_world_size()
    for turn in range(N - 1):
        sent, received = pieces[(rank + 1 - turn) % N], pieces[(rank - turn) % N]
        exchange(sent, (rank + 1) % N, received, (rank - 1) % N)


def ring(x):
    pieces = x.tensor_split(dist.get_world_size())  # views: they change x
    reduce_scatter(pieces)
    all_gather(pieces)


# %% Print what each process sends, and draw figure 1 tags=["hide-input"]
print("each process sends", sent_by_each(ring))
course.reveal(guess, sent_by_each(ring)[0], "times")


def turns(theme: Theme):
    """How many processes' numbers are in each piece, turn by turn, as the code above
    moves them."""
    sketch = course.Sketch(theme, 46, 28)
    inside = [[1] * 4 for _ in range(4)]
    for turn in range(7):
        # at first and reduce-scatter above, all-gather below
        column, below = (turn, 0) if turn < 4 else (turn - 4, 14.6)
        left = 5.4 + 10.3 * column
        head = "at first" if turn == 0 else f"turn {turn}"
        sketch.text(left + 4.5, below + 0.6, head)
        for rank in range(4):
            top = below + 1.9 + 2.6 * rank
            if turn in (0, 4):
                sketch.text(0, top + 1, f"rank {rank}", align="left")
            for piece in range(4):
                held = inside[rank][piece]
                box = (left + 2.35 * piece, top, 2, 2)
                sketch.tensor(
                    *box, str(held), color=1 if held == 4 else 0, kept=held > 1
                )
        before = [list(row) for row in inside]
        for rank in range(4):
            piece = (rank - turn - 1) % 4 if turn < 3 else (rank - turn + 3) % 4
            inside[rank][piece] = before[rank - 1][piece] + (
                before[rank][piece] if turn < 3 else 0
            )
    sketch.text(30.5, 12.8, "reduce-scatter: sums grow", quiet=True)
    sketch.text(20.2, 27.4, "all-gather: sums are handed on", quiet=True)
    return sketch.figure


course.show(
    turns,
    "Figure 1. Four processes with four pieces each. The number says how many "
    "processes have been added up in a piece: dashed boxes are a process's own "
    "numbers, blue ones are sums that grow, and orange ones are complete. After three "
    "turns every process has one complete piece, and after six turns all of them.",
)

# %% [markdown]
# These are six turns with a quarter of the tensor each. In general a process sends $1 / N$ of the tensor in $2 (N - 1)$
# turns, always less than twice the tensor. So with more processes the bytes hardly grow, but the number of messages
# does:
#
# $$t = 2 (N - 1)\,\alpha + \frac{2 (N - 1)}{N} \cdot \frac{s}{\beta}$$
#
# **Step 4: get the two numbers from measurements.** If we measure calls of several sizes, the seconds lie on a line
# over the bytes that a process sends. At zero bytes the line shows the latency of a whole call, with all its messages,
# and its slope is $1 / \beta$. A usual fit minimises the squared errors in seconds, so the largest size would decide
# nearly alone. Therefore we minimise the *relative* error.


# %%
def line_through(points):
    """Latency and rate, from pairs of bytes sent and seconds."""
    sent, seconds = torch.tensor(points, dtype=torch.float64).T
    # least squares of predicted / measured = (latency + slope * sent) / seconds = 1
    A = torch.stack([1 / seconds, sent / seconds], dim=1)
    ones = torch.ones(len(A), 1, dtype=torch.float64)
    latency, slope = torch.linalg.lstsq(A, ones).solution.flatten().tolist()
    return latency, 1 / slope


made_up = [(size, 3e-4 + size / 2e9) for size in (1e3, 1e5, 1e7)]
latency, rate = line_through(made_up)
print(f"latency {latency:.1e} s, rate {rate:.1e} bytes a second")

# %% [markdown]
# ## 3. Prove it
# For whole numbers, our sum was equal to torch's. Floating-point numbers are added in another order, so there the claim
# is *exact within rounding*. But all processes must hold the same bits, because otherwise their copies of the model
# drift apart.

# %%
for name, way in (("ours", ring), ("package", ring_collectives.ring_all_reduce)):
    found = ranks.run(trial, way, torch.float32)
    ours, theirs, sent, sends = found[0]
    error = (ours - theirs).norm() / theirs.norm()
    print(f"{name:8} off by {error:.0e}; {sent:,} bytes in {sends} messages")
    assert error < 1e-6
    assert all(torch.equal(ours, other) for other, *_ in found)
    assert sent == 2 * 3 / 4 * ours.nbytes
    assert sends == 2 * 3

# %% Check the line tags=["hide-input"]
for _one, _right in zip(line_through(made_up), (3e-4, 2e9), strict=True):
    assert abs(_one / _right - 1) < 1e-6

# %% [markdown]
# ## 4. What it costs
# **Measure your link.** nccl-tests, NVIDIA's benchmark, reports two bandwidths. The *algorithm bandwidth* is the size
# of the tensor, divided by the seconds. The [bus bandwidth](../docs/glossary.md#bus-bandwidth) is what each process
# *sends*, divided by the seconds. Only the bus bandwidth can be compared with the rate of a link, because a link takes
# time for what is sent. (Where a switch adds up, as with NVLink SHARP, it can be higher.)
#
# We measure torch's all-reduce between two processes of this machine in five sizes, and fit the line. Then we predict
# and measure 8 MiB:


# %%
def measure(sizes):
    """Pairs of bytes sent and seconds, for all-reduces between ranks 0 and 1."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return []  # the others have nothing to do
    took = {size: [] for size in sizes}
    for _ in range(21):
        for size in sizes:  # in turn, so that a busy moment meets all sizes
            x = torch.zeros(size // 4)
            start = time.perf_counter()
            dist.all_reduce(x, group=pair)
            took[size].append(time.perf_counter() - start)
    # The first call connects. Of the others the fastest: other programs only delay.
    return [(size, min(took[size][1:])) for size in sizes]


points = ranks.run(measure, [2**power for power in (12, 15, 18, 21, 24)])[0]
latency, rate = line_through(points)
print(f"{1000 * latency:.2f} ms + bytes sent / {rate / 1e9:.2f} GB a second")
((size, took),) = ranks.run(measure, [2**23])[0]
predicted = latency + size / rate
print(f"8 MiB: predicted {1000 * predicted:.1f} ms, measured {1000 * took:.1f} ms")


# %% Draw figure 2 tags=["hide-input"]
def measured_line(theme: Theme):
    """Seconds against bytes: what was measured, and the line."""
    drawn, axes = course.figure(height=2.9)
    grid = [2 ** (power / 4) for power in range(48, 98)]
    axes.plot(
        grid,
        [1000 * (latency + size / rate) for size in grid],
        color=theme.series[0],
        linewidth=1,
        label="the line",
    )
    axes.scatter(
        [size for size, _ in points],
        [1000 * seconds for _, seconds in points],
        color=theme.series[1],
        label="measured",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes that a process sends",
        ylabel="milliseconds of a call",
    )
    axes.grid()
    axes.legend()
    return drawn


course.show(
    measured_line,
    "Figure 2. An all-reduce between two processes of the machine that built this "
    "page, over gloo. On the left, calls of any size take the same time. On the right, "
    "twice the bytes take twice as long.",
)

# %% [markdown]
# Errors of tens of per cent are usual, and good enough, because the links below differ by up to 300 times.
#
# **Without the cards, use their data sheet.** `LINKS` of the package has each link's rate, and the part that
# collectives reach, with sources. The latency has two parts there: a *start* for each call, and a *hop* for each turn
# of the ring. Both are NCCL's figures for large calls. For small ones it takes a faster protocol: two cards over HDR
# then need 12 µs instead of 36. NCCL has one hop for all networks, which is too short for Ethernet. For an all-reduce
# between two cards, at which size do the bytes take half of the time?


# %%
def call_seconds(link, size, N):
    """The predicted time of a ring all-reduce."""
    turns = 2 * (N - 1)
    return link.start + turns * link.hop + turns / N * size / link.rate


# %% Compare five links tags=["hide-input"]
lines = []
(gradients,) = STRATEGIES["ddp"].traffic(job, shape, 2)
for name in (*NAMES, "nvlink_h100"):
    link = LINKS[name]
    latency_of_two = link.start + 2 * link.hop
    took = call_seconds(link, gradients.bytes, 2)
    assert abs(took / link.seconds(gradients) - 1) < 1e-9
    rates = f"{link.rate / 1e9:.2f} of {link.peak / 1e9:.2f}"
    half = f"{latency_of_two * link.rate / 1e6:.2f}"
    times = [f"{1e6 * time:.1f}" for time in (link.start, link.hop, latency_of_two)]
    lines.append((link.name, rates, *times, half, f"{1000 * took:.2f}"))
columns = ("link", "GB/s reached", "start, µs", "hop, µs", "start + 2 hops, µs")
columns += ("MB that take as long", "gradients of our job, ms")
course.show_table(table(columns, lines))
assert lines[0][5] == "3.53"
_rates = [LINKS[name].rate for name in (*NAMES, "nvlink_h100")]
assert 300 < max(_rates) / min(_rates) < 320

# %% [markdown]
# Below 3.5 MB, NVLink needs more time for latency than for bytes.
#
# **When do more cards stop helping your training?** With $N$ cards a step takes as long as one of them computes, as in
# [choosing hardware](choose_your_hardware.py), and then the time of its calls. (Nothing overlaps. One card computes
# 1.70 s, or 1.63 for `tensor`.) We double $N$ as long as the step becomes at least 1.5 times as fast, so that the new
# cards do at least half as much as the old ones. We take four links (over a network each card has its own machine) and
# three strategies: `ddp`, `fsdp` ([sharding](sharding.py)) and `tensor`. How many of these 12 cases stop at one card?

# %% Your guess: cases of 12 that stop at one card tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def speeds_of(recipe, link, way):
    """The speed of 1, 2, 4 and 8 cards, divided by that of one."""
    took = {}
    for N in (1, 2, 4, 8):
        computes = compute_seconds(recipe, shape, A100, way, N)
        calls = STRATEGIES[way].traffic(recipe, shape, N) if N > 1 else []
        took[N] = step_seconds(computes, calls, link).seconds
    return {N: took[1] / seconds for N, seconds in took.items()}


def stops_at(speed):
    """Double the cards as long as the step becomes at least 1.5 times as fast."""
    N = 1
    while 2 * N in speed and speed[2 * N] >= 1.5 * speed[N]:
        N *= 2
    return N


stops, lines = {}, []
for way, recipe in RECIPES.items():
    for name in NAMES:
        found = speeds_of(recipe, LINKS[name], way)
        stops[way, name] = stops_at(found)
        speeds = [f"{found[N]:.2f} times" for N in (2, 8)]
        lines.append((way, LINKS[name].name, str(stops[way, name]), *speeds))
ideal = [compute_seconds(bf16, shape, A100, "tensor", N) for N in (1, 2, 8)]
speeds = [f"{ideal[0] / ideal[place]:.2f} times" for place in (1, 2)]
lines.append(("tensor", "sending takes no time", "1", *speeds))
divided = with_settings(bf16, ["parallel.sequence=true"])
found = speeds_of(divided, nvlink, "tensor")
speeds = [f"{found[N]:.2f} times" for N in (2, 8)]
lines.append(("tensor, sequence", nvlink.name, str(stops_at(found)), *speeds))
columns = ("strategy", "link", "stops at", "speed of 2 cards", "of 8 cards")
course.show_table(table(columns, lines))
course.reveal(guess, sum(number == 1 for number in stops.values()), "cases")

# %% Draw figure 3, and hold the numbers of the text tags=["hide-input"]
_alone = {way: compute_seconds(RECIPES[way], shape, A100, way, 1) for way in RECIPES}
assert [round(took, 2) for took in _alone.values()] == [1.70, 1.70, 1.63]
assert {number for (way, _), number in stops.items() if way == "ddp"} == {8}
assert {number for (way, _), number in stops.items() if way == "tensor"} == {1}
assert [stops["fsdp", name] for name in NAMES] == [8, 8, 8, 1]
_speeds = {(way, link): (two, eight) for way, link, _, two, eight in lines}
assert _speeds["tensor", nvlink.name][0] == "1.44 times"
assert _speeds["tensor", "sending takes no time"][0] == "1.48 times"
assert lines[-1][2:] == ("2", "1.59 times", "2.21 times")
_latencies = [6.6 + 2 * 2.7, 1e6 * (LINKS["hdr"].start + 2 * LINKS["hdr"].hop)]
assert [round(one) for one in _latencies] == [12, 36]
_slow_ddp = speeds_of(job, LINKS["10gbe"], "ddp")
_fast_tensor = speeds_of(bf16, nvlink, "tensor")
assert all(_slow_ddp[N] > _fast_tensor[N] for N in (2, 4, 8))


def of_speed(theme: Theme):
    """Times as fast as one card, by strategy and link."""
    drawn, axes = course.figure(height=3.4)
    styles = {
        "nvlink_a100": ("-", "o", 9),
        "pcie4": ((0, (4, 2)), "s", 5.5),
        "10gbe": ((0, (1, 1.5)), "D", 4),
    }
    # above the lines that nearly reach it
    axes.plot((1, 8), (1, 8), color=theme.ink, linewidth=0.8, zorder=5)
    for (way, recipe), colour in zip(RECIPES.items(), theme.series, strict=False):
        for name, (dashes, marker, size) in styles.items():
            found = speeds_of(recipe, LINKS[name], way)
            label = f"{way}, {LINKS[name].name}"
            axes.plot(
                list(found),
                list(found.values()),
                color=colour,
                linestyle=dashes,
                marker=marker,
                markersize=size,
                markerfacecolor="none",  # so that none hides another
                label=label,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="A100 cards",
        ylabel="times as fast as one, predicted",
    )
    axes.set_xticks((1, 2, 4, 8), list("1248"))
    axes.set_yticks((0.25, 0.5, 1, 2, 4, 8), ["1/4", "1/2", *"1248"])
    axes.minorticks_off()
    axes.grid()
    axes.set_ylim(0.15, 12)
    drawn.legend(fontsize=6.5, loc="outside lower center", ncols=3)
    return drawn


course.show(
    of_speed,
    "Figure 3. Eight rows a step on one to eight A100s. On the thin line, N cards are "
    "N times as fast. Data parallelism stays nearest to it over any link. Its lines "
    "for NVLink and PCIe nearly lie on the thin line, as that of fsdp for NVLink does. "
    "Over Ethernet, two cards of either other strategy are slower than one.",
)

# %% [markdown]
# Five cases stop at one card (predicted). For sharding over Ethernet, the reason is the link. For our tensor
# parallelism it is the work: even if sending took no time, two cards would be only 1.48 times as fast, because every
# card computes the norms, the head and the loss for all tokens. With `parallel.sequence=true` the cards divide the
# norms, and over NVLink two are 1.59 times as fast. Megatron also divides head and loss.
#
# The other seven cases stop at eight cards, because a step has only eight rows. For our job the strategy matters more
# than the link: data parallelism over Ethernet gains more than tensor parallelism over NVLink.

# %% [markdown] tags=["deep"]
# ### Deeper: all-gather and reduce-scatter
# These two send half as many bytes as an all-reduce, so over an ideal link they take half as long, at the same bus
# bandwidth. With gloo they reach less bandwidth. For an all-gather into one tensor, torch lets gloo gather into another
# tensor and then copies it. gloo has no reduce-scatter, so torch runs an all-reduce instead.


# %% tags=["deep"]
def measure_all(sizes):
    """Medians of ten calls of three collectives, between ranks 0 and 1."""
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
        for kind, seconds in took.items():
            found.append((kind, size, statistics.median(seconds[1:])))
    return found


timings = ranks.run(measure_all, [2**power for power in (12, 15, 18, 21, 24)])[0]
lines = []
for kind, share in {
    "all_reduce": 1,
    "all_gather": 1 / 2,
    "reduce_scatter": 1 / 2,
}.items():
    own = [(size, seconds) for one, size, seconds in timings if one == kind]
    its_latency, its_rate = line_through([(share * size, took) for size, took in own])
    size, took = own[-1]
    speeds = [f"{sent / took / 1e9:.2f}" for sent in (size, share * size)]
    line = f"{1000 * its_latency:.2f} ms + sent / {its_rate / 1e9:.2f} GB/s"
    lines.append((kind.replace("_", "-"), *speeds, line))
columns = ("16 MiB", "algorithm GB/s", "bus GB/s", "the line")
course.show_table(table(columns, lines))

# %% [markdown] tags=["deep"]
# ### Deeper: more rows for more cards, and Amdahl's law
# **A window that grows.** If each new card brings eight more rows, every card computes as much as before. Then over
# Ethernet 256 cards are 244 times as fast as one card that does all these rows. But a step has 2,048 rows, and we have
# 107: already with 14 cards an epoch is one step. Such a run is another training, with other results.
#
# **Amdahl's law** is about the part of a step that does not become shorter. If this part is a share $a$ of a step on
# one card, $N$ cards are $1 / (a + (1 - a) / N)$ times as fast, and never more than $1 / a$. Full fine-tuning with data
# parallelism has such a part, because each card's optimizer updates *all* weights. We find $a$ from one and eight
# cards, and check it with two and four. Then we add what is sent: with many cards, twice the gradients. Over Ethernet
# any number of cards is slower than one.

# %% tags=["deep"]
wide = with_settings(job, ["tricks.gradient_accumulation=2048"])  # 8 for each card
computes = compute_seconds(wide, shape, A100, "ddp", 256)
sends = STRATEGIES["ddp"].traffic(wide, shape, 256)
took = step_seconds(computes, sends, LINKS["10gbe"]).seconds
speed = 256 * compute_seconds(job, shape, A100, "ddp", 1) / took
print(f"256 cards are {speed:.0f} times as fast as one with all these rows")
assert round(speed) == 244

full = with_settings(bf16, ["tricks.peft=none", "tricks.lean_preparation=false"])
computing = {N: compute_seconds(full, shape, A100, "ddp", N) for N in (1, 2, 4, 8)}
stays = (8 * computing[8] - computing[1]) / 7  # computing[N] is stays + shrinks / N
a = stays / computing[1]
for N in (2, 4):
    assert abs(computing[1] / computing[N] * (a + (1 - a) / N) - 1) < 1e-3
print(f"{a:.1%} of the step stays: at most {1 / a:.1f} times as fast", end=" ")
print("if sending took no time")
most = {}
for name in NAMES:
    sending = 2 * 4 * shape.weights / LINKS[name].rate
    most[name] = computing[1] / (stays + sending)
    print(f"over {LINKS[name].name}: at most {most[name]:.1f} times as fast")
assert most["10gbe"] < 1 < most["pcie4"] < most["nvlink_a100"] < 1 / a

# %% [markdown] tags=["deep"]
# ### Deeper: how many buckets hide the exchange
# With [buckets](data_parallel.py), gradients travel while the backward pass goes on. Here each of eight cards has one
# row. With checkpointing, which runs blocks forward again, the backward pass is two thirds of the computing. The last
# bucket cannot be hidden, because when it is full, nothing is left to compute. Smaller buckets make it shorter, but
# each bucket is a call with its own latency. On Ethernet 128 buckets wait least of these, and 1,024 wait much longer.
# (The last column has NCCL's protocol for small calls, LL. Its start and hops are shorter, and it reaches at most half
# of the rate. NCCL takes whichever it expects to be faster.)
#
# For the same reason tensor parallelism sends large tensors, 8 MiB in each of its sums. An all-reduce for each
# of LoRA's whole matrices would have only 64 KiB (2,048 tokens, rank 16). The switch `parallel.strategy=tensor`
# makes none of these, because it adds up their gradients once a step.

# %% tags=["deep"]
backward = 2 / 3 * compute_seconds(job, shape, A100, "ddp", 8)
waits = {}
for buckets in (1, 2, 16, 128, 1024):
    size = 45_088_768 // buckets
    one = LINKS["10gbe"].seconds(Call("all_reduce", size, 1, 8, "a bucket"))
    # NCCL 2.30's constants for LL; a call of 8 cards has 14 turns
    small = 6.6e-6 + 14 * 2.7e-6 + 14 / 8 * size / (LINKS["10gbe"].rate / 2)
    # the first is full after one part
    waits[buckets] = [
        max(each, backward / buckets + buckets * each - backward)
        for each in (one, min(one, small))
    ]
    times = " or ".join(f"{1000 * wait:5.1f}" for wait in waits[buckets])
    print(f"{buckets:5} buckets of {size / MIB:5.2f} MiB: {times} ms of waiting")
for protocol in (0, 1):
    assert min(waits, key=lambda buckets: waits[buckets][protocol]) == 128
    assert waits[1024][protocol] > 50 * waits[128][protocol]

# %% [markdown]
# ## 5. The production switch
# Measure your link before you believe a data sheet. These lines do it on two GPUs (we ran them only on CPUs, with
# gloo):
#
# ```python
# # torchrun --nproc-per-node 2 link.py
# import os
# import time
# import torch
# import torch.distributed as dist
#
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# dist.init_process_group("nccl")
# for power in (12, 16, 20, 24, 28):
#     x = torch.zeros(2**power // 4, device="cuda")
#     took = []
#     for _ in range(21):
#         torch.cuda.synchronize()
#         start = time.perf_counter()
#         dist.all_reduce(x)
#         torch.cuda.synchronize()  # the call itself returns at once
#         took.append(time.perf_counter() - start)
#     print((x.nbytes, min(took[1:])))  # a point for line_through
# dist.destroy_process_group()
# ```
#
# NVIDIA's nccl-tests: `all_reduce_perf -b 4K -e 256M -f 2 -g 2`.
#
# ## 6. Where it breaks
# **The link is hardly used, but the step waits for it.** The reason is many small calls, for example one for each
# matrix, or for each number that is logged. The next cell sends 1 MiB in one call and in 1,024 calls, and predicts both
# roughly from the line above. The cure: send buckets, and log once a step, with all numbers in one tensor.
#
# **`all_reduce` takes a third of the step, on a link that should need a hundredth.** The reason is that all processes
# wait for the slowest one. A profiler counts this waiting as communication, in every process but the slow one. So look
# for the rank that waits *least*, and ask what it does before the call. In the last lines it is rank 2.


# %%
def in_pieces(calls):
    pair, pieces = dist.new_group([0, 1]), torch.zeros(2**18).chunk(calls)
    if dist.get_rank() > 1:
        return 0
    took = []
    for _ in range(5):
        start = time.perf_counter()
        for piece in pieces:
            dist.all_reduce(piece, group=pair)
        took.append(time.perf_counter() - start)
    return min(took[1:])  # as above: the first one connects


def waiting(slow):
    dist.barrier()
    if dist.get_rank() == slow:
        time.sleep(0.3)  # a longer row, a hot card, a slow disk
    start = time.perf_counter()
    dist.all_reduce(torch.zeros(1024))
    return time.perf_counter() - start


for calls in (1, 1024):
    predicted = calls * latency + MIB / rate
    took = ranks.run(in_pieces, calls)[0]
    print(f"calls: {calls:5,}, predicted {1000 * predicted:.1f} ms,", end=" ")
    print(f"measured {1000 * took:.1f} ms")
for rank, took in enumerate(ranks.run(waiting, 2)):
    print(f"rank {rank} is in the all-reduce for {took:.3f} s")

# %% [markdown] tags=["deep"]
# ### Deeper: eight cards are slower than four, a card that seems busy, and which path NCCL takes
# **Eight cards are slower than four, and all of them are 100 % busy.** The reason is tensor parallelism between
# machines. A ring is as fast as its slowest link, and every block waits for this link. With one InfiniBand port for
# each card NCCL lays a ring through each port, so the four ports of a machine add up to 86 GB/s (measured). Even so,
# eight cards are slower than four in one machine. `nvidia-smi` counts a kernel that waits as work, but the card draws
# less power. The cure is to keep *tensor* inside a machine, and let *data* cross ([hybrid parallelism](hybrid.py)).
#
# **The link reaches much less than the table says.** `nvidia-smi topo -m` shows what joins two cards, and with
# `NCCL_DEBUG=INFO` NCCL logs the path that it takes: P2P between two cards, SHM through the host's memory, or NET. The
# rates for PCIe presume P2P. In a virtual machine it may be slow or missing, so measure there.

# %% tags=["deep"]
times = {"1 card": compute_seconds(bf16, shape, A100, "tensor", 1)}
crossing = (
    ("4 in a machine", 4, nvlink),
    ("8 in two, a port", 8, LINKS["hdr"]),
    ("8 in two, 4 ports", 8, LINKS["hdr"].over(4)),
    ("8 in two, Ethernet", 8, LINKS["10gbe"]),
)
for name, N, link in crossing:
    calls = STRATEGIES["tensor"].traffic(bf16, shape, N)
    computes = compute_seconds(bf16, shape, A100, "tensor", N)
    times[name] = step_seconds(computes, calls, link).seconds
for name, took in times.items():
    print(f"{name:20} {took:.2f} s")
assert times["8 in two, Ethernet"] > 5 * times["1 card"]
assert times["8 in two, a port"] > times["8 in two, 4 ports"] > times["4 in a machine"]

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** With eight cards, an all-reduce of 1 GiB takes 5.1 ms. What is its bus bandwidth? The answer is a
#    number of bytes a second. (Which link of section 4 is it?)
# 2. **Build.** An all-reduce for *small* tensors. Swap whole tensors with the process whose rank differs in the lowest
#    bit, and add. Then do the same with the next bit, until all bits are done: $\log_2 N$ turns. Fill in `doubling(x)`,
#    which returns the sum, a tensor shaped like `x` (it may change `x`). (Six lines with `exchange`; $N$ is any power
#    of two. `rank ^ 2` differs from `rank` in the second bit.)
# 3. **Reach.** Doubling sends whole tensors, so for large tensors the ring is faster. From which size on, for 64
#    processes over InfiniBand HDR? The answer is a number of bytes. (Both start once, and each turn costs a hop:
#    `LINKS["hdr"].hop`, in seconds. `.rate` is in bytes a second.)

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
                f"{made} turns; {N} processes need {needed}, a turn for each bit"
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
    "write down the seconds of both, turns times a hop plus bytes sent over the "
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
# - **Saves** the rent of cards that would only wait.
# - **Costs** seconds of measuring, or a data sheet. A call takes its latency, plus the bytes sent divided by the rate.
# - **As good as** its two numbers: within tens of per cent on gloo, and within a range for a step.
# - **When**: before you rent a second card. A few large calls go over any link, and many calls need NVLink.
# - **When not**: with LoRA and `ddp` on cards of one machine. There you run out of rows before the link matters.
#
# ## Sources
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, section 3 (the
#   ring). Thakur, Rabenseifner and Gropp 2005, *Optimization of Collective Communication Operations in MPICH*, IJHPCA
#   19(1) (latency and rate; doubling for small messages).
# - nccl-tests, `doc/PERFORMANCE.md`: the two bandwidths. What links reach: the sources in `LINKS`; for NVLink of an
#   A100 and for four ports it was measured by nccl-tests (issue 175, and nccl issue 1048). NCCL's author on ports that
#   add up: nccl issue 412; on the protocol LL and its rate: nccl issue 281. P2P in virtual machines: NCCL's user guide,
#   troubleshooting, GPU Direct.
# - Amdahl 1967, *Validity of the single processor approach*, AFIPS 30. Li et al. 2020, arXiv 2006.15704, section 3.2
#   (buckets, overlap).
# - NVML API reference, `nvmlUtilization_t`: a card is busy while a kernel executes, whatever it does. axolotl,
#   `docs/nccl.qmd`: busy, and less power than usual, while a collective hangs.
# - torch 2.13, `ProcessGroupGloo.cpp`: its reduce-scatter is an all-reduce, its all-gather has a copy.
# - Ours: `cria_tricks/predict/links.py`, `benchmarks/links.py`; `tests/parallel/test_collectives.py`, `test_links.py`.
