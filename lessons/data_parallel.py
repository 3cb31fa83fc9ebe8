# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Data parallelism: two cards, one step
# > **Promise.** Two processes train what one would, to the last digits of every loss, and talk to each other once a
# > step. You count what they say, and find out why the second card brings less than twice the speed.
#
# > **Card.** saves seconds, and not a byte / costs one all-reduce of the gradients a step, 4 bytes a trained weight /
# > exact within rounding / 35 minutes / after [all switches together](a_full_card.py)
#
# The job is QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens. It fits a T4 seven times over. So far
# every lesson bought memory; this one has memory to spare, and wants minutes. Kaggle lends two T4s for nothing. What is
# the second one good for?

# %% Imports and settings tags=["hide-input"]
import contextlib
import itertools
import logging
import os
import random
import tempfile
import time
import warnings
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler

from cria_tricks import course, parallel
from cria_tricks.bench.case import TRAINED_SHARE
from cria_tricks.bench.style import Theme
from cria_tricks.bill.calls import CountCollectives
from cria_tricks.common.errors import BadInput, Lost
from cria_tricks.course.processes import Ranks
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import ddp
from cria_tricks.predict.per_process import per_process
from cria_tricks.processes import world
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.trainer.shares import Share
from cria_tricks.tricks import folds

MIB = 2**20
# Tokens and trained tokens of each of the 107 rows, as SmolLM2 cuts them, at most 2,048
# a row; in the file's order.
LENGTHS = row_lengths("train")

# %% [markdown]
# ## 1. The bill
# A step of our recipe is a *window* of eight micro-batches of one row ([gradient
# accumulation](gradient_accumulation.py)). They do not know of each other until their gradients are added up. So card 0
# could take four of them and card 1 the other four. Then the two must agree on one gradient: that of 11,272,192 trained
# numbers, in fp32. A T4 sits on PCIe 3.0 x16, 16 GB a second one way. Write down how many milliseconds the second card
# costs in a step of fourteen seconds. Then run [the lesson on choosing hardware](choose_your_hardware.py)'s reckoning.

# %%
whole = course.CAPSTONE
shape = find_shape(whole.model)


def of_a_step(cards):
    mine = with_settings(whole, [f"tricks.gradient_accumulation={8 // cards}"])
    return folds.step(
        mine, shape, CARDS["t4"], trained_share=TRAINED_SHARE, cards=cards
    )


steps = {cards: of_a_step(cards) for cards in (1, 2, 4, 8)}
for cards, step in steps.items():
    travel = sum(
        part.seconds
        for part in step.parts
        if part.name == "gradients of the other cards"
    )
    print(
        f"{cards} T4: {step.seconds:.2f} s a step, "
        f"{1000 * travel:4.1f} ms of it for gradients"
    )
assert 1.99 < steps[1].seconds / steps[2].seconds < 2
bytes_of = [
    per_process(whole, shape, T4, strategy, n).peak_bytes
    for strategy, n in (("none", 1), ("ddp", 2))
]
print(
    f"at the peak of a step: alone {bytes_of[0] / MIB:,.0f} MiB, "
    f"each of two {bytes_of[1] / MIB:,.0f} MiB"
)
assert bytes_of[0] == bytes_of[1]

# %% [markdown]
# Four milliseconds in some seven seconds, at three quarters of the link's rate. LoRA makes this cheap: full fine-tuning
# would send 110 times as much. And the bill in bytes does not move at all: each card holds the whole model.
#
# The usual advice for two cards is another one: `device_map="auto"`. It puts the first blocks on card 0 and the last
# ones on card 1. But a block needs its predecessor's result, so one card computes while the other waits. It is a
# cure for models that are too large, and no speed-up.


