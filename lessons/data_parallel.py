# ---
# jupyter:
#   question: If a second GPU holds the same model, how can the two take one training step together, and how much faster
#     is it?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Data parallelism: two cards, one step
# > **Promise.** Kaggle lends two T4s for nothing, and a training script started with `torchrun` uses both. But then a
# > step often takes twice as many rows, and a loop of your own easily takes a wrong mean, without any message. You will
# > write data parallelism in plain PyTorch, train the same losses as one process, and predict how much faster two cards
# > are.
# >
# > **Card.** saves seconds, and no memory / costs one all-reduce of the gradients a step, 4 bytes for each trained
# > weight / exact within rounding / about 25 minutes / after [gradient accumulation](gradient_accumulation.py)
#
# Our job, QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens, peaks at 1,516 MiB with all switches on. A
# T4 has 14.74 GiB, so this lesson is about time.
#
# ## 1. The bill
# A step of our recipe is a [window](../docs/glossary.md#window) of eight micro-batches with one row each. These rows do
# not depend on each other until their gradients are added up, so each of two cards can take four. This is [data
# parallelism](../docs/glossary.md#data-parallelism): each card holds the whole model and trains on its share of the
# rows.
#
# Then the two cards must agree on one gradient. It has 11,272,192 numbers in fp32, because only the adapter trains.
# PCIe 3.0 x16 connects the cards, and reaches about 12.2 GB/s each way if they copy directly. With two cards, each
# sends its gradient once. How many milliseconds does the exchange take?

# %% Your guess: milliseconds for the gradients of a step tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import contextlib
import itertools
import logging
import os
import random
import tempfile
import warnings
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

from accelerate.data_loader import BatchSamplerShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler

from cria_tricks import BadInput, Recipe, course
from cria_tricks.course import (
    CARDS,
    T4,
    TRAINED_SHARE,
    CountCollectives,
    Lost,
    Share,
    Theme,
    ddp,
    diff,
    find_shape,
    folds,
    parallel,
    per_process,
    resolve,
    with_settings,
    world,
)

MIB = 2**20
job = course.CAPSTONE  # the job with the switches of all lessons on one card
shape = find_shape(job.model)
without_lora = ["peft=none", "quantization=none", "double_quantization=false"]
# the chunked loss trains no head, so full fine-tuning cannot use it
without_lora += ["lean_preparation=false", "chunked_loss=false"]
full = with_settings(job, [f"tricks.{setting}" for setting in without_lora])

# %%


def step_time(recipe, cards):
    """The estimated parts of a step, if each of these T4s takes its share."""
    share = with_settings(recipe, [f"tricks.gradient_accumulation={8 // cards}"])
    # TRAINED_SHARE is 74 %: the chunked loss skips the other tokens
    return folds.time_of(share, shape, CARDS["t4"], None, TRAINED_SHARE, cards)


def exchange_ms(step):
    """Milliseconds in which cards send each other gradients."""
    name = "gradients of the other cards"
    return 1000 * sum(part.seconds for part in step.parts if part.name == name)


steps = {cards: step_time(job, cards) for cards in (1, 2, 4, 8)}
course.reveal(guess, exchange_ms(steps[2]), "ms")
for cards, step in steps.items():
    print(
        f"{cards} T4: {step.seconds:5.2f} s, {exchange_ms(step):.1f} ms of it exchange"
    )

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
assert round(exchange_ms(steps[2])) == 4
assert [round(steps[n].seconds, 1) for n in (1, 2)] == [14.7, 7.3]
assert [round(end) for end in (steps[2].low, steps[2].high)] == [6, 9]
assert round(folds.time_of(job, shape, CARDS["t4"]).seconds, 1) == 15.2
_of_full = step_time(full, 2)
assert round(100 * exchange_ms(_of_full) / 1000 / _of_full.seconds, 1) == 4.4
assert round(per_process(job, shape, T4, "none", 1).peak_bytes / MIB) == 1516
assert round(per_process(job, shape, T4, "ddp", 2).peak_bytes / MIB) == 1516
_need = per_process(full, shape, T4, "ddp", 2)
assert _need.verdict == "tight"
assert [round(n / 2**30, 1) for n in (_need.least_bytes, _need.needed_bytes)] == [
    13.3,
    15.6,
]


