# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Pipeline parallelism: fill the wait
# > **Promise.** You cut a model in two, see one half wait for the other, and make both work at once: gradients stay
# > those of one process, and a ninth of the time is idle instead of half. You count what waits and what travels, and
# > say when it pays.
#
# > **Card.** saves blocks: $L / S$ of $L$ in each of $S$ stages / costs $(S - 1) / (k + S - 1)$ of each stage's time,
# > with $k$ micro-batches a step, and rows of one length / exact within rounding / 35 minutes / after [tensor
# > parallelism](tensor_parallel.py)
#
# The job: QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens. It fits one T4. A large sister,
# Llama-3.1-70B, does not fit an A100 of 40 GB, not even in 4 bits. [The lesson on sharding](sharding.py) gathers all
# weights for every micro-batch, [the lesson on tensor parallelism](tensor_parallel.py) talks in every block, and both
# want fast links. The simplest cut hardly talks: the first blocks here, the last ones there. Each such piece is a
# *stage* (nothing to do with ZeRO's).

# %% Imports and settings tags=["hide-input"]
import itertools
import logging
import random
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import cria_tricks
from cria_tricks import course, recipes
from cria_tricks.bench.case import TRAINED_SHARE
from cria_tricks.bench.style import Theme
from cria_tricks.bill.calls import CountCollectives
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput
from cria_tricks.course.processes import Ranks
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.model import quiet_libraries
from cria_tricks.load.stages import find_blocks
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import ddp, fsdp, pipeline, tensor
from cria_tricks.parallel.model import one_after_the_other
from cria_tricks.parallel.pipeline import step
from cria_tricks.parallel.timetable import Slot, idle_share, timetable
from cria_tricks.predict.links import LINKS
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.run import train
from cria_tricks.tricks import folds

# two processes, joined by gloo as in data_parallel.py; they end with this notebook
ranks = Ranks(2)
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
ranks.run(quiet_libraries)
quiet_libraries()
KIB, MIB, GIB = 2**10, 2**20, 2**30

# %% [markdown]
# ## 1. The bill
# `device_map="auto"` does it without any launcher: one process, two cards, half of the blocks on each. One card would
# need 42.6 GiB, and an A100 has 39.4. What does each of two need? And of $N$ cards, how much of its time does each
# work? Write down both, then run. (`model` is the device map, `pipeline` what we build.)

# %%
A100 = CARDS["a100"].device
large = with_settings(recipes.capstone(A100), ["model=llama-3.1-70b"])
print(
    f"an A100 has {A100.memory_bytes / GIB:.1f} GiB; "
    "QLoRA of Llama-3.1-70B needs in each"
)
for way, N in (("none", 1), ("model", 2), ("pipeline", 2), ("pipeline", 4)):
    bill = per_process(large, find_shape(large.model), A100, way, N)
    print(
        f"N = {N}, {way:8} {bill.least_bytes / GIB:5.1f} GiB, "
        f"{'fits' if bill.fits else 'does not fit'}"
    )
    assert bill.fits == (N > 1)

# %% [markdown]
# It fits two cards. But block 41 needs what block 40 made, and on the way back block 40 needs block 41's gradient. So
# the cards take turns, and each of $N$ works $1 / N$ of the time: two cards are as fast as one, at twice the price. An
# optimizer step, though, is a window of micro-batches that do not know of each other ([gradient
# accumulation](gradient_accumulation.py)). While card 1 has the first, card 0 could begin the second.


# %% Draw figure 1 tags=["hide-input"]
def draw_table(sketch, slots, left, top, unit):
    """One row of boxes a stage, with the numbers of the micro-batches."""
    for stage, mine in enumerate(slots):
        for what, number, begin, end in mine:
            box = (
                left + unit * begin,
                top + 2.2 * stage,
                unit * (end - begin) - 0.12,
                1.9,
            )
            sketch.tensor(*box, str(number + 1), color="FB".index(what))