# %% Draw figure 1 tags=["hide-input"]
def timelines(theme: Theme):
    """Who computes when, in one optimizer step of eight rows."""
    sketch = course.Sketch(theme, 42, 15)
    unit = 30 / 8
    for top, name, cards in (
        (0.4, "one card", 1),
        (4.2, 'device_map="auto"', 2),
        (9.8, "a process each", 2),
    ):
        sketch.text(0, top + (1.2 if cards == 1 else 2.6), name, align="left")
        for card in range(cards):
            y = top + 2.6 * card
            for n in range(8):
                if name == "one card":
                    sketch.tensor(
                        10 + unit * n, y, unit - 0.3, 2, f"row {n + 1}", color=0
                    )
                elif name == "a process each" and n % 2 == card:
                    sketch.tensor(
                        10 + unit * (n // 2),
                        y,
                        unit - 0.3,
                        2,
                        f"row {n + 1}",
                        color=card,
                    )
                elif name != "a process each":
                    # forward: first half, second half; backward: second half, first
                    # half
                    turns = ((0, 1), (3, 1)) if card == 0 else ((1, 2),)
                    for start, length in turns:
                        left = 10 + unit * (n + start / 4)
                        sketch.tensor(
                            left, y, unit * length / 4 - 0.1, 2, "", color=card
                        )
    sketch.tensor(10 + unit * 4, 9.8, 0.3, 4.6, "", color=2)
    sketch.text(10 + unit * 4 + 0.8, 12.1, "gradients meet", align="left", quiet=True)
    return sketch.figure


course.show(
    timelines,
    "Figure 1. One step, time to the right. With a device map the cards take turns; "
    "with a process each they work side "
    "by side, and meet once.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# Our rows have the real lengths, divided by 16, and random words. The model is a stack of four small layers. And we
# start two *processes*: two Pythons that share no memory, number themselves 0 and 1 (their *rank*), and send each other
# tensors with gloo, torch's messenger for CPUs (on cards it is NCCL). `ranks.run` calls a function in both.

# %% Helpers: made rows, gradients, distances tags=["hide-input"]
V, D = 256, 32
torch.manual_seed(0)


def made(tokens, trained):
    """Words, and labels: -100 where nothing is trained."""
    # small words are common, large ones rare
    words = (V * torch.rand(tokens + 1) ** 3).long()
    labels = words[1:].clone()
    labels[: tokens - trained] = -100
    return words[:-1], labels


def gradient(model):
    """All of it in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def apart(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# %%
def new_model(p=0.0):
    torch.manual_seed(0)  # the same weights everywhere
    layers = (
        nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(p)) for _ in range(4)
    )
    return nn.Sequential(nn.Embedding(V, D), *layers, nn.Linear(D, V))


def loss_sum(model, row):
    words, labels = row
    return F.cross_entropy(model(words), labels, reduction="sum")


def answers(rows):
    """How many tokens are trained."""
    return sum((labels != -100).sum() for _, labels in rows)


def alone(window):
    """The gradient of a window in one process, as in gradient_accumulation.py: sums,
    divided once by the window's tokens."""
    model, tokens = new_model(), answers(window)
    for row in window:
        (loss_sum(model, row) / tokens).backward()
    return gradient(model)


rows = [made(tokens // 16, trained // 16) for tokens, trained in LENGTHS]
window = rows[40:48]

# %% Start two processes tags=["hide-input"]
ranks = Ranks(2)
_ = ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)

# %% [markdown]
# **Share the rows, take the mean.** An *all-reduce* gives every process the sum of what all have. So each process could
# compute its own rows' gradient, and then all take the mean. Many a training script does just that. Does the mean of
# two means give the gradient of the window? Decide before you run.


# %%
def mean_of_means(window):
    rank, N = dist.get_rank(), dist.get_world_size()
    mine = alone(window[rank::N])
    dist.all_reduce(mine)
    return mine / N


expected = alone(window)
trap = apart(ranks.run(mean_of_means, window)[0], expected)
print(
    f"trained tokens: {answers(window[0::2])} and {answers(window[1::2])}; "
    f"gradient off by {trap:.1%}"
)
assert trap > 0.01

# %% [markdown]
# No: rank 1's tokens are fewer, and so each of them weighs more. It is [the lesson on gradient
# accumulation](gradient_accumulation.py)'s trap, with processes in the place of micro-batches. **Divide by everybody's
# tokens:** one more all-reduce, of a single number, before the first row. Then gradients are sums, and the gradient of
# a sum is the sum of the gradients.


# %%
def one_by_one(window):
    mine = window[dist.get_rank() :: dist.get_world_size()]
    model, tokens = new_model(), answers(mine)
    dist.all_reduce(tokens)
    for row in mine:
        (loss_sum(model, row) / tokens).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return gradient(model)


first, second = ranks.run(one_by_one, window)
print(
    f"off by {apart(first, expected):.1e}; the same bits in both: "
    f"{torch.equal(first, second)}"
)
assert apart(first, expected) < 1e-6
assert torch.equal(first, second)

# %% [markdown]
# What is left is rounding: the rows were added in another order. That both hold the same bits matters more. From equal
# weights, equal gradients and equal optimizer states both take the same step. So weights are never sent again.
#
# **Put gradients into buckets.** Each call has to be started, whatever its size. Our adapter has 224 matrices. How much
# slower are 224 calls than one with the same bytes?


# %%
def milliseconds(calls):
    pieces = torch.zeros(224 * 1024).chunk(calls)
    dist.barrier()
    start = time.perf_counter()
    for piece in pieces:
        dist.all_reduce(piece)
    return 1000 * (time.perf_counter() - start)


many, once = (
    min(ranks.run(milliseconds, calls)[0] for _ in range(5)) for calls in (224, 1)
)
print(
    f"896 KiB between two processes of this machine: {many:.1f} ms in 224 calls, "
    f"{once:.1f} in one"
)

# %% [markdown]
# **Send while the backward pass goes on.** It makes the last layer's gradients first. They are final: nothing that
# comes later changes them. So a full bucket leaves at once, and travels while the layers below are computed. Only in
# the window's last backward pass, though: until then each process adds up at home.


# %%
def overlapped(window, bucket_bytes):
    mine = window[dist.get_rank() :: dist.get_world_size()]
    model, tokens = new_model(), answers(mine)
    dist.all_reduce(tokens)
    name_of = {p: name for name, p in model.named_parameters()}
    bucket, under_way, log = [], [], []

    def send():
        flat = torch.cat([g.flatten() for g in bucket])
        under_way.append((dist.all_reduce(flat, async_op=True), flat, list(bucket)))
        log.append(f"[{len(bucket)} sent]")
        bucket.clear()

    def ready(p):
        log.append(name_of[p])
        bucket.append(p.grad)
        if sum(g.nbytes for g in bucket) >= bucket_bytes:
            send()

    for row in mine:
        if row is mine[-1]:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(ready)
        (loss_sum(model, row) / tokens).backward()
    if bucket:
        send()
    for work, flat, gradients in under_way:
        work.wait()
        for g, summed in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            g.copy_(summed.view_as(g))
    return gradient(model), log


found, log = ranks.run(overlapped, window, 10_000)[0]
print(*log)
print(f"off by {apart(found, expected):.1e}")
assert apart(found, expected) < 1e-6
assert log.index("[2 sent]") < log.index("0.weight")


# %% Draw figure 2 tags=["hide-input"]
def overlap(theme: Theme):
    """Gradients are made from the last layer to the first; buckets travel meanwhile."""
    sketch = course.Sketch(theme, 42, 9.5)
    sketch.text(0, 1.8, "backward", align="left")
    sketch.text(0, 5.6, "all-reduce", align="left")
    sketch.text(0, 8.6, "time to the right", align="left", quiet=True)
    left, bucket, free = 8.0, [], 8.0
    sizes = {"5": 4.8, "4": 4.0, "3": 4.0, "2": 4.0, "1": 4.0, "0": 5.2}
    for name, width in sizes.items():
        sketch.tensor(left, 0.6, width - 0.3, 2.4, f"layer {name}", color=0)
        left += width
        bucket.append(name)
        if len(bucket) == 2:
            start, length = max(left, free), 5.4
            sketch.arrow((left - 0.2, 3.1), (start + 0.3, 4.3))
            sketch.tensor(
                start, 4.4, length, 2.4, f"layers {bucket[0]}, {bucket[1]}", color=1
            )
            free, bucket = start + length, []
    return sketch.figure


course.show(
    overlap,
    "Figure 2. Buckets of two layers travel under the rest of the backward pass. "
    "Only the last one is waited for.",
)

# %% [markdown]
# That is what torch's DistributedDataParallel does for us. In real runs we ask for buckets of 25 MiB, so our job's 43
# MiB of gradients (45.1 MB) make two.
#
# ## 3. Prove it
# The claim is *exact within rounding*, and not for one gradient only, but for a run. So we train an epoch: 13 windows
# of eight rows, and one of the three that are left. Rank 0 gets two of those and rank 1 one. We go three ways: alone,
# with the package's `Replicated` (our fourth step in 30 lines) and with torch's DDP. torch's takes the *mean* over
# processes, so its loss is multiplied by $N$; under `no_sync` gradients stay at home.


# %%
def an_epoch(way, windows, p=0.0):
    """The loss of each window, the weights at the end, and the bytes that went into
    all-reduces."""
    rank, N = (0, 1) if way == "alone" else (dist.get_rank(), dist.get_world_size())
    model, history = new_model(p), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    replicas = ddp.Replicated(model.parameters()) if way == "package" else None
    called = DistributedDataParallel(model) if way == "torch" else model
    with CountCollectives() as sent:
        for window in windows:
            mine, total = window[rank::N], torch.zeros(())
            tokens = answers(mine)
            if N > 1:
                dist.all_reduce(tokens)
            for row in mine:
                last = row is mine[-1]
                if replicas:
                    replicas.last = last
                with (
                    called.no_sync()
                    if way == "torch" and not last
                    else contextlib.nullcontext()
                ):
                    loss = loss_sum(called, row) / tokens
                    (loss * N if way == "torch" else loss).backward()
                total += loss.detach()
            if replicas:
                replicas.wait()
            if N > 1:
                dist.all_reduce(total)
            history.append(total.item())
            optimizer.step()
            optimizer.zero_grad()
    return (
        history,
        nn.utils.parameters_to_vector(model.parameters()).detach(),
        sent.bytes["all_reduce"],
    )


windows = [rows[at : at + 8] for at in range(0, len(rows), 8)]
history, weights, _ = an_epoch("alone", windows)
print(f"alone    loss {history[0]:.4f} -> {history[-1]:.4f}")
for way in ("package", "torch"):
    its_history, its_weights, sent = ranks.run(an_epoch, way, windows)[0]
    off = max(
        abs(one / other - 1) for one, other in zip(its_history, history, strict=True)
    )
    print(
        f"{way:8} losses off by at most {off:.0e}, "
        f"weights at the end by {apart(its_weights, weights):.0e}"
    )
    assert off < 1e-5
    assert apart(its_weights, weights) < 1e-3

# %% [markdown]
# ## 4. What it costs
# **Bytes.** Once a step, the gradients: 4 bytes a trained weight. And two numbers of ours, the window's tokens (8
# bytes) and its loss (4). Predict the epoch's, then look at what was counted:

# %%
predicted = len(windows) * (4 * len(weights) + 8 + 4)
print(f"predicted {predicted:,} bytes, counted {sent:,}")
assert sent == predicted
(call,) = ddp.traffic(whole, shape, 2)
print(
    f"our job: {call.bytes / 1e6:.1f} MB a step; "
    f"of it each of two processes sends {call.sent / 1e6:.1f} MB"
)

# %% [markdown]
# Those go around a *ring* in $N$ parts: each process passes on $N - 1$ to be added up and $N - 1$ to be handed out,
# $2\,(N - 1) / N$ of them all, less than twice for any $N$ (Patarasuk and Yuan). So more cards do not make the
# all-reduce dear.
#
# **Waiting does.** An all-reduce ends when the last one has come. Rows have lengths, and a card whose four rows are
# short waits for the other. Guess the speed-up of two cards with our 107 rows in random order. We take a row's time to
# be its tokens.

# %% Your guess: times as fast on two cards tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def speed_up(
    cards,
    order,
    deal=lambda window, cards: [window[card::cards] for card in range(cards)],
):
    """Tokens of an epoch over those of the slowest card, window by window."""
    tokens = [LENGTHS[number][0] for number in order]
    slowest = (
        max(map(sum, deal(tokens[at : at + 8], cards)))
        for at in range(0, len(tokens), 8)
    )
    return sum(tokens) / sum(slowest)


orders = [random.Random(seed).sample(range(107), 107) for seed in range(100)]
mean = {
    cards: sum(speed_up(cards, order) for order in orders) / 100
    for cards in (1, 2, 4, 8)
}
by_wire = {cards: steps[1].seconds / steps[cards].seconds for cards in mean}
for cards in mean:
    print(
        f"T4s: {cards}; times as fast: {by_wire[cards]:.2f} with rows alike, "
        f"{mean[cards]:.2f} with ours"
    )
assert mean[2] < 1.85
course.reveal(guess, mean[2], "times")


# %% Draw figure 3 tags=["hide-input"]
def of_speed(theme: Theme):
    """Speed-up against cards."""
    drawn, axes = course.figure(height=2.9)
    axes.plot(
        list(mean),
        list(by_wire.values()),
        color=theme.series[0],
        marker="o",
        label="rows alike, over PCIe",
    )
    axes.plot(
        list(mean),
        list(mean.values()),
        color=theme.series[1],
        marker="s",
        label="our rows, wire for nothing",
    )
    axes.plot(
        [1, 8],
        [1, 1],
        color=theme.series[2],
        linestyle=(0, (4, 3)),
        label='device_map="auto"',
    )
    axes.set(xlabel="T4s", ylabel="times as fast as one", ylim=(0, 8.4))
    axes.set_xticks(list(mean))
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    of_speed,
    "Figure 3. By arithmetic: the wire costs next to nothing, "
    "while cards that wait for the longest row cost a third "
    "of eight.",
)

# %% [markdown]
# So Kaggle's second card brings 1.8, and not by the wire's fault. Exercise 2 gets most of the rest.
#
# ## 5. The production switch
# A recipe says what a *step* is: eight rows. How many processes share them is the launcher's business, and the strategy
# divides the window.

# %%
print("cria launch kwanzaa --on torchrun --nproc 2 --set parallel.strategy=ddp")
shared = with_settings(whole, ["parallel.strategy=ddp"])
print(diff(resolve(whole, T4), resolve(shared, T4, processes=2)))

# %% [markdown]
# Bare libraries multiply instead. Start a script of `transformers.Trainer` with two processes, and each takes the whole
# `gradient_accumulation_steps`: 16 rows a step, half as many steps, at the learning rate of eight. No line says so.
#
# Here is the real trainer, on a tiny Llama with random weights. Seven rows in windows of four: an odd epoch.

# %% Train in two processes tags=["hide-input"]
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
]
tiny += [
    "tricks.chunked_loss=true",
    "train.learning_rate=0.01",
    f"data.train={seven}",
    f"data.eval={seven}",
]