def timelines(theme: Theme):
    """Which card computes when, in one optimizer step of eight rows."""
    sketch = course.Sketch(theme, 42, 15)
    unit = 30 / 8
    for top, name, cards in (
        (0.4, "one card", 1),
        (4.2, "device map", 2),
        (9.8, "data parallel", 2),
    ):
        sketch.text(0, top + (1.2 if cards == 1 else 2.6), name, align="left")
        for card in range(cards):
            y = top + 2.6 * card
            for n in range(8):
                left = 11 + unit * n
                if name == "one card":
                    sketch.tensor(left, y, unit - 0.3, 2, f"{n + 1}", color=0)
                elif name == "data parallel" and n % 2 == card:
                    left = 11 + unit * (n // 2)
                    sketch.tensor(left, y, unit - 0.3, 2, f"{n + 1}", color=card)
                elif name == "device map":
                    # forward: first half, second half; backward: second, first
                    turns = ((0, 1), (3, 1)) if card == 0 else ((1, 2),)
                    for start, length in turns:
                        sketch.tensor(
                            left + unit * start / 4,
                            y,
                            unit * length / 4 - 0.1,
                            2,
                            "",
                            color=card,
                        )
    sketch.tensor(11 + unit * 4, 9.8, 0.3, 4.6, "", color=2)
    sketch.text(11 + unit * 4 + 0.8, 12.1, "all-reduce", align="left", quiet=True)
    return sketch.figure


course.show(
    timelines,
    "Figure 1. One step on eight rows, time to the right. With a device map the two "
    "cards take turns. With data parallelism they compute at the same time, and "
    "exchange their gradients once, at the end.",
)

# %% [markdown]
# The exchange takes about 4 ms of 7.3 seconds, because only LoRA's weights train: full fine-tuning would send 110 times
# as much. The peak stays at 1,516 MiB in each card. (The seconds are predicted, 6.0 to 9.0 for two cards. For one,
# other lessons say 15.2 instead of 14.7, because they count all tokens as trained.)
#
# Many tutorials suggest `device_map="auto"` for two cards. It puts the first blocks on card 0 and the last ones on
# card 1. But each block needs the result of the one before, so only one card computes at a time (Figure 1). That helps
# with a model that is too large for one card, but it saves no time.
#
# ## 2. From scratch, in three steps
# We need two [processes](../docs/glossary.md#rank): two copies of Python that share no memory. Each has a number, its
# *rank*; their count $N$ is the *world size*. They send each other tensors through [gloo](../docs/glossary.md#nccl),
# torch's library for CPUs; on GPUs it would be NCCL. `ranks.run(f)` sends the function `f`, with the variables that it
# uses, to both processes, and returns both results.
#
# The toy has a small model, and rows of the real lengths divided by 16. `loss_sum` is a sum over the [trained
# tokens](../docs/glossary.md#trained-tokens), and we divide it by their number.

# %%
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cria_tricks.course import Ranks, row_lengths

V, D = 256, 32  # vocabulary, width
LENGTHS = row_lengths("train")  # tokens and trained tokens of each of the 107 rows


def make_row(tokens, trained):
    """Random words, and their labels: -100 where nothing is trained."""
    # small numbers are common, as frequent words are: so there is something to learn
    words = (V * torch.rand(tokens + 1) ** 3).long()
    labels = words[1:].clone()
    labels[: tokens - trained] = -100
    return words[:-1], labels


def new_model(dropout=0.0):
    torch.manual_seed(0)  # the same weights in every process
    layers = [nn.Embedding(V, D)]
    for _ in range(4):
        layers += [nn.Linear(D, D), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(D, V))


def loss_sum(model, row):
    words, labels = row
    return F.cross_entropy(model(words), labels, reduction="sum")


def count_trained(rows):
    return sum((labels != -100).sum() for _, labels in rows)


def gradient_of(model):
    """The whole gradient as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def alone(window):
    """The gradient of a window in one process: what the others must equal."""
    model, tokens = new_model(), count_trained(window)
    for row in window:
        (loss_sum(model, row) / tokens).backward()
    return gradient_of(model)


def off(found, right):
    """The length of the difference, over the length of the right one."""
    return ((found - right).norm() / right.norm()).item()


torch.manual_seed(0)
rows = [make_row(all_ // 16, trained // 16) for all_, trained in LENGTHS]
window = rows[40:48]  # the eight rows of one step
right = alone(window)
ranks = Ranks(2)  # starts the two processes

# %% Silence a log message in both processes tags=["hide-input"]
_ = ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)

# %% [markdown]
# **Step 1: share the rows, and take the mean.** Rank 0 takes rows 0, 2, 4 and 6 of the window, and rank 1 takes the
# others. Each computes the mean gradient of its own rows. Then an [all-reduce](../docs/glossary.md#all-reduce) gives
# every process the sum of both gradients, and each divides it by $N$.


# %%
def mean_of_means(window):
    rank, N = dist.get_rank(), dist.get_world_size()
    gradient = alone(window[rank::N])  # of my own rows
    dist.all_reduce(gradient)  # in place: the sum over all processes
    return gradient / N


wrong = ranks.run(mean_of_means, window)[0]
shares = [count_trained(window[rank::2]).item() for rank in (0, 1)]
print(f"trained tokens of rank 0 and rank 1: {shares}")
print(f"the gradient is off by {off(wrong, right):.1%}")
assert off(wrong, right) > 0.01

# %% [markdown]
# The gradient is wrong by several per cent. Rank 1 has fewer trained tokens, but its mean counts for one half.
# [Gradient accumulation](gradient_accumulation.py) had the same mistake, between micro-batches.
#
# **Step 2: divide by the tokens of all processes.** Before the first row, an all-reduce of a single number gives every
# process the trained tokens of the window, by which it divides. Then all gradients are parts of one sum.


# %%
def one_by_one(window):
    mine = window[dist.get_rank() :: dist.get_world_size()]
    model, tokens = new_model(), count_trained(mine)
    dist.all_reduce(tokens)  # now those of the whole window
    for row in mine:
        (loss_sum(model, row) / tokens).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return gradient_of(model)


first, second = ranks.run(one_by_one, window)
print(f"off by {off(first, right):.1e}")
assert off(first, right) < 1e-6
assert torch.equal(first, second)  # both processes have the same bits

# %% [markdown]
# The rest is rounding, because the rows were added in another order. Both processes hold the same bits, so they compute
# equal new weights, and never send them.
#
# **Step 3: put gradients into buckets.** Every call has a fixed cost. Our adapter has 224 matrices, so step 2 would
# make 224 calls. We send the same bytes in 224 calls, and in one:


# %%
def milliseconds(calls):
    gradients = torch.zeros(224 * 1024).chunk(calls)
    dist.barrier()  # both begin together
    start = time.perf_counter()
    for gradient in gradients:
        dist.all_reduce(gradient)
    return 1000 * (time.perf_counter() - start)


for calls in (224, 1):
    best = min(ranks.run(milliseconds, calls)[0] for _ in range(5))
    print(f"896 KiB in {calls:3} calls: {best:8.1f} ms, on this machine")


# %% Draw figure 2 tags=["hide-input"]
def overlap(theme: Theme):
    """Gradients are made from the last layer to the first; buckets travel meanwhile."""
    sketch = course.Sketch(theme, 42, 9.5)
    sketch.text(0, 1.8, "backward", align="left")
    sketch.text(0, 5.6, "all-reduce", align="left")
    sketch.text(0, 8.6, "time to the right", align="left", quiet=True)
    left, bucket, free = 9.0, [], 9.0
    sizes = {"6": 4.8, "5": 4.0, "4": 4.0, "3": 4.0, "2": 4.0, "1": 5.2}
    for name, width in sizes.items():
        sketch.tensor(left, 0.6, width - 0.3, 2.4, name, color=0)
        left += width
        bucket.append(name)
        if len(bucket) == 2:
            start, length = max(left, free), 5.4
            sketch.arrow((left - 0.2, 3.1), (start + 0.3, 4.3))
            sketch.tensor(start, 4.4, length, 2.4, " and ".join(bucket), color=1)
            free, bucket = start + length, []
    return sketch.figure


course.show(
    overlap,
    "Figure 2. The backward pass computes the gradients of layer 6 first and of layer "
    "1 last. A bucket with two layers is sent while the layers below are computed, so "
    "only the last bucket takes extra time.",
)

# %% [markdown]
# So copy several gradients into one vector, a *bucket*. The backward pass computes the last layer's gradients first, so
# a full bucket can be sent while the layers below are computed (Figure 2). Only the window's *last* backward pass sends
# gradients; the passes before it only add them up. torch's `DistributedDataParallel` (DDP) does all this. Our switch
# sets its buckets to 25 MiB, so the 43 MiB of our job make two. It also sets `gradient_as_bucket_view=True`, because
# otherwise the buckets would take another 43 MiB.

# %% [markdown] tags=["deep"]
# ### Deeper: buckets that are sent during the backward pass, in 30 lines
# A hook on each parameter runs when its gradient is final. It puts the gradient into the bucket, and a full bucket is
# sent with `async_op=True`, which does not wait for the result. After the backward pass we wait for all buckets, and
# copy the sums back. The printed log shows that the first bucket leaves before the gradient of the embedding,
# `0.weight`, exists. (How much do buckets save? The calls above are those of gloo on a CPU. For our job over PCIe 3.0
# with NCCL, the course predicts 8 ms for 224 calls, and 4 ms for two buckets, of 7.3 seconds.)


# %% tags=["deep"]
def overlapped(window, bucket_bytes):
    mine = window[dist.get_rank() :: dist.get_world_size()]
    model, tokens = new_model(), count_trained(mine)
    dist.all_reduce(tokens)
    name_of = {p: name for name, p in model.named_parameters()}
    bucket, under_way, log = [], [], []

    def send():
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        work = dist.all_reduce(flat, async_op=True)
        under_way.append((work, flat, list(bucket)))
        log.append(f"[{len(bucket)} sent]")
        bucket.clear()

    def ready(p):
        log.append(name_of[p])
        bucket.append(p.grad)
        if sum(gradient.nbytes for gradient in bucket) >= bucket_bytes:
            send()

    for row in mine:
        if row is mine[-1]:  # before it, gradients are only added up
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(ready)
        (loss_sum(model, row) / tokens).backward()
    if bucket:
        send()
    for work, flat, gradients in under_way:
        work.wait()
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, summed in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))
    return gradient_of(model), log


found, log = ranks.run(overlapped, window, 10_000)[0]
print(*log)
assert off(found, right) < 1e-6
assert log.index("[2 sent]") < log.index("0.weight")

# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*, for a whole run. So we train one epoch (13 windows of eight rows, and one of
# three) in one process, and in two with torch's DDP. DDP takes the *mean* over the processes, but we need the sum, so
# we multiply the loss by $N$. `no_sync()` keeps DDP from sending until the window's last row.


# %%
def an_epoch(windows, parallel=False, dropout=0.0):
    """The loss of each window, the weights at the end, and the bytes all-reduced."""
    rank = dist.get_rank() if parallel else 0
    N = dist.get_world_size() if parallel else 1
    model, history = new_model(dropout), []
    replica = DistributedDataParallel(model) if parallel else model
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with CountCollectives() as sent:
        for window in windows:
            mine, total = window[rank::N], torch.zeros(())
            tokens = count_trained(mine)
            if parallel:
                dist.all_reduce(tokens)
            for row in mine:
                last = not parallel or row is mine[-1]
                # outside of no_sync(), DDP sends the gradients in the backward pass
                with contextlib.nullcontext() if last else replica.no_sync():
                    loss = loss_sum(replica, row) / tokens
                    (N * loss).backward()
                total += loss.detach()
            if parallel:
                dist.all_reduce(total)
            history.append(total.item())
            optimizer.step()
            optimizer.zero_grad()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return history, weights, sent.bytes["all_reduce"]


windows = [rows[start : start + 8] for start in range(0, len(rows), 8)]
history, weights, _ = an_epoch(windows)
their_history, their_weights, sent = ranks.run(an_epoch, windows, True)[0]
print(f"loss {history[0]:.4f} -> {history[-1]:.4f}")
for one, two in zip(history, their_history, strict=True):
    assert abs(two / one - 1) < 1e-5
print(f"the weights at the end are off by {off(their_weights, weights):.0e}")
assert off(their_weights, weights) < 1e-3
# fp32 gradients, the count of trained tokens (int64), and the loss (fp32)
predicted = len(windows) * (4 * len(weights) + 8 + 4)
print(f"all-reduced: predicted {predicted:,} bytes, counted {sent:,}")
assert sent == predicted

# %% [markdown] tags=["deep"]
# ### Deeper: the package's own class trains the same epoch
# `cria_tricks.parallel.ddp.Replicated` is the code of the earlier fold, as a class. It sums, so the loss is not
# multiplied by $N$.


# %% tags=["deep"]
def with_the_package(windows):
    rank, N = dist.get_rank(), dist.get_world_size()
    model, history = new_model(), []
    replicas = ddp.Replicated(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for window in windows:
        mine, total = window[rank::N], torch.zeros(())
        tokens = count_trained(mine)
        dist.all_reduce(tokens)
        for row in mine:
            replicas.last = row is mine[-1]
            loss = loss_sum(model, row) / tokens
            loss.backward()
            total += loss.detach()
        replicas.wait()
        dist.all_reduce(total)
        history.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return history, nn.utils.parameters_to_vector(model.parameters()).detach()


ours, our_weights = ranks.run(with_the_package, windows)[0]
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(ours, history, strict=True))
print(f"the weights at the end are off by {off(our_weights, weights):.0e}")
assert off(our_weights, weights) < 1e-3

# %% [markdown]
# ## 4. What it costs
# **Bytes on the link.** Once a step the gradients are all-reduced: 4 bytes for each trained weight, or 45.1 MB in our
# job. The processes stand in a *ring* and cut the gradient into $N$ pieces. Each passes on $N - 1$ pieces to be added
# up, and then $N - 1$ finished pieces to be handed out. So each sends $2\,(N - 1) / N$ of the gradient.
#
# **Waiting for the slowest card.** An all-reduce ends when the last process has joined it. Our rows have different
# lengths, so a card whose four rows are short must wait for the other. Suppose that the time of a row is proportional
# to its tokens. With rows in random order, dealt in turn as samplers do, how many times as fast is the run on two
# cards?

# %% Your guess: times as fast on two cards tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def in_turn(window, cards):
    """The rows of each card: card 0 takes the first, card 1 the second, and so on."""
    return [window[card::cards] for card in range(cards)]


def speed_up(cards, order, deal=in_turn):
    """Tokens of an epoch over those of the slowest card, window by window."""
    tokens = [LENGTHS[number][0] for number in order]
    slowest = 0
    for start in range(0, len(tokens), 8):
        shares = deal(tokens[start : start + 8], cards)
        slowest += max(sum(share) for share in shares)
    return sum(tokens) / slowest


orders = [random.Random(seed).sample(range(107), 107) for seed in range(100)]
with_our_rows = {}
for cards in (1, 2, 4, 8):
    with_our_rows[cards] = sum(speed_up(cards, order) for order in orders) / 100
    equal = steps[1].seconds / steps[cards].seconds
    print(f"{cards} T4: {equal:.2f}, and with our rows {with_our_rows[cards]:.2f}")
course.reveal(guess, with_our_rows[2], "times")

# %% Draw figure 3, and hold the numbers of the text tags=["hide-input"]
assert [round(with_our_rows[n], 1) for n in (2, 8)] == [1.8, 5.5]
assert round(steps[1].seconds / with_our_rows[2], 1) == 8.1
(call,) = ddp.traffic(job, shape, 2)
assert round(call.bytes / 1e6, 1) == round(call.sent / 1e6, 1) == 45.1
with_equal_rows = {n: steps[1].seconds / steps[n].seconds for n in with_our_rows}


def of_speed(theme: Theme):
    """Speed-up against cards."""
    drawn, axes = course.figure(height=2.9)
    for number, (label, found) in enumerate(
        {"equal rows": with_equal_rows, "our rows": with_our_rows}.items()
    ):
        axes.plot(
            list(found),
            list(found.values()),
            color=theme.series[number],
            marker="os"[number],
            label=label,
        )
    axes.plot(
        [1, 8],
        [1, 1],
        color=theme.series[2],
        linestyle=(0, (4, 3)),
        label='device_map="auto"',
    )
    axes.set(xlabel="T4s", ylabel="times as fast as one", ylim=(0, 8.4))
    axes.set_xticks(list(with_our_rows))
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    of_speed,
    "Figure 3. Predicted speed-up. The link costs next to nothing: with equal rows "
    "eight cards are nearly eight times as fast. With our rows they are 5.5 times as "
    "fast, because cards wait for the longest share.",
)

# %% [markdown]
# By this estimate Kaggle's second card makes our run 1.8 times as fast. The rest is lost by waiting, and exercise 2
# gets most of it back.
#
# ## 5. The production switch
# It is one wrapper. Your own script needs the loop of section 3, with its factor $N$, and a card for each process
# (`torch.cuda.set_device`). The trainer of transformers does all this under `torchrun`:

# %%
print(ddp.PLAIN)
shared = with_settings(job, ["parallel.strategy=ddp"])
print(diff(resolve(job, T4), resolve(shared, T4, processes=2)))

# %% [markdown]
# The last lines are what our switch changes: each process takes four of the eight micro-batches. transformers 5.23
# takes the right mean (`average_tokens_across_devices` is on by default). But it does *not* divide the window: two
# processes take 16 rows a step, so the run makes half as many steps, and no message says so. There, set
# `gradient_accumulation_steps=4` yourself. (A larger global batch has less noisy gradients, and needs another learning
# rate.) The command:
#
# ```bash
# cria launch kwanzaa --on torchrun --nproc 2 --set parallel.strategy=ddp \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# ```
#
# `cria plan kwanzaa --gpu t4 --nproc 2` with the same settings prints the bill of each process. What is the second card
# worth, for our job and without LoRA?

# %%
for name, recipe in {"our job": job, "full fine-tuning": full}.items():
    before, after = step_time(recipe, 1).seconds, step_time(recipe, 2).seconds
    print(f"{name:17}{before:6.2f} -> {after:5.2f} s a step")

# %% [markdown]
# The switch halves the seconds of equal rows; with ours, 14.7 become 8.1. The bytes stay. In full fine-tuning all 1.2
# billion gradients travel: 4.4 % of the step, if nothing overlaps. The cards do not share the optimizer's work. (With
# *paged* 8-bit AdamW it needs 13.3 to 15.6 GiB: tight on a T4.)

# %% [markdown] tags=["deep"]
# ### Deeper: the same losses in the real trainer
# A tiny Llama with random weights trains on seven rows in windows of four, so the last window is not full. The table
# shows the losses of both steps, and that of the evaluation.

# %% tags=["deep"]
folder = tempfile.TemporaryDirectory()
data = Path(parallel.__file__).parents[1] / "data" / "nguzo_saba_eval.jsonl"
seven = Path(folder.name) / "seven.jsonl"
seven.write_text(
    "".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[:7]),
    encoding="utf-8",
)
tiny = [
    "model=random:tiny",
    "tricks.peft=lora",
    "tricks.gradient_accumulation=4",
    "data.max_length=256",
    "tricks.chunked_loss=true",
    "train.learning_rate=0.01",
    f"data.train={seven}",
    f"data.eval={seven}",
]


def train_it(settings, out):
    from cria_tricks import train
    from cria_tricks.course import Aside

    console = Aside()
    console.quiet = True
    report = train(with_settings(Recipe(), settings), out, console=console)
    return [entry["loss"] for entry in report["history"] if "loss" in entry] + [
        report["eval_loss_after"]
    ]


# %% tags=["deep"]
out = Path(folder.name)
one = train_it(tiny, out / "one")
two = ranks.run(train_it, [*tiny, "parallel.strategy=ddp"], out / "two")[0]
folder.cleanup()
for name, losses in {"one process": one, "two processes": two}.items():
    print(f"{name:14}", *(f"{loss:.6f}" for loss in losses))
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(one, two, strict=True))

# %% [markdown]
# ## 6. Where it breaks
# **The losses differ a little from those of one process, and there is no error.** Two processes cannot share 107 rows
# evenly. So the sampler of accelerate, which transformers uses, takes row 0 a second time (`even_batches`). Ours adds a
# 108th row, number 107 below, in which no token is trained.

# %%
batches = BatchSampler(SequentialSampler(range(107)), batch_size=1, drop_last=False)
for rank in (0, 1):
    theirs = [row for (row,) in BatchSamplerShard(batches, 2, rank)]
    sampler = Share(SequentialSampler(range(107)), 1, rank, 2, filler=107)
    ours = [row for (row,) in sampler]
    print(f"rank {rank} ends with rows {theirs[-2:]} by accelerate, {ours[-2:]} by us")
assert theirs[-1] == 0
assert ours[-1] == 107
repeated = an_epoch([*windows[:-1], [*windows[-1], rows[0]]])[0][-1]
print(f"loss of the last window {repeated:.4f}, and it should be {history[-1]:.4f}")

# %% [markdown] tags=["deep"]
# ### Deeper: a lost process, uneven windows and dropout
# **A process dies, and the others hang.** An all-reduce waits for every process: for 10 minutes with NCCL and for 30
# with gloo, if nothing else is set. (A process that has no row in a window makes the others wait, too. In our toy a
# last window with one row would do that. Our switch adds rows without trained tokens until every process has as many.)
# The cure is a shorter limit (`parallel.timeout`, by default 10 minutes here), and a checkpoint: the same command with
# `--resume` continues from it. If we kill rank 1 here, the connection breaks, so rank 0 notices at once. It would print
# a page, which `in_one_line` shortens.


# %% tags=["deep"]
def one_dies():
    if dist.get_rank() == 1:
        os._exit(9)
    with world.in_one_line():
        dist.all_reduce(torch.zeros(1))


try:
    ranks.run(one_dies)
    raise AssertionError("nobody noticed")
except RuntimeError as error:
    print(str(error).splitlines()[-1])
    assert Lost.__name__ in str(error)

# %% [markdown] tags=["deep"]
# **`cannot share the 8 micro-batches of a step evenly`.** Three processes cannot share a window of eight. The cure is
# a window that they can divide.

# %% tags=["deep"]
try:
    resolve(shared, T4, processes=3)
    raise AssertionError("it must be refused")
except BadInput as refused:
    print(refused)

# %% [markdown] tags=["deep"]
# **`You can't train a model that has been loaded with device_map='auto' in any distributed mode.`** Under `torchrun`
# accelerate 1.15 refuses a model that a device map has spread over several cards. The cure is `device_map={"":
# local_rank}`, which puts the whole model of a process on the card of this process.

# %% [markdown] tags=["deep"]
# **The losses differ in the third digit, with dropout.** Each process has its own [random
# state](../docs/glossary.md#random-state-rng), so its dropout masks differ from those of a single process. That is not
# a mistake, but you cannot compare the losses. Equal seeds would be a mistake, as in our toy, where both ranks draw
# the same masks for different rows. The cure: compare at dropout 0, and train with a seed for each process. (Our
# trainer adds the rank to the seed.)

# %% tags=["deep"]
one = an_epoch(windows, False, 0.1)[0]
two = ranks.run(an_epoch, windows, True, 0.1)[0][0]
differences = [second / first - 1 for first, second in zip(one, two, strict=True)]
print("with dropout, differences of the losses, in per cent:")
for half in (differences[:7], differences[7:]):
    # adding 0.0 turns -0.0 into 0.0
    print(*(f"{round(100 * share, 2) + 0.0:+6.2f}" for share in half))
assert max(map(abs, differences)) > 1e-3
ranks.close()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Full fine-tuning of the same model trains 1,235,814,400 numbers. Four cards share a step. How many
#    bytes does each card send in it, in fp32 and around a ring?
# 2. **Build.** Fill in `deal(window, cards)`. It gets the lengths of a window's rows, and returns one list of lengths
#    for each card. All lists have equally many rows (in an uneven window, at most the rounded-up share, perhaps
#    none). Reach a mean `speed_up` over our 100 `orders` of 1.93 with two cards and 3.5 with four. (About five lines:
#    the longest rows first, each to the card with the fewest tokens that still has room.)
# 3. **Reach.** Fill in `seconds(layers, bucket_bytes, start, rate)`: the time from the beginning of the backward pass
#    until the last gradient has arrived. `layers` is a list of pairs (seconds, bytes) in the order of the backward
#    pass. A bucket is sent as soon as it holds at least `bucket_bytes`, or when the layers end. Buckets travel one
#    after the other, each for `start` seconds plus its bytes divided by `rate`. Then try 1 KiB, 25 MiB and 1 GiB on
#    `[(0.04, 2_818_048)] * 16`, start 0.0005, rate 12e9: which is fastest?

# %% tags=["exercise"]
bytes_sent = None


def deal(window, cards):
    """FILL ME IN."""


def seconds(layers, bucket_bytes, start, rate):
    """FILL ME IN."""


# %% Check the exercises tags=["hide-input"]
def of_deal(answer):
    for cards, lengths in (
        (2, [900, 1000, 1100]),
        (4, [900, 1000, 1100]),
        (3, [5, 4, 3, 2, 1]),
        (2, [2048, 9, 9, 9]),
    ):
        if (dealt := answer(list(lengths), cards)) is None:
            raise NotImplementedError
        most = -(-len(lengths) // cards)
        assert sorted(itertools.chain(*dealt)) == sorted(lengths), (
            "deal every row of a window once, in an uneven window, too"
        )
        assert len(dealt) == cards, (
            f"a list for each of {cards} cards, "
            "also where there are fewer rows than cards"
        )
        assert max(map(len, dealt)) <= most, (
            f"{len(lengths)} rows on {cards} cards: {most} for a card at most"
        )
    for cards, can_be_had in ((2, 1.93), (4, 3.5)):
        for order in orders[:10]:
            window = [LENGTHS[number][0] for number in order[:8]]
            dealt = answer(list(window), cards)
            assert sorted(itertools.chain(*dealt)) == sorted(window), (
                "every row of the window once, and no other"
            )
            assert [len(one) for one in dealt] == [8 // cards] * cards, (
                f"{8 // cards} rows for each of {cards} cards"
            )
        found = sum(speed_up(cards, order, answer) for order in orders) / 100
        hint = (
            "deal the rows from the longest on, each to the card that has least so far"
        )
        assert found > can_be_had, (
            f"{cards} cards are {found:.2f} times as fast as one, "
            f"and {can_be_had} is possible; {hint}"
        )


def of_seconds(answer):
    drawn = random.Random(0)
    for many in (6, 1, 2, *[6] * 20):
        layers = [(drawn.randint(1, 3), drawn.randint(1, 9)) for _ in range(many)]
        bucket_bytes, start, rate = (
            drawn.randint(1, 30),
            drawn.choice((0.25, 0.5)),
            drawn.choice((1, 2, 4)),
        )
        if (found := answer(list(layers), bucket_bytes, start, rate)) is None:
            raise NotImplementedError
        now = free = waiting = 0
        for number, (takes, size) in enumerate(layers):
            now, waiting = now + takes, waiting + size
            if waiting >= bucket_bytes or number == many - 1:
                free, waiting = max(now, free) + start + waiting / rate, 0
        case = (
            f"it should be {free} s, for {layers}, buckets of {bucket_bytes}, "
            f"start {start}, rate {rate}"
        )
        early = (
            "a bucket waits until it is full, or the layers end, "
            "and until the bucket before has come"
        )
        early += "; each pays its start"
        late = (
            "a bucket leaves as soon as it has bucket_bytes, "
            "and travels while the layers below are computed"
        )
        assert found > free - 1e-9, f"{found} s is too early: {early}; {case}"
        assert found < free + 1e-9, f"{found} s is too late: {late}; {case}"


hint = (
    "4 bytes a number, and around a ring a card passes on N - 1 of N pieces twice: "
    "to add up, and to hand out"
)
course.check(
    1,
    bytes_sent,
    course.about(2 * 3 / 4 * 4 * 1_235_814_400, hint),
    "a number of bytes",
)
course.check(
    2,
    deal,
    of_deal,
    "a function (window, cards) -> a list of lists of row lengths, "
    "one list for each card",
)
course.check(
    3,
    seconds,
    of_seconds,
    "a function (layers, bucket_bytes, start, rate) -> a number of seconds",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # 7.4 GB, 0.6 seconds a step at 12.2 GB/s
# bytes_sent = 2 * (4 - 1) / 4 * 4 * 1_235_814_400
#
#
# def deal(window, cards):
#     dealt = [[] for _ in range(cards)]
#     most = -(-len(window) // cards)  # rounded up
#     for row in sorted(window, reverse=True):
#         with_room = [share for share in dealt if len(share) < most]
#         min(with_room, key=sum).append(row)
#     return dealt
#
#
# def seconds(layers, bucket_bytes, start, rate):
#     now, free, waiting = 0, 0, 0
#     for number, (takes, size) in enumerate(layers):
#         now, waiting = now + takes, waiting + size
#         if waiting >= bucket_bytes or number == len(layers) - 1:
#             free, waiting = max(now, free) + start + waiting / rate, 0
#     return free
# ```
#
# The three sizes take 0.6407, 0.6419 and 0.6443 s. One layer is the best bucket here, because it computes for 40 ms,
# and a start costs only 0.5. With 3,584 layers of 0.1 ms and 12,582 bytes the starts decide: 1.80, 0.36 and 0.36 s.
#
# </details>
#
# ## In one breath
# - **Saves** seconds: each card takes $1 / N$ of the rows of a step. It saves no memory, because every card holds the
#   whole model.
# - **Costs** one all-reduce a step, 4 bytes for each trained weight, of which each card sends $2\,(N - 1) / N$; and
#   the time in which cards wait for the longest share.
# - **Exact within rounding**, if sums are divided by the trained tokens of all processes, no row counts twice, and
#   dropout is 0.
# - **When**: the run fits one card, and you have a second one. Try it before any other way to use two cards.
# - **When not**: the run does not fit one card ([sharding](sharding.py)), or a step has too few rows to share.
# - **On two cards**: the notebook `notebooks/two_cards.ipynb` measures this lesson on Kaggle's two T4s.
#
# ## Sources
# - Li et al. 2020, *PyTorch Distributed*, arXiv 2006.15704, section 3.2 (buckets, overlap, no_sync).
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms*, section 3.
# - accelerate 1.15: `BatchSamplerShard` in `accelerate/data_loader.py`. transformers 5.23: `training_args.py`
#   (`train_batch_size` is per device; `average_tokens_across_devices`). torch 2.13: `torch/nn/parallel/distributed.py`;
#   the limits of 10 and 30 minutes: `init_process_group`. Predicted times of calls: `cria_tricks/predict/links.py`.
# - NVIDIA's T4 datasheet, for the rates. Kaggle's two T4s: public notes of November 2025; we have not measured there.
# - Ours: `cria_tricks/parallel/ddp.py`, `cria_tricks/trainer/training.py`, `tests/parallel/test_ddp.py`.