def turns(theme: Theme):
    """Two stages, four rows: as one batch, and as four micro-batches."""
    sketch = course.Sketch(theme, 44, 12.4)
    for top, name, k, size in ((0.4, "device map", 1, 4), (6.0, "pipeline", 4, 1)):
        slots = timetable(
            [pipeline.gpipe(stage, 2, k) for stage in range(2)], size, 2 * size
        )
        draw_table(sketch, slots, 10, top, 34 / 24)
        sketch.text(0, top + 2.1, name, align="left")
        for stage in range(2):
            sketch.text(
                9.6, top + 1 + 2.2 * stage, str(stage), align="right", quiet=True
            )
    for left, word, color in ((10, "forward", 0), (18, "backward", 1)):
        sketch.tensor(left, 11, 1.2, 1.2, "", color=color)
        sketch.text(left + 1.8, 11.6, word, align="left", quiet=True)
    sketch.text(27, 11.6, "time to the right", align="left", quiet=True)
    return sketch.figure


course.show(
    turns,
    "Figure 1. The same four rows through stages 0 and 1; "
    "numbers are micro-batches. As one batch, one stage always "
    "waits; as four micro-batches, the stages overlap.",
)

# %% [markdown]
# ## 2. From scratch, in three steps
# Ten layers: an embedding, eight blocks, a head. Each of two processes takes five of them. A window has eight rows.

# %% Helpers: made windows, distances tags=["hide-input"]
V, D, T, K = 256, 128, 128, 8  # words, width, tokens of a row, rows of a window


def new_window(seed):
    """Words and labels; -100 where nothing is trained, which in each row is another
    part."""
    torch.manual_seed(seed)
    # small words are common, large ones rare
    words = (V * torch.rand(K, T + 1) ** 3).long()
    labels = words[:, 1:].clone()
    for row, prompt in zip(labels, torch.randint(8, T - 8, (K,)), strict=True):
        row[:prompt] = -100
    return words[:, :-1].contiguous(), labels


windows = [new_window(seed) for seed in range(5)]


def apart(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# %%
def new_model():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)
        )
        for _ in range(8)
    ]
    return nn.Sequential(nn.Embedding(V, D), *blocks, nn.Linear(D, V))