def train_it(settings, out):
    from cria_tricks.common.console import Aside
    from cria_tricks.run.run import train

    console = Aside()
    console.quiet = True
    report = train(with_settings(Recipe(), settings), out, console=console)
    return [entry["loss"] for entry in report["history"] if "loss" in entry] + [
        report["eval_loss_after"]
    ]


# %%
one = train_it(tiny, Path(folder.name) / "one")
two = ranks.run(train_it, [*tiny, "parallel.strategy=ddp"], Path(folder.name) / "two")[
    0
]
folder.cleanup()
for name, losses in (("one process", one), ("two", two)):
    print(f"{name:12}", *(f"{loss:.6f}" for loss in losses))
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(one, two, strict=True))

# %% [markdown]
# ## 6. Where it breaks
# **The losses differ a little, and nobody knows why.** 107 rows are not even, and trainers want equally many
# micro-batches in every process. accelerate's sampler, which `transformers.Trainer` takes, fills up with rows of the
# beginning (`even_batches`): 108. Ours fills up with a row in which nothing is trained.

# %%
batches = BatchSampler(SequentialSampler(range(107)), batch_size=1, drop_last=False)
theirs = [[row for (row,) in BatchSamplerShard(batches, 2, rank)] for rank in (0, 1)]
ours = [
    [row for (row,) in Share(SequentialSampler(range(107)), 1, rank, 2, filler=107)]
    for rank in (0, 1)
]
for name, (first, second) in {"accelerate": theirs, "ours": ours}.items():
    print(f"{name:10} rank 0 ends with rows {first[-2:]}, rank 1 with {second[-2:]}")
