# ---
# jupyter:
#   question: Sharding and tensor parallelism send gigabytes in every step. How can cards share a large model over a
#     slow link, and all be busy?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Pipeline parallelism: fill the wait
# > **Promise.** A model does not fit your card, so you load it onto two cards with `device_map="auto"`. It runs, but
# > two cards are only as fast as one, because they take turns. You will cut a model into two stages and let
# > micro-batches follow each other, so that at best a ninth of the time is idle instead of half. The gradients stay
# > exact, and you will know when a pipeline pays.
# >
# > **Card.** saves blocks, of which each of $S$ stages holds $L/S$ / costs $(S-1)/(k+S-1)$ of each stage's time, with
# > $k$ micro-batches a step, and rows of one length / exact within rounding / about 25 minutes / after [tensor
# > parallelism](tensor_parallel.py)
#
# ## 1. The bill
# Our job, QLoRA of Llama-3.2-1B on 107 rows of up to 2,048 tokens, fits one T4. But Llama-3.1-70B does not fit an A100
# of 40 GB even in 4 bits. [Sharding](sharding.py) would gather all of its weights for every micro-batch, and [tensor
# parallelism](tensor_parallel.py) would sum hidden states in every block, so both want fast links.
#
# The simplest cut sends much less: the first blocks go to card 0, and the last ones to card 1. Each such part is a
# *stage*. A *device map* (`model` in the table) does this in one process. [Pipeline
# parallelism](../docs/glossary.md#pipeline-parallelism) starts one process for each stage. QLoRA of this model needs
# 42.6 GiB, and an A100 has 39.4. How many GiB does each of two stages need?

# %% Your guess: GiB in each of two stages tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import itertools
import logging
import random
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import cria_tricks
from cria_tricks import BadInput, Recipe, course, recipes, train
from cria_tricks.course import (
    CARDS,
    LINKS,
    T4,
    TRAINED_SHARE,
    Aside,
    CountCollectives,
    SavedBytes,
    Theme,
    ddp,
    device_map,
    diff,
    find_blocks,
    find_shape,
    folds,
    fsdp,
    per_process,
    quiet_libraries,
    resolve,
    row_lengths,
    table,
    timetables,
    with_settings,
)
from cria_tricks.course import pipeline_parallel as pipeline
from cria_tricks.course import pipeline_step as step
from cria_tricks.course import tensor_parallel as tensor

quiet_libraries()
KIB, MIB, GIB = 2**10, 2**20, 2**30
A100 = CARDS["a100"].device
large = with_settings(recipes.capstone(A100), ["model=llama-3.1-70b"])
job = course.CAPSTONE
shape = find_shape(job.model)
whole_model = ["peft=none", "quantization=none", "double_quantization=false"]
whole_model = [f"tricks.{off}" for off in [*whole_model, "lean_preparation=false"]]
full = with_settings(job, whole_model)

# %%
needs, lines = {}, []
for way, cards in (("none", 1), ("model", 2), ("pipeline", 2), ("pipeline", 4)):
    bill = per_process(large, find_shape(large.model), A100, way, cards)
    needs[way, cards] = bill.least_bytes / GIB
    fits = "yes" if bill.fits else "no"
    lines.append([way, str(cards), f"{needs[way, cards]:.1f}", fits])
course.show_table(table(("strategy", "cards", "GiB in each", "fits"), lines))
course.reveal(guess, needs["pipeline", 2], "GiB")


# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
assert [round(need, 1) for need in needs.values()] == [42.6, 24.1, 23.7, 15.1]
assert round(A100.memory_bytes / GIB, 1) == 39.4


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
        slots = timetables.timetable(
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
    "Figure 1. The same four rows through stages 0 and 1. Numbers are micro-batches. "
    "As one batch, one stage always waits. As four micro-batches, the stages overlap.",
)