def part(model, stage, S):
    return model[len(model) * stage // S : len(model) * (stage + 1) // S]


def share_of_loss(logits, labels, tokens):
    return (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / tokens
    )


def answers(window):
    """How many tokens are trained."""
    return (window[1] != -100).sum().item()


# %% [markdown]
# **Do passes in an order.** A pass is `("F", 3)`, the forward pass of micro-batch 3, or `("B", 3)`, its backward pass.
# A stage receives what the pass needs, computes, and sends on. Between the two passes it *keeps* the micro-batch. Which
# order it follows, the function does not care.


# %%
def a_step(layers, window, order, k):
    """One stage's passes over k micro-batches: its loss, when it computed, and the most
    micro-batches it kept."""
    stage, S = dist.get_rank(), dist.get_world_size()
    words, labels = (both.chunk(k) for both in window)
    tokens, total, kept, most, slots, under_way = (
        answers(window),
        torch.zeros(()),
        {},
        0,
        [],
        [],
    )

    def receive(source):
        dist.recv(tensor := torch.empty(K // k, T, D), source)
        return tensor

    def send(tensor, to):
        # isend does not wait: the other may be sending, too
        under_way.append((dist.isend(tensor, to), tensor))

    for what, n in order(stage, S, k):
        if what == "F":
            x = receive(stage - 1).requires_grad_() if stage > 0 else words[n]
            begin, y = time.perf_counter(), layers(x)
            if stage == S - 1:
                y = share_of_loss(y, labels[n], tokens)
                total += y.detach()
            else:
                send(y.detach(), stage + 1)
            kept[n] = x, y
        else:
            gradient = receive(stage + 1) if stage < S - 1 else None
            begin, (x, y) = time.perf_counter(), kept.pop(n)
            y.backward(gradient)
            if stage > 0:
                send(x.grad, stage - 1)
        slots.append(Slot(what, n, begin, time.perf_counter()))
        most = max(most, len(kept))
    for work, _ in under_way:
        work.wait()
    return total, slots, most


# %% [markdown]
# **All forward, then all backward.** That is GPipe. With $k = 1$ it is the device map. Say a forward pass takes one
# slot and a backward pass two. Then a stage works $3 k$ slots. The first micro-batch needs $S - 1$ forward passes to
# reach the last stage, the last gradient $S - 1$ backward passes to come home. So $3 (S - 1)$ slots are idle, of
# $3 (k + S - 1)$. Predict the idle share of two stages, at one micro-batch and at eight. It is counted in a timetable,
# where every pass begins as soon as it can, and measured.


# %% Helpers: time the two stages tags=["hide-input"]
def timed(order, k, steps=5):
    layers = part(new_model(), dist.get_rank(), 2)
    return [a_step(layers, windows[0], order, k)[1:] for _ in range(steps)]


def span(slots):
    """Seconds of a step."""
    return max(mine[-1].end for mine in slots) - min(mine[0].begin for mine in slots)


def measured(order, k):
    """The idle share of the fastest step, which was disturbed least; its slots; what
    each stage kept."""
    of_steps = [
        list(zip(*both, strict=True))
        for both in zip(*ranks.run(timed, order, k), strict=True)
    ]
    slots, most = min(of_steps, key=lambda step: span(step[0]))
    return idle_share(slots), slots, most


# %%
def gpipe(stage, S, k):
    return [(what, n) for what in "FB" for n in range(k)]


def counted(order, S, k):
    return idle_share(timetable([order(stage, S, k) for stage in range(S)]))


for k in (1, 2, 4, 8):
    share, _, most = measured(gpipe, k)
    print(
        f"k = {k}: by formula {1 / (k + 1):.0%}, "
        f"by timetable {counted(gpipe, 2, k):.0%}, measured {share:.0%} idle"
    )
    assert abs(counted(gpipe, 2, k) - 1 / (k + 1)) < 1e-9
    assert most == (k, k)

# %% [markdown]
# Measured is the fastest of five steps, and still it depends on what else runs. The idle share is called the *bubble*.
# And GPipe has a price: by the last `assert`, each stage kept all $k$ micro-batches. What [the lesson on gradient
# accumulation](gradient_accumulation.py) made small is large again.
#
# **One forward, one backward.** A backward pass frees what its micro-batch kept, so do it as soon as it can be done.
# Stage $s$, counted from 0, first makes $S - 1 - s$ forward passes, to fill the stages behind it. Then one forward, one
# backward, in turn. At the end come the backward passes that are left. This is *1F1B*. How many micro-batches does
# stage $s$ keep at most? And is the bubble smaller?


# %%
def one_f_one_b(stage, S, k):
    forward, backward = ([(what, n) for n in range(k)] for what in "FB")
    ahead = min(S - 1 - stage, k)
    # without strict=True, because the longer one has `ahead` more
    in_turn = itertools.chain(*zip(forward[ahead:], backward))  # noqa: B905
    return [*forward[:ahead], *in_turn, *backward[k - ahead :]]


share, slots, most = measured(one_f_one_b, 8)
print(
    f"timetable {counted(one_f_one_b, 2, 8):.0%} idle, measured {share:.0%}; "
    f"micro-batches kept: {most}"
)
assert most == (2, 1)
assert all(
    abs(counted(one_f_one_b, S, k) - (S - 1) / (k + S - 1)) < 1e-9
    for S in (2, 4, 8)
    for k in (8, 16)
)
assert one_f_one_b(1, 4, 8) == pipeline.one_forward_one_backward(1, 4, 8)


# %% Draw figure 2 tags=["hide-input"]
def most_kept(order):
    """The most forward passes whose backward pass has not been."""
    return max(itertools.accumulate(1 if what == "F" else -1 for what, _ in order))


def orders(theme: Theme):
    """Four stages, eight micro-batches, in both orders."""
    sketch = course.Sketch(theme, 44, 22)
    for top, name, order in ((1.2, "GPipe", gpipe), (12.0, "1F1B", one_f_one_b)):
        passes = [order(stage, 4, 8) for stage in range(4)]
        draw_table(sketch, timetable(passes), 4.6, top, 34.6 / 33)
        sketch.text(0, top + 4.3, name, align="left")
        sketch.text(41.8, top - 0.8, "keeps", quiet=True)
        for stage in range(4):
            sketch.text(41.8, top + 1 + 2.2 * stage, str(most_kept(passes[stage])))
    return sketch.figure


course.show(
    orders,
    "Figure 2. Four stages, stage 0 on top, eight micro-batches. "
    "Both orders take 33 slots, of which a stage works 24. "
    "1F1B starts backward passes early, "
    "so that stage s keeps 4 - s micro-batches and not eight.",
)

# %% [markdown]
# $S - s$ of them, whatever $k$. And the bubble is the same: 1F1B saves memory, and no time. But memory lets $k$ grow,
# and $k$ makes the bubble small.


# %% Draw figure 3 tags=["hide-input"]
def what_happened(theme: Theme):
    """The slots of the measured step."""
    drawn, axes = course.figure(height=1.9)
    start = min(slot.begin for mine in slots for slot in mine)
    for stage, mine in enumerate(slots):
        for what, number, begin, end in mine:
            place, width = 1000 * (begin - start), 1000 * (end - begin)
            colour = theme.series["FB".index(what)]
            axes.barh(
                stage,
                width,
                left=place,
                color=colour,
                alpha=0.4,
                edgecolor=colour,
                height=0.7,
            )
            axes.text(
                place + width / 2,
                stage,
                str(number + 1),
                ha="center",
                va="center",
                color=theme.ink,
                fontsize=8,
            )
    axes.set_yticks([0, 1], ["stage 0", "stage 1"])
    axes.set(xlabel="milliseconds", ylim=(1.5, -0.5))
    return drawn


course.show(
    what_happened,
    "Figure 3. Measured: one step of our two processes in 1F1B order. Gaps are idle.",
)

# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*. So train five steps in one process, with plain whole windows. Then in two: by
# turns with the package's `one_after_the_other`, with our loop in both orders, with the package's `step`, and with
# torch's engine, `Schedule1F1B`. Losses, and the first step's gradient, must be those of one process.


# %% Helpers: the package's stage, and ours tags=["hide-input"]
def by_package(layers, window):
    """The package's reference."""
    stage, losses, tokens = dist.get_rank(), [torch.zeros(())], answers(window)

    def run(x, n):
        y = layers(window[0][n : n + 1] if x is None else x)
        if stage == 0:
            return y
        losses.append(share_of_loss(y, window[1][n : n + 1], tokens))
        return losses[-1]

    passes = pipeline.one_forward_one_backward(stage, 2, K)
    step(run, passes, stage, 2, torch.empty(1, T, D))
    return torch.stack(losses).sum().detach()


def by_turns(layers, window):
    """The package's device map in two processes."""
    x = torch.empty(K, T, D) if dist.get_rank() else window[0]
    tokens = answers(window)
    return one_after_the_other(layers, x, lambda y: share_of_loss(y, window[1], tokens))


def train_it(way, stage=0, S=1):
    """The losses of five steps, and the gradient of the first."""
    if dist.is_initialized():
        stage, S = dist.get_rank(), dist.get_world_size()
    layers, history, first = part(new_model(), stage, S), [], None
    optimizer = torch.optim.AdamW(layers.parameters(), 0.003)
    for window in windows:
        optimizer.zero_grad()
        history.append(way(layers, window).item())
        first = (
            torch.cat([p.grad.flatten() for p in layers.parameters()])
            if first is None
            else first
        )
        optimizer.step()
    return history, first


def off(way):
    """How far two processes are from one: losses, and the gradient."""
    (nothing, of_first), (history, of_last) = ranks.run(train_it, way)
    assert not any(nothing)  # only the last stage knows the loss
    losses = max(
        abs(one / other - 1) for one, other in zip(history, expected, strict=True)
    )
    return losses, apart(torch.cat([of_first, of_last]), gradient)


# %%
def by_torch(layers, *some, scale_grads=False):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    made = PipelineStage(layers, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        made,
        K,
        lambda *both: share_of_loss(*both, answers(window)),
        scale_grads=scale_grads,
    )
    for window in some:
        losses = []
        inputs, target = (window[:1], None) if made.is_first else ((), window[1])
        schedule.step(*inputs, target=target, losses=None if made.is_first else losses)
    return sum(losses, torch.zeros(())).detach()


def alone(layers, window):
    loss = share_of_loss(layers(window[0]), window[1], answers(window))
    loss.backward()
    return loss.detach()


expected, gradient = train_it(alone)
print(f"one process: loss {expected[0]:.4f} -> {expected[-1]:.4f}")
ways = {
    "by turns": by_turns,
    "GPipe": lambda layers, window: a_step(layers, window, gpipe, K)[0],
}
ways |= {"1F1B": lambda layers, window: a_step(layers, window, one_f_one_b, K)[0]}
for name, way in (ways | {"package": by_package, "torch": by_torch}).items():
    losses, gradients = off(way)
    print(
        f"{name:9} losses off by at most {losses:.0e}, the gradient by {gradients:.0e}"
    )
    assert max(losses, gradients) < 1e-5

# %% [markdown]
# ## 4. What it costs
# **What waits, in bytes.** If the numbers of kept micro-batches are right, GPipe's stages keep eight times the bytes of
# one micro-batch, and those of 1F1B twice and once. **What travels:** $B\,T\,D$ numbers at each border and for each
# micro-batch, and as many gradients back. Nothing else.


# %%
def bytes_of(order, k):
    layers = part(new_model(), dist.get_rank(), 2)
    with (
        SavedBytes(besides=[*layers.parameters(), *windows[0]]) as saved,
        CountCollectives() as sent,
    ):
        a_step(layers, windows[0], order, k)
    return saved.peak, sent.bytes.total()


of_gpipe, of_1f1b = (ranks.run(bytes_of, order, K) for order in (gpipe, one_f_one_b))
for stage, micro_batches in ((0, 2), (1, 1)):
    (every, _), (few, _) = of_gpipe[stage], of_1f1b[stage]
    print(
        f"stage {stage} keeps {every / KIB:,.0f} KiB in GPipe, {few / KIB:,.0f} in 1F1B"
    )
    assert few == every * micro_batches / K
sent, back = (size for _, size in of_1f1b)
print(f"sent on {sent:,} bytes, and back {back:,}")
assert sent == back == K * T * D * 4

# %% [markdown]
# Now our job, between two processes. Put `pipeline`, `ddp`, `fsdp` and `tensor` in order of the bytes that each process
# sends in a step: once for QLoRA, once for full fine-tuning. (On paper: some of these pairs are refused.)

# %%
job = course.CAPSTONE
shape = find_shape(job.model)
plain = (
    "peft=none",
    "quantization=none",
    "double_quantization=false",
    "lean_preparation=false",
)
full = with_settings(job, [f"tricks.{one}" for one in plain])
ways = {"pipeline": pipeline, "ddp": ddp, "fsdp": fsdp, "tensor": tensor}
orders_of = {
    "QLoRA": ["ddp", "pipeline", "fsdp", "tensor"],
    "full": ["pipeline", "ddp", "tensor", "fsdp"],
}
for name, recipe in {"QLoRA": job, "full": full}.items():
    sends = {
        way: sum(call.sent for call in module.traffic(recipe, shape, 2))
        for way, module in ways.items()
    }
    print(
        f"{name:6}",
        ", ".join(f"{way} {sends[way] / 1e6:,.0f} MB" for way in orders_of[name]),
    )
    assert sorted(sends, key=sends.get) == orders_of[name]
seconds = sum(LINKS["10gbe"].seconds(call) for call in pipeline.traffic(job, shape, 2))
print(f"the pipeline's of QLoRA over 10 Gbit Ethernet: {seconds:.2f} s a step")

# %% [markdown]
# Of those that divide the weights, a pipeline sends least by far. Only `ddp` of a small adapter sends less, and it
# divides nothing. So stages can sit in different machines, on plain Ethernet.
#
# **Which layers go where?** All wait for the slowest stage. With times $t_s$ for a micro-batch, a step takes about
# $\sum t_s + (k - 1) \max t_s$. The last stage has the head, and ours has 128,256 words. Eight blocks each? Guess.

# %% Your guess: blocks of the first stage tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def seconds_of(blocks, head):
    """Of one stage and all micro-batches, by choose_your_hardware.py's reckoning."""
    parts = folds.step(
        job, replace(shape, layers=blocks), CARDS["t4"], trained_share=TRAINED_SHARE
    ).parts
    return sum(
        part.seconds for part in parts if head or part.name not in ("head", "loss")
    )


one = seconds_of(16, True)
faster = {}
for blocks in (8, 9, 10):
    stages = seconds_of(blocks, False), seconds_of(16 - blocks, True)
    faster[blocks] = one / (sum(stages) / 8 + max(stages) * 7 / 8)
    print(
        f"{blocks} and {16 - blocks} blocks: {stages[0]:.1f} and {stages[1]:.1f} s, "
        f"{faster[blocks]:.2f} x one T4"
    )
assert max(faster, key=faster.get) == 9
for stage, what in enumerate(("embedding", "head, norm")):
    bill = {
        line.name: line.bytes
        for line in per_process(job, shape, T4, "pipeline", 2, stage=stage).lines
    }
    print(f"stage {stage}, {what}: {bill['weights: all others'] / MIB:.1f} MiB")
    assert bill["weights: all others"] > 500 * MIB
course.reveal(guess, max(faster, key=faster.get), "blocks")

# %% [markdown]
# Nine and seven. And both ends hold the same 501 MiB: Llama-3.2-1B's head *is* its embedding. Frozen, as under LoRA,
# two copies do no harm. If it trained, both stages would have to add up their gradients, so our pipeline refuses full
# fine-tuning.
#
# **Rows of one length.** That 1.77 is for rows of 2,048 tokens. torch's stages fix their shapes, so all rows are padded
# to the longest, and the last window of three rows to eight. Our 107 rows have 153,617 tokens. What is left of 1.77?
# And if packing ([packing](packing.py)) puts them into 82 rows?

# %%
tokens = sum(length for length, _ in row_lengths("train"))
left = {rows: faster[9] * tokens / (-(-rows // 8) * 8 * 2048) for rows in (107, 82)}
print(
    f"padded: {left[107]:.2f} times as fast as one T4, packed: {left[82]:.2f}; "
    "ddp in the lesson on data parallelism: 1.8"
)
assert tokens == 153_617
assert left[107] < 1.25 < left[82]


# %% Draw figure 4 tags=["hide-input"]
def of_speed(theme: Theme):
    """Times as fast as one card, against the number of micro-batches."""
    drawn, axes = course.figure(height=2.9)
    many = (1, 2, 4, 8, 16, 32, 64)
    for S, colour, marker in zip((2, 4, 8), theme.series, "osD", strict=False):
        fitting = [k for k in many if k == 1 or k >= S]
        axes.plot(
            fitting,
            [S * k / (k + S - 1) for k in fitting],
            color=colour,
            marker=marker,
            label=f"{S} stages",
        )
    axes.set(
        xscale="log",
        xlabel="micro-batches a step",
        ylabel="times as fast as one card",
        ylim=(0, 8.4),
    )
    axes.set_xticks(many, [str(k) for k in many])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    of_speed,
    "Figure 4. By formula, for equal stages and rows: from the device map at k = 1, "
    "where no number of cards helps, to "
    "nearly S times as fast.",
)

# %% [markdown]
# ## 5. The production switch
# Both are switches of the trainer. `parallel.strategy=model` is the device map: one process that sees two cards.
# `parallel.strategy=pipeline` is ours, over as many processes as there are stages. transformers' trainer calls a whole
# model, forward and back, micro-batch by micro-batch. So our subclass of it is given all micro-batches of a step at
# once, and lets torch's schedule order their passes. Rows, checkpoints, adapter and report are the same.

# %% Train in two stages tags=["hide-input"]
folder = tempfile.TemporaryDirectory()
lines = (
    Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
).read_text(encoding="utf-8")
seven = Path(folder.name, "seven.jsonl")
seven.write_text("".join(lines.splitlines(keepends=True)[:7]), encoding="utf-8")
tiny = [
    "model=random:tiny",
    "tricks.peft=lora",
    "tricks.gradient_accumulation=4",
    "data.max_length=160",
]
tiny += ["tricks.chunked_loss=true", "train.max_steps=3", "train.learning_rate=0.01"]
tiny += [f"data.train={seven}", f"data.eval={seven}"]


def losses_of(report):
    return [entry["loss"] for entry in report["history"] if "loss" in entry] + [
        report["eval_loss_after"]
    ]


def trained_by(settings, out):
    aside = Aside()
    aside.quiet = True
    return train(with_settings(Recipe(), settings), out, console=aside)


# %%
print(
    "cria launch kwanzaa --on torchrun --nproc 2 --set parallel.strategy=pipeline "
    "--set parallel.stage_blocks=9,7"
)
whole = losses_of(trained_by(tiny, f"{folder.name}/one"))
report = ranks.run(
    trained_by, [*tiny, "parallel.strategy=pipeline"], f"{folder.name}/two"
)[0]
halves, said = losses_of(report), report["pipeline"]
folder.cleanup()
print("one process:", *(f"{loss:.6f}" for loss in whole))
print("two stages: ", *(f"{loss:.6f}" for loss in halves))
print(
    f"peak estimated {report['estimated_peak_bytes'] / MIB:.1f} MiB, measured", end=" "
)
print(f"{report['estimate']['measured_bytes'] / MIB:.1f} MiB")
print(
    f"idle {said['idle_share']:.0%}, "
    f"of equally long stages {said['idle_share_of_equal_stages']:.0%}"
)
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(halves, whole, strict=True))

# %% [markdown]
# More is idle than the formula says, as the stages are not equal: beside two blocks of width 256 there are 49,152
# words, so most of the work is the head's.
#
# ## 6. Where it breaks
# **`a pipeline takes at least as many of a step's micro-batches as it has stages`.** With fewer, some stages would
# always wait; torch's 1F1B raises, too. Cure: a larger window, or fewer stages. **More stages than blocks** are refused
# as well.

# %%
mine = with_settings(
    job, ["tricks.gradient_accumulation=2", "parallel.strategy=pipeline"]
)
for wrong in (
    lambda: resolve(mine, processes=4),
    lambda: find_blocks("", 16, 32, "llama"),
):
    try:
        wrong()
        raise AssertionError("it must be refused")
    except BadInput as refusal:
        print(refusal)

# %% [markdown]
# **A perfect loss, and gradients of an eighth.** torch divides gradients by the number of micro-batches unless told
# otherwise (`scale_grads=True`), as most losses are means. Ours is a sum, divided once by the window's tokens. AdamW
# does not mind a factor, so the losses hardly move; clipping does. Nor are means the cure: a row with few tokens would
# weigh as much as a long one ([gradient accumulation](gradient_accumulation.py)). Cure: `scale_grads=False`.

# %%
(_, of_first), (history, of_last) = ranks.run(
    train_it, partial(by_torch, scale_grads=True)
)
wrong = torch.cat([of_first, of_last])
print(
    f"losses {history[0]:.4f} -> {history[-1]:.4f}; "
    f"gradient {wrong.norm() / gradient.norm():.3f} times as long"
)
assert abs(history[0] / expected[0] - 1) < 1e-5
assert apart(K * wrong, gradient) < 1e-5

# %% [markdown]
# **`Expected input batch_size (...) to match target batch_size (...)`, in the second step.** Its rows are shorter. But
# the stages made their receive buffers in the first, and shorter rows fill only a part of one. With a loss that does
# not compare lengths, the first stage's backward pass fails: the gradient that comes back has the old length. Longer
# rows break the connection. torch 2.11 looks before: the first stage refuses the shorter rows. Cure: one length.


# %%
def two_lengths():
    shorter = [both[:, : T // 2] for both in windows[1]]
    by_torch(part(new_model(), dist.get_rank(), 2), windows[0], shorter)


try:
    ranks.run(two_lengths)
    raise AssertionError("nobody noticed")
except RuntimeError as error:
    print(said := str(error).splitlines()[-1])
    assert "to match target batch_size" in said or "has a shape mismatch" in said
ranks.close()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-70B ($D = 8192$) over eight stages, 32 micro-batches of one row of 4,096 tokens in bf16. How
#    many MiB cross *one* border in a step, both ways together? (A number of MiB of $2^{20}$ bytes.)
# 2. **Build.** `cut(seconds, S)` gets the seconds of each layer, in order, and the number of stages. Return a list of
#    $S$ whole numbers: how many layers each stage gets, so that the slowest stage is as fast as can be. Stages keep the
#    order, and each has a layer. (About five lines: `itertools.combinations` gives all places to cut.)
# 3. **Reach.** *Interleaved*: each process has $v$ pieces of the model that are no neighbours, a pass through one takes
#    $1 / v$ of the time, and so does the bubble: $(S - 1) / (v k + S - 1)$. With $S = 4$ and $k = 8$: what is the
#    smallest $v$ that idles less than a tenth, and how many times as many borders as with $v = 1$ does a row then
#    cross? Give both as a pair, `(v, times)`.

# %% tags=["exercise"]
mib_across = None


def cut(seconds, S):
    """Return how many layers each of S stages gets, a list of S whole numbers. FILL ME
    IN."""


pieces_and_borders = None


# %% Check the exercises tags=["hide-input"]
def of_cut(answer):
    drawn = random.Random(0)
    for number in range(60):
        S, many = 1 + number % 4, 4 + number % 7
        layers = [drawn.uniform(1, 9) for _ in range(many)]
        layers[-1] *= 1 + number % 4
        if (found := answer(list(layers), S)) is None:
            raise NotImplementedError
        found = list(found)
        assert len(found) == S, f"{S} stages, not {len(found)}"
        fine = sum(found) == many and min(found) > 0
        assert fine, (
            f"how many layers each stage gets: {many} in all, "
            f"and one or more for each stage; not {found}"
        )
        ends = list(itertools.accumulate(found))
        slowest = max(
            sum(layers[end - size : end]) for size, end in zip(found, ends, strict=True)
        )
        best = float("inf")
        for places in itertools.combinations(range(1, many), S - 1):
            edges = (0, *places, many)
            best = min(
                best, max(sum(layers[a:b]) for a, b in itertools.pairwise(edges))
            )
        times = ", ".join(f"{layer:.1f}" for layer in layers)
        said = (
            f"{found} for layers of {times} s: only the slowest stage counts; "
            f"it takes {slowest:.1f} s"
        )
        assert slowest < best + 1e-9, f"{said}, and {best:.1f} s is possible"


of_mib = course.equal(
    4096,
    "count the numbers of a micro-batch, the bytes of each, the micro-batches, "
    "and both ways; a MiB has 2^20 bytes",
)
of_pieces = course.equal(
    (4, 5),
    "try v until the bubble is less than a tenth; "
    "a model in n pieces has n - 1 borders; the second number is a ratio",
)
course.check(1, mib_across, of_mib, "a number of MiB")
course.check(
    2,
    cut,
    of_cut,
    "a function (seconds, S) -> a list of S whole numbers, the layers of each stage",
)
course.check(
    3,
    pieces_and_borders,
    of_pieces,
    "a pair of whole numbers in round brackets, (v, times)",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# mib_across = 2 * 32 * 4096 * 8192 * 2 / 2**20
#
#
# def cut(seconds, S):
#     edges = (
#         (0, *places, len(seconds))
#         for places in itertools.combinations(range(1, len(seconds)), S - 1)
#     )
#     best = min(
#         edges, key=lambda at: max(sum(seconds[a:b]) for a, b in itertools.pairwise(at))
#     )
#     return [b - a for a, b in itertools.pairwise(best)]
#
#
# pieces_and_borders = (4, 5)  # 3 / 35 of the time; 15 borders instead of 3
# ```
#
# </details>
#
# ## In one breath
# - **Saves** blocks: a stage holds $L / S$ of them, with gradients and states. The ends hold embedding and head.
# - **Costs** a bubble of $(S - 1) / (k + S - 1)$, padding to one length, and the slowest stage's pace. 1F1B keeps
#   $S - s$ micro-batches in stage $s$ where GPipe keeps all. torch's engine holds receive buffers for all of them
#   either way: 64 MiB in our job.
# - **Exact within rounding**, with a loss summed over the window's tokens and `scale_grads=False`.
# - **When**: the model does not fit a card, links are slow, and a step has many micro-batches.
# - **When not**: it fits a card ([data parallelism](data_parallel.py)), or rows are few and of all lengths. A device
#   map: to make it run at all.
#
# ## Sources
# - Huang et al. 2018, *GPipe*, arXiv 1811.06965, section 2: a plain cut leaves cards idle; all forward, then all
#   backward.
# - Narayanan et al. 2021, arXiv 2104.04473, section 2.2: 1F1B with a flush, its bubble, the interleaved schedule.
# - torch 2.13: `torch/distributed/pipelining/schedules.py` (`Schedule1F1B`, `scale_grads`). transformers 5.23:
#   `device_map` in `from_pretrained`. Rates of links, with their sources: `cria_tricks/predict/links.py`.
# - Ours: `cria_tricks/parallel/model.py`, `parallel/pipeline.py`, `trainer/pipeline.py`;
#   `tests/parallel/test_pipeline.py`.