assert theirs[1][-1] == 0
assert sorted(ours[0] + ours[1]) == [*range(107), 107]  # 107 is the filler
evened, _, _ = an_epoch("alone", [*windows[:-1], [*windows[-1], rows[0]]])
print(f"loss of the last window {evened[-1]:.4f}, and it should be {history[-1]:.4f}")
assert abs(evened[-1] / history[-1] - 1) > 1e-3

# %% [markdown]
# **`cannot share the 8 micro-batches of a step evenly`.** Three processes and a window of eight. Cure: a window that
# divides.

# %%
try:
    resolve(shared, T4, processes=3)
    raise AssertionError("it must be refused")
except BadInput as refused:
    print(refused)

# %% [markdown]
# **The losses differ in the third digit, with dropout.** Each process rolls its own dice, so no run of one process has
# the same masks. That is not wrong, and it cannot be compared. Wrong is one seed for all, as in our toy: both ranks
# roll the same dice for other rows. Cure: compare at dropout 0, and train with a seed per process (our trainer adds
# the rank).

# %%
rolled = zip(
    an_epoch("alone", windows, 0.1)[0],
    ranks.run(an_epoch, "torch", windows, 0.1)[0][0],
    strict=True,
)
off = [second / first - 1 for first, second in rolled]
print("with dropout:", *(f"{share:+.1%}" for share in off))
assert max(map(abs, off)) > 1e-3