# %% [markdown]
# Two A100s hold the model. (Each needs more than half, because activations and CUDA's own memory are not divided.) But
# block 41 of 80, the first on card 1, needs the result of block 40, and in the backward pass block 40 needs the
# gradient from block 41. With a device map the cards take turns, so two are as fast as one.
#
# However, a step is a [window](../docs/glossary.md#window) of micro-batches, which do not need each other ([gradient
# accumulation](gradient_accumulation.py)). While card 1 computes the first one, card 0 can begin the second.
#
# ## 2. From scratch, in three steps
# The toy has ten layers: an embedding, eight blocks and a head. Each of two [processes](../docs/glossary.md#rank)
# takes five of them, and a window has eight rows. A micro-batch's loss is the sum over its [trained
# tokens](../docs/glossary.md#trained-tokens), divided by those of the whole window, so that all micro-batches add up
# to the window's loss. `Ranks(2)` starts the two processes.

# %%
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cria_tricks.course import Ranks, Slot, idle_share, timetable

V, D, T, K = 256, 128, 128, 8  # words, width, tokens of a row, rows of a window


def new_window(seed):
    """Words and labels of eight rows; -100 where nothing is trained."""
    torch.manual_seed(seed)
    words = (V * torch.rand(K, T + 1) ** 3).long()
    labels = words[:, 1:].clone()
    for n, row in enumerate(labels):
        row[: 8 + 14 * n] = -100  # the prompt, in each row of another length
    return words[:, :-1].contiguous(), labels


def new_layers(stage=0, S=1):
    """The layers of one of S stages."""
    torch.manual_seed(0)  # the same weights in every process
    layers = [nn.Embedding(V, D)]
    for _ in range(8):
        inner = nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)
        layers.append(nn.Sequential(nn.LayerNorm(D), *inner))
    layers.append(nn.Linear(D, V))
    size = len(layers) // S
    return nn.Sequential(*layers[stage * size : (stage + 1) * size])


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def count_trained(window):
    return (window[1] != -100).sum()


windows = [new_window(seed) for seed in range(5)]
ranks = Ranks(2)

# %% Silence log messages in both processes tags=["hide-input"]
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
_ = ranks.run(quiet_libraries)

# %% [markdown]
# **Step 1: do passes in an order.** A *pass* takes one micro-batch through one stage: `("F", 3)` is the forward pass of
# micro-batch 3, and `("B", 3)` is its backward pass. In a forward pass a stage receives hidden states, computes, and
# sends the result on. In a backward pass it receives the result's gradient, and sends the input's gradient back.
# Between the two it *keeps* the micro-batch with its saved activations. A received tensor gets `requires_grad_()`, so
# autograd computes its gradient, too. And `y.backward(gradient)` begins with the gradient that the next stage sent, as
# `loss.backward()` begins with 1. `a_step` follows any order, and a `Slot` notes a pass with its times:


# %%
def receive(k, source):
    tensor = torch.empty(K // k, T, D)
    dist.recv(tensor, source)
    return tensor


def a_step(layers, window, order, k=K):
    """Do the passes of one stage: its loss, when it computed, the most it kept."""
    stage, S = dist.get_rank(), dist.get_world_size()
    first, last = stage == 0, stage == S - 1
    words, labels = (both.chunk(k) for both in window)
    total, most = torch.zeros(()), 0
    kept, sending, slots = {}, [], []

    def send(tensor, to):
        # isend does not wait, because the other process may be sending, too
        sending.append((dist.isend(tensor, to), tensor))

    for what, n in order(stage, S, k):
        while len(sending) > 1:  # do not hold all that was sent until the end
            sending.pop(0)[0].wait()
        if what == "F":
            x = words[n] if first else receive(k, stage - 1).requires_grad_()
            begin = time.perf_counter()
            y = layers(x)
            if last:
                y = loss_sum(y, labels[n]) / count_trained(window)
                total += y.detach()
            else:
                send(y.detach(), stage + 1)
            kept[n] = x, y
        else:
            gradient = None if last else receive(k, stage + 1)
            begin = time.perf_counter()
            x, y = kept.pop(n)
            y.backward(gradient)
            if not first:
                send(x.grad, stage - 1)
        slots.append(Slot(what, n, begin, time.perf_counter()))
        most = max(most, len(kept))
    for work, _ in sending:
        work.wait()
    return total, slots, most


# %% [markdown]
# **Step 2: all forward passes, then all backward passes.** This order is called *GPipe*, and with one micro-batch it is
# the device map. Let a forward pass take one unit of time and a backward pass two. Then $k$ micro-batches take $3k$
# units in a stage. The first micro-batch needs $S-1$ forward passes to reach the last stage, and the last gradient
# needs $S-1$ backward passes to come back. So a step takes $3k+3(S-1)$ units. Every stage computes for $3k$: the last
# one waits at both ends, and stage 0 in the middle. So a stage is idle for
#
# $$\frac{S-1}{k+S-1}$$
#
# of the step, also if a backward pass takes three units. This idle time is called the
# [bubble](../docs/glossary.md#bubble). `timetable` lets every pass begin as soon as it can, and `idle_share` counts the
# idle units:


# %%
def gpipe(stage, S, k):
    return [(what, n) for what in "FB" for n in range(k)]


def idle(order, S, k):
    return idle_share(timetable([order(stage, S, k) for stage in range(S)]))


def most_kept(order):
    return a_step(new_layers(dist.get_rank(), 2), windows[0], order)[2]


for k in (1, 2, 4, 8):
    print(f"k = {k}: idle {idle(gpipe, 2, k):.0%}, by the formula {1 / (k + 1):.0%}")
print(f"micro-batches kept in stages 0 and 1: {ranks.run(most_kept, gpipe)}")

# %% [markdown]
# More micro-batches make the bubble smaller, but each stage keeps all eight. That is the memory that [gradient
# accumulation](gradient_accumulation.py) saved.
#
# **Step 3: one forward, one backward.** A backward pass frees what its micro-batch kept, so do it as early as
# possible. Stage $s$, counted from 0, first makes $S-1-s$ forward passes, so that the later stages have work. Then it
# makes one forward and one backward pass in turn, and at last the remaining backward passes. This order is called
# *1F1B*:


# %%
def one_f_one_b(stage, S, k):
    ahead = min(S - 1 - stage, k)
    order = [("F", n) for n in range(ahead)]
    for n in range(k):
        if n + ahead < k:
            order.append(("F", n + ahead))
        order.append(("B", n))
    return order


print(f"idle {idle(one_f_one_b, 2, 8):.0%}")
print(f"micro-batches kept: {ranks.run(most_kept, one_f_one_b)}")

# %% Draw figure 2, and hold the numbers of the text tags=["hide-input"]
assert ranks.run(most_kept, gpipe) == [8, 8]
assert ranks.run(most_kept, one_f_one_b) == [2, 1]
for _order in (gpipe, one_f_one_b):
    for _stages in (2, 4, 8):
        for _k in (8, 16):
            _share = (_stages - 1) / (_k + _stages - 1)
            assert abs(idle(_order, _stages, _k) - _share) < 1e-9
assert one_f_one_b(1, 4, 8) == pipeline.one_forward_one_backward(1, 4, 8)


def highest(order):
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
            sketch.text(41.8, top + 1 + 2.2 * stage, str(highest(passes[stage])))
    return sketch.figure


course.show(
    orders,
    "Figure 2. Four stages, stage 0 on top, and eight micro-batches, forward in blue "
    "and backward in orange. Both orders take 33 units, of which a stage works 24. "
    "1F1B starts backward passes early, so stage s keeps 4 - s micro-batches, and not "
    "eight.",
)

# %% [markdown]
# Stage $s$ now keeps $S-s$ micro-batches, whatever $k$ is. So stage 0 keeps about what one card keeps of one
# micro-batch: a pipeline divides the weights, but not these activations. With nine blocks of our job, stage 0 is
# predicted to peak at 1,339 MiB instead of 1,795. The bubble is the same, but $k$ can now grow, which makes it smaller.
#
# ## 3. Prove it
# The claim is *exact within rounding*. We train five steps in one process and in two stages, with both orders and
# torch's own `Schedule1F1B`, and compare all losses and the gradient of the first step. We also count bytes: in 1F1B
# the stages should keep two eighths and one eighth of what they keep in GPipe, and $B\,T\,D$ numbers (here $B=1$ row)
# should cross the border for each micro-batch, each way.


# %% Helper: the same step by torch's schedule tags=["hide-input"]
def by_torch(layers, *some, scale_grads=False):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    made = PipelineStage(layers, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        made,
        K,
        lambda logits, labels: loss_sum(logits, labels) / count_trained(window),
        scale_grads=scale_grads,
    )
    for window in some:
        losses = []
        inputs, target = (window[:1], None) if made.is_first else ((), window[1])
        schedule.step(*inputs, target=target, losses=None if made.is_first else losses)
    return sum(losses, torch.zeros(())).detach()


# %%
def train_it(way, stage=0, S=1):
    """The losses of five steps, and the gradient of the first."""
    if dist.is_initialized():
        stage, S = dist.get_rank(), dist.get_world_size()
    layers, history = new_layers(stage, S), []
    optimizer = torch.optim.AdamW(layers.parameters(), 0.003)
    for window in windows:
        optimizer.zero_grad()
        history.append(way(layers, window).item())
        if len(history) == 1:
            gradient = torch.cat([p.grad.flatten() for p in layers.parameters()])
        optimizer.step()
    return torch.tensor(history), gradient


def alone(layers, window):
    loss = loss_sum(layers(window[0]), window[1]) / count_trained(window)
    loss.backward()
    return loss.detach()


def apart(found, right):
    return ((found - right).norm() / right.norm()).item()


ways = {
    "GPipe": lambda layers, window: a_step(layers, window, gpipe)[0],
    "1F1B": lambda layers, window: a_step(layers, window, one_f_one_b)[0],
    "torch": by_torch,
}
history, gradient = train_it(alone)
print(f"one process: loss {history[0]:.4f} -> {history[-1]:.4f}")
for name, way in ways.items():
    (_, of_first), (losses, of_last) = ranks.run(train_it, way)
    both = apart(losses, history), apart(torch.cat([of_first, of_last]), gradient)
    print("{}: losses off by {:.0e}, gradient by {:.0e}".format(name, *both))
    assert max(both) < 1e-5


# %% Count bytes, measure the idle time, and draw figure 3 tags=["hide-input"]
def bytes_of(order):
    """What autograd keeps at the peak, and what is sent."""
    layers = new_layers(dist.get_rank(), 2)
    known = [*layers.parameters(), *windows[0]]
    with SavedBytes(besides=known) as saved, CountCollectives() as sent:
        a_step(layers, windows[0], order)
    return saved.peak, sent.bytes.total()


_of_gpipe, _of_1f1b = (ranks.run(bytes_of, order) for order in (gpipe, one_f_one_b))
for _stage, _micro_batches in ((0, 2), (1, 1)):
    (_every, _sent), (_few, _too) = _of_gpipe[_stage], _of_1f1b[_stage]
    assert _few == _every * _micro_batches / K
    assert _sent == _too == K * T * D * 4
    print(
        f"stage {_stage} keeps {_every / KIB:,.0f} KiB in GPipe and {_few / KIB:,.0f} "
        f"in 1F1B, and sends {_sent / KIB:,.0f}"
    )


def timed(order, k, steps=5):
    layers = new_layers(dist.get_rank(), 2)
    return [a_step(layers, windows[0], order, k)[1:] for _ in range(steps)]


def span(slots):
    """Seconds of a step."""
    return max(mine[-1].end for mine in slots) - min(mine[0].begin for mine in slots)


def measured(order, k):
    """The slots of the fastest step, which was disturbed least."""
    of_ranks = ranks.run(timed, order, k)
    steps = [[slots for slots, _ in both] for both in zip(*of_ranks, strict=True)]
    return min(steps, key=span)


for k in (1, 8):
    slots = measured(one_f_one_b, k)
    print(f"{k} micro-batches: measured {idle_share(slots):.0%} idle", end=", ")
    print(f"by the formula {1 / (k + 1):.0%}")


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
    "Figure 3. Measured on the machine that made this page: one step of our two "
    "processes in 1F1B order, the fastest of five; forward in blue, backward in "
    "orange, with the numbers of the micro-batches. Gaps are idle, and they are longer "
    "if the machine has other work.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: the package's own step, and a device map in two processes
# The package has the same step over plain sends and receives (`step` in `cria_tricks/parallel/pipeline.py`), and
# `one_after_the_other`, in which the stages take turns as with a device map. Both train the same five steps. (torch's
# schedule also holds a receive buffer for each of the $k$ micro-batches, of 8 MiB in our job.)


# %% tags=["deep"]
def by_package(layers, window):
    """The package's step, in 1F1B order."""
    stage, losses, tokens = dist.get_rank(), [torch.zeros(())], count_trained(window)

    def run(x, n):
        y = layers(window[0][n : n + 1] if x is None else x)
        if stage == 0:
            return y
        losses.append(loss_sum(y, window[1][n : n + 1]) / tokens)
        return losses[-1]

    passes = pipeline.one_forward_one_backward(stage, 2, K)
    step(run, passes, stage, 2, torch.empty(1, T, D))
    return torch.stack(losses).sum().detach()


def by_turns(layers, window):
    """The package's device map in two processes."""
    x = torch.empty(K, T, D) if dist.get_rank() else window[0]
    tokens = count_trained(window)
    return device_map.one_after_the_other(
        layers, x, lambda y: loss_sum(y, window[1]) / tokens
    )


for name, way in {"package": by_package, "by turns": by_turns}.items():
    (nothing, of_first), (losses, of_last) = ranks.run(train_it, way)
    assert not nothing.any()  # only the last stage knows the loss
    both = apart(losses, history), apart(torch.cat([of_first, of_last]), gradient)
    print("{}: losses off by {:.0e}, gradient by {:.0e}".format(name, *both))
    assert max(both) < 1e-5

# %% [markdown]
# ## 4. What it costs
# **Bytes on the link.** A border between two stages costs $B\,T\,D$ numbers for each micro-batch, forward and again
# backward. So in our job each process sends 8 × 2,048 × 2,048 numbers a step, of 2 bytes (of 4 in full fine-tuning).
# The table compares strategies by formula. (In full fine-tuning `tensor` sums in 2 bytes forward, and in 4 backward.)

# %%
ways = {"ddp": ddp, "pipeline": pipeline, "fsdp": fsdp, "tensor": tensor}
sends, lines = {}, []
for name, way in ways.items():
    for recipe in (job, full):
        calls = way.traffic(recipe, shape, 2)
        sends[name, recipe] = sum(call.sent for call in calls) / 1e6
    lines.append([name, *(f"{sends[name, recipe]:,.0f}" for recipe in (job, full))])
course.show_table(table(("MB a step", "QLoRA", "full fine-tuning"), lines))

# %% [markdown]
# Of the strategies that divide the weights, a pipeline sends least by far. Only `ddp` with a small adapter sends less,
# but it divides no weights. So stages can be in different machines: 10 Gbit Ethernet, at 1.18 GB a second, would take
# 0.06 seconds.
#
# **The slowest stage.** All stages wait for the slowest one. So if stage $s$ takes $t_s$ seconds for a micro-batch, a
# step takes about $\sum t_s+(k-1)\max t_s$. The last stage also has the head, which computes 128,256 logits a token.
# How many of the 16 blocks should the first stage get?

# %% Your guess: blocks of the first stage tags=["predict"]
guess = 0  # @param {type:"number"}


# %% Helper: predicted seconds of a stage tags=["hide-input"]
def seconds_of(blocks, head):
    """Predicted seconds of one stage for all micro-batches of a step."""
    part_of_it = replace(shape, layers=blocks)
    found = folds.time_of(job, part_of_it, CARDS["t4"], trained_share=TRAINED_SHARE)
    return sum(
        part.seconds
        for part in found.parts
        if head or part.name not in ("head", "loss")
    )


# %%
one = seconds_of(16, head=True)
faster, lines = {}, []
for blocks in (8, 9, 10):
    first, last = seconds_of(blocks, head=False), seconds_of(16 - blocks, head=True)
    faster[blocks] = one / ((first + last) / 8 + max(first, last) * 7 / 8)
    found = f"{first:.1f}", f"{last:.1f}", f"{faster[blocks]:.2f}"
    lines.append([f"{blocks} and {16 - blocks}", *found])
titles = ("blocks", "stage 0, seconds", "stage 1, seconds", "times as fast as one T4")
course.show_table(table(titles, lines))
course.reveal(guess, max(faster, key=faster.get), "blocks")

# %% [markdown]
# The best cut is nine and seven, by these predicted seconds of eight micro-batches. (Both stages hold the same 501
# MiB, because in Llama-3.2-1B the head is the embedding. If it trained, both would have to add up their gradients, so
# our switch refuses full fine-tuning.)
#
# **Rows of one length.** torch's stages have fixed shapes, so all rows are padded to 2,048 tokens, and a last window of
# three rows to eight. Only 67 % of these places are tokens of our 107 rows, so the 1.77 become 1.19.
# [Packing](packing.py) puts the tokens into 82 rows, which gives 1.51. [Data parallelism](data_parallel.py) gave 1.8
# without packing.

# %% Draw figure 4, and hold the numbers of the text tags=["hide-input"]
_order = {
    recipe: sorted(
        ("ddp", "pipeline", "fsdp", "tensor"), key=lambda name: sends[name, recipe]
    )
    for recipe in (job, full)
}
assert _order[job] == ["ddp", "pipeline", "fsdp", "tensor"]
assert _order[full] == ["pipeline", "ddp", "tensor", "fsdp"]
assert round(sends["pipeline", job]) == 67
_ethernet = sum(map(LINKS["10gbe"].seconds, pipeline.traffic(job, shape, 2)))
print(f"the pipeline's bytes over 10 Gbit Ethernet: {_ethernet:.2f} s a step")
assert round(_ethernet, 2) == 0.06
_tokens = sum(length for length, _ in row_lengths("train"))
assert round(_tokens / (14 * 8 * 2048), 2) == 0.67
assert round(LINKS["10gbe"].peak * LINKS["10gbe"].reached / 1e9, 2) == 1.18
assert sends["pipeline", job] * 1e6 // 1e4 == 8 * 2048 * 2048 * 2 // 1e4
assert sends["pipeline", full] * 1e6 // 1e4 == 8 * 2048 * 2048 * 4 // 1e4
for _schedule, _peak in (("1f1b", 1339), ("gpipe", 1795)):
    _recipe = [f"parallel.pipeline_schedule={_schedule}", "parallel.stage_blocks=9,7"]
    _recipe = with_settings(job, ["parallel.strategy=pipeline", *_recipe])
    _bill = per_process(_recipe, shape, T4, "pipeline", 2, stage=0)
    _lines = {line.name: line.bytes / MIB for line in _bill.lines}
    assert round(_bill.peak_bytes / MIB) == _peak
    assert _lines["pipeline: receive buffers"] == 8 * 8
_left = {rows: faster[9] * _tokens / (-(-rows // 8) * 8 * 2048) for rows in (107, 82)}
print(f"padded {_left[107]:.2f} times as fast as one T4, packed {_left[82]:.2f}")
assert [round(found, 2) for found in (faster[9], *_left.values())] == [1.77, 1.19, 1.51]
for _stage in (0, 1):
    _bill = per_process(job, shape, T4, "pipeline", 2, stage=_stage)
    _sizes = {line.name: round(line.bytes / MIB) for line in _bill.lines}
    assert _sizes["weights: all others"] == 501


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
    "Figure 4. By the formula, for equal stages and rows. With k = 1 it is the device "
    "map, where no number of cards helps. With many micro-batches it is nearly S times "
    "as fast.",
)

# %% [markdown]
# ## 5. The production switch
# `parallel.strategy=model` is the device map, and `parallel.strategy=pipeline` starts several processes. There our
# trainer takes all micro-batches of a step at once, and torch's schedule orders their passes. The command, and both
# ways in plain code:
#
# ```bash
# cria launch kwanzaa --on torchrun --nproc 2 \
#     --set parallel.strategy=pipeline --set parallel.stage_blocks=9,7 \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# ```
#
# The table shows its worth: the predicted need of the fullest stage in a step on T4s, with CUDA's own memory.

# %%
print(device_map.PLAIN, pipeline.PLAIN)
mine = ["parallel.strategy=pipeline", "parallel.stage_blocks=9,7"]
mine = with_settings(job, mine)
print(diff(resolve(job, T4), resolve(mine, T4, processes=2)))
worth, lines = {}, []
for name in ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b"):
    for S in (1, 2, 4, 8):
        way = "pipeline" if S > 1 else "none"
        bill = per_process(job, find_shape(name), T4, way, S)
        worth[name, S] = bill.least_bytes / GIB
    lines.append([name, *(f"{worth[name, S]:.2f}" for S in (1, 2, 4, 8))])
course.show_table(table(("GiB in each of", "1", "2", "4", "8 T4s"), lines))

# %% Hold the numbers of the table's text tags=["hide-input"]
assert round(7 / (8 + 7), 2) == 0.47
assert worth["llama-3.1-70b", 8] < T4.memory_bytes / GIB < worth["llama-3.1-70b", 4]
assert round(1 - worth["llama-3.2-1b", 2] / worth["llama-3.2-1b", 1], 2) == 0.12
assert round(1 - worth["llama-3.1-8b", 2] / worth["llama-3.1-8b", 1], 2) == 0.38

# %% [markdown]
# A second stage saves only 12 % with our small model, because each stage holds the embedding or the head, but 38 % with
# Llama-3.1-8B. A step of QLoRA of Llama-3.1-70B is predicted to fit eight T4s, with 47 % idle. But our trainer cannot
# start that run, because it loads the whole model on each card before it cuts it.

# %% [markdown] tags=["deep"]
# ### Deeper: the same losses in the real trainer
# A tiny Llama with random weights trains three steps in one process and in two stages. The report predicts and measures
# the peak, and it measures the idle share. More is idle than by the formula, because these stages are not equal: next
# to two blocks of width 256 there are 49,152 words, so most of the work is the head's. (The table above has 15.20 GiB
# for four T4s, and section 1 has 15.1 for four A100s, because in fp16 the open block saves 56 MiB more than in bf16.)

# %% tags=["deep"]
folder = tempfile.TemporaryDirectory()
data = Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
seven = Path(folder.name, "seven.jsonl")
rows = data.read_text(encoding="utf-8").splitlines(keepends=True)[:7]
seven.write_text("".join(rows), encoding="utf-8")
tiny = ["model=random:tiny", "tricks.peft=lora", "data.max_length=160"]
tiny += ["tricks.gradient_accumulation=4", "tricks.chunked_loss=true"]
tiny += ["train.max_steps=3", "train.learning_rate=0.01"]
tiny += [f"data.train={seven}", f"data.eval={seven}"]


def trained_by(settings, out):
    aside = Aside()
    aside.quiet = True
    return train(with_settings(Recipe(), settings), out, console=aside)


def losses_of(report):
    losses = [entry["loss"] for entry in report["history"] if "loss" in entry]
    return [*losses, report["eval_loss_after"]]


whole = losses_of(trained_by(tiny, f"{folder.name}/one"))
in_stages = [*tiny, "parallel.strategy=pipeline"]
report = ranks.run(trained_by, in_stages, f"{folder.name}/two")[0]
folder.cleanup()
halves, said = losses_of(report), report["pipeline"]
print("one process:", *(f"{loss:.6f}" for loss in whole))
print("two stages: ", *(f"{loss:.6f}" for loss in halves))
predicted, measured_peak = (
    size / MIB
    for size in (report["estimated_peak_bytes"], report["estimate"]["measured_bytes"])
)
print(f"peak predicted {predicted:.1f} MiB, measured {measured_peak:.1f} MiB")
print(
    f"idle {said['idle_share']:.0%}, "
    f"of equally long stages {said['idle_share_of_equal_stages']:.0%}"
)
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(halves, whole, strict=True))

# %% [markdown]
# ## 6. Where it breaks
# **A perfect loss, and gradients of an eighth.** torch divides the gradients by the number of micro-batches, because
# most losses are means (`scale_grads=True`). Ours is a sum that is divided already, so every gradient shrinks to an
# eighth. AdamW hardly minds a constant factor, so the losses hardly change, but gradient clipping does. The cure is
# `scale_grads=False`.

# %%
scaled = partial(by_torch, scale_grads=True)
(_, of_first), (losses, of_last) = ranks.run(train_it, scaled)
wrong = torch.cat([of_first, of_last])
print(f"losses {losses[0]:.4f} -> {losses[-1]:.4f}")
print(f"the gradient is {wrong.norm() / gradient.norm():.3f} times as long")
assert abs(losses[0] / history[0] - 1) < 1e-5
assert apart(K * wrong, gradient) < 1e-5

# %% [markdown] tags=["deep"]
# ### Deeper: too few micro-batches, too many stages, and rows of two lengths
# **`a pipeline takes at least as many of a step's micro-batches as it has stages`.** With fewer, some stages would
# always wait, and torch's 1F1B refuses them, too. The cure is a larger window, or fewer stages. More stages than blocks
# are refused as well. (Against the failure above, a mean for each micro-batch is no cure, because a row with few
# trained tokens would count as much as a long one.)

# %% tags=["deep"]
few = with_settings(mine, ["tricks.gradient_accumulation=2"])
for wrong_call in (
    partial(resolve, few, processes=4),
    partial(find_blocks, "", 16, 32, "llama"),
):
    try:
        wrong_call()
        raise AssertionError("it must be refused")
    except BadInput as refusal:
        print(refusal)

# %% [markdown] tags=["deep"]
# **`Expected input batch_size (...) to match target batch_size (...)`, in the second step.** The rows of this step are
# shorter. But the stages made their receive buffers in the first step, and shorter rows fill only a part of a buffer.
# If the loss does not compare lengths, the backward pass of the first stage fails, because the gradient has the old
# length. Longer rows break the connection. (torch 2.11 looks earlier: there the first stage refuses shorter rows.) The
# cure is one length for all rows.


# %% tags=["deep"]
def two_lengths():
    shorter = [both[:, : T // 2] for both in windows[1]]
    by_torch(new_layers(dist.get_rank(), 2), windows[0], shorter)


try:
    ranks.run(two_lengths)
    raise AssertionError("nobody noticed")
except RuntimeError as error:
    print(said := str(error).splitlines()[-1])
    assert "to match target batch_size" in said or "has a shape mismatch" in said
ranks.close()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-70B has width 8,192 and runs in eight stages. A step has 32 micro-batches of one row with
#    4,096 tokens, in bf16. How many MiB ($2^{20}$ bytes) cross *one* border in a step, both ways together?
# 2. **Build.** Fill in `cut(seconds, S)`, which gets the seconds of each layer, in order, and the number of stages, and
#    returns a list of $S$ whole numbers: how many layers each stage gets, so that the slowest stage is as fast as
#    possible (any such cut). Stages keep the order of the layers, and each gets at least one.
#    (`itertools.combinations` gives all places to cut.)
# 3. **Reach.** In an *interleaved* schedule each process holds $v$ pieces of the model, dealt in turn: piece $i$ is on
#    process $i \bmod S$. A pass through one piece takes $1/v$ of the time, so the bubble is $(S-1)/(v\,k+S-1)$. For
#    $S=4$ and $k=8$, what is the smallest $v$ whose bubble is less than a tenth? And how many times as many borders as
#    with $v=1$ does a row then cross? Answer with a pair, `(v, times)`.

# %% tags=["exercise"]
mib_across = None


def cut(seconds, S):
    """FILL ME IN."""


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
# - **Saves** blocks: a stage holds $L/S$ of them, with their gradients and optimizer states. The first stage also
#   holds the embedding, and the last one the head.
# - **Costs** a bubble of $(S-1)/(k+S-1)$, padding to one length, and the pace of the slowest stage. 1F1B keeps $S-s$
#   micro-batches in stage $s$ where GPipe keeps all. torch's receive buffers for all $k$ are 64 MiB in our job, either
#   way.
# - **Exact within rounding**, with a loss that is summed over the window's tokens, and with `scale_grads=False`.
# - **When**: the model does not fit one card, the link is slow, and a step has many micro-batches.
# - **When not**: the run fits one card ([data parallelism](data_parallel.py)), or there are few rows of many lengths.
#   A device map only helps to make a model run at all.
#
# ## Sources
# - Huang et al. 2018, *GPipe*, arXiv 1811.06965, section 2 (a plain cut leaves cards idle; all forward, then all
#   backward).
# - Narayanan et al. 2021, arXiv 2104.04473, section 2.2 (1F1B with a flush, the interleaved schedule; its bubble is
#   compared with the working time instead, $(S-1)/k$).
# - torch 2.13: `torch/distributed/pipelining/schedules.py` (`Schedule1F1B`, `scale_grads`). transformers 5.23:
#   `device_map` in `from_pretrained` (at present `auto` does the same as `balanced`). Rates of links, with their
#   sources: `cria_tricks/predict/links.py`.
# - Ours: `cria_tricks/parallel/model.py`, `parallel/pipeline.py`, `trainer/pipeline.py`;
#   `tests/parallel/test_pipeline.py`.