# %% [markdown]
# **A process dies, and the rest hang.** An all-reduce waits for everyone: with gloo 30 minutes if nobody says
# otherwise. When a connection breaks, each process that is left prints a page. Cure: less patience
# (`parallel.timeout`, 10 minutes here), one sentence from one process, and checkpoints: the same command with
# `--resume` goes on. Let us kill one.


# %%
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
ranks.close()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Full fine-tuning of the same model trains 1,235,814,400 numbers. Four cards share a step. How many
#    bytes does each card send in it, in fp32 and around a ring? Your answer is a number of bytes.
# 2. **Build.** Cards wait because rows are dealt in turn. Fill in `deal(window, cards)`: from a window's row lengths, a
#    list of `cards` lists with equally many rows each, the largest sum as small as you can (speed-up 1.93 with two
#    cards, 3.5 with four). No gradient changes: a sum has no order. (Four lines. Long rows first, each to the card that
#    has least so far and has room. In an uneven window no card gets more than the rounded-up share.)
# 3. **Reach.** How large should a bucket be? Fill in `seconds(layers, bucket_bytes, start, rate)`: the seconds from the
#    beginning of the backward pass until the last gradient has arrived. `layers` are (seconds, bytes), in the order of
#    the backward pass. A bucket leaves when it has `bucket_bytes` or more, or at the end. Buckets travel one after the
#    other, each takes `start` seconds and its bytes over `rate`. Then try 1 KiB, 25 MiB and 1 GiB on
#    `[(0.04, 2_818_048)] * 16`, start 0.0005, rate 8e9.

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
# # 7.4 GB, near a second a step over PCIe at half its rate
# bytes_sent = 2 * (4 - 1) / 4 * 4 * 1_235_814_400
#
#
# def deal(window, cards):
#     dealt = [[] for _ in range(cards)]
#     for row in sorted(window, reverse=True):
#         min(
#             (one for one in dealt if len(one) < -(-len(window) // cards)), key=sum
#         ).append(row)
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
# </details>
#
# ## In one breath
# - **Saves** seconds: each card takes $1 / N$ of a window. No byte: every card holds all.
# - **Costs** one all-reduce a step, 4 bytes a trained weight, of which each card sends $2\,(N - 1) / N$; and waiting
#   for the longest share.
# - **Exact within rounding**, if sums are divided by all processes' tokens, no row counts twice, and dropout is 0.
# - **When**: the run fits one card, and you have another. Before anything else that needs two.
# - **When not**: it does not fit one card ([sharding](sharding.py)), or windows are too small to share.
# - **On two cards**: the notebook `notebooks/two_cards.ipynb` measures this lesson and the next on Kaggle's two T4s.
#
# ## Sources
# - Li et al. 2020, *PyTorch Distributed*, arXiv 2006.15704, section 3.2 (buckets, overlap, no_sync).
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms*, section 3.
# - accelerate 1.15: `BatchSamplerShard` in `accelerate/data_loader.py`. transformers 5.23: `training_args.py`,
#   `train_batch_size` is per device. torch 2.13: `torch/nn/parallel/distributed.py`; 30 minutes of patience with gloo:
#   `default_pg_timeout`.
# - NVIDIA's T4 datasheet, for the rates. Kaggle's two T4s: public notes of November 2025; we have not measured there.
# - Ours: `cria_tricks/parallel/ddp.py`, `cria_tricks/trainer/shares.py`, `tests/parallel/test_ddp.py`.
