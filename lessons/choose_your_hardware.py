# ---
# jupyter:
#   question: Does a job fit a card, how long does it take there, and what does it cost?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Choose your hardware: does it fit, how long, how much
# > **Promise.** A hardware guide tells you to take 20 GB for each billion parameters, and a larger card for a larger
# > model. Of its ten rules of thumb two hold, one of them only by our own estimate. You will compute fit, minutes and
# > price yourself, from counted operations and bytes, with a range that says when two cards cannot be told apart.
# >
# > **Card.** saves money and failed attempts / costs some arithmetic / bytes as exact as [the bill](the_bill.py),
# > seconds approximate: a range, checked with eleven public runs / about 25 minutes / after [a full
# > card](a_full_card.py)
#
# The job is QLoRA of Llama-3.2-1B on 107 rows, three times each, with 2,048 tokens in a row. With all memory switches
# of the course it needs 2.0 of the 14.74 GiB of a T4, what PyTorch's allocator may reserve included. The ten rules
# (section 5) are from an unpublished *Hardware Selection Guide* of this project.

# %% Imports and settings tags=["hide-input"]
import contextlib
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from cria_tricks import BadInput, Recipe, Tricks, course, recipes
from cria_tricks.course import (
    FLAVORS,
    T4,
    Theme,
    Traffic,
    Train,
    compare,
    flops,
    losses,
    models,
    per_process,
    resolve,
    row_lengths,
    run_tokens,
    table,
    with_settings,
)
from cria_tricks.course import ends_of_range as ends
from cria_tricks.course import load_base as load
from cria_tricks.course import memory_bill as estimate
from cria_tricks.course import step_work as work
from cria_tricks.course import time_bill as step
from cria_tricks.course import work_of_step as counts

GB, GIB = 10**9, 2**30


def cria(command):
    """Run a `cria` command as the terminal would; print the line with its verdict, and
    return its exit code."""
    words = [sys.executable, "-m", "cria_tricks", *command.split()[1:]]
    done = subprocess.run(
        words,
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"COLUMNS": "120"},
    )
    print(f"$ {command}")
    print(
        *(
            line
            for line in done.stdout.splitlines()
            if "fit" in line and "needs" in line
        )
    )
    return done.returncode


# %% [markdown]
# ## 1. The bill
# The guide has two rules for memory: 20 GB for each billion parameters, and 4 GB with LoRA. Llama-3.2-1B has 1.24
# billion, so with LoRA the rule gives 4.9 GB. How many GB does [the bill](the_bill.py) give for LoRA with rows of 8,192
# tokens?

# %% Your guess: GB of LoRA at 8,192 tokens tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Helper: the bytes that a method needs tags=["hide-input"]
from cria_tricks.course import CARDS, find_shape

METHODS = ("full", "lora", "qlora")


def recipe_for(method, device):
    """Eight rows of 2,048 tokens in a step, one at a time, with checkpointing. QLoRA
    also has every switch of the course that saves memory."""
    tricks = Tricks(
        gradient_accumulation=8,
        gradient_checkpointing=True,
        precision=device.half_precision,
        attention="sdpa",
        expand_kv=device.needs_expand_kv,
    )
    if method != "full":
        tricks = tricks.model_copy(update={"peft": "lora"})
    if method == "qlora":
        saving = {
            "quantization": "nf4",
            "double_quantization": True,
            "lean_preparation": True,
            "chunked_loss": True,
            "optimizer": "adamw_8bit",
            "paged_optimizer": True,
        }
        tricks = tricks.model_copy(update=saving)
    return Recipe(name=method, tricks=tricks, train=Train(batch_size=1))


def needed(model, method, card, tokens=2048):
    """Bytes that a card must have at least: the bill, with CUDA's own."""
    recipe = with_settings(
        recipe_for(method, card.device), [f"data.max_length={tokens}"]
    )
    return estimate(recipe, find_shape(model), card.device).least_bytes


A100 = CARDS["a100"]

# %%
print("GB at least, by the rules, and by the bill for rows of so many tokens")
print(
    f"{'':15}{'full: rule':>12}{'2,048':>8}{'LoRA: rule':>14}{'512':>8}"
    f"{'2,048':>8}{'8,192':>8}{'QLoRA 2,048':>13}"
)
for model in (
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "qwen2.5-7b",
    "llama-2-13b",
):
    billions = find_shape(model).weights / 1e9
    ours = [needed(model, "lora", A100, tokens) / GB for tokens in (512, 2048, 8192)]
    full, qlora = (needed(model, method, A100) / GB for method in ("full", "qlora"))
    lora = "".join(f"{size:8.1f}" for size in ours)
    print(
        f"{model:15}{20 * billions:12.1f}{full:8.1f}{4 * billions:14.1f}"
        f"{lora}{qlora:13.1f}"
    )
print("full, LoRA: 16-bit products, checkpointing, plain loss; QLoRA: all switches")
course.reveal(guess, needed("llama-3.2-1b", "lora", A100, 8192) / GB, "GB")
for card, name in zip(CARDS.values(), (16, 24, 24, 40, 80), strict=True):
    has, recipe = card.device.memory_bytes, recipes.capstone(card.device)
    job = estimate(recipe, find_shape(recipe.model), card.device).needed_bytes
    print(
        f"{card.device.name:24}{name} GB by name, "
        f"{has / GB:.2f} to use = {has / GIB:.2f} GiB; ours {job / GIB:.2f}"
    )
    assert job < has < name * GIB
    assert 0.91 < has / (name * GIB) < 0.99

# %% [markdown]
# From a billion parameters on, the bill for full fine-tuning is 0.81 to 0.98 of the rule. A weight, its gradient and
# the two states of AdamW take 16 bytes, which is nearly all of a large model's bill. Activations and logits are much
# only in a small model.
#
# The rule for LoRA is wrong, because it knows neither rows nor vocabulary. A frozen 16-bit weight is 2 of its 4 bytes.
# The other 2 stand for activations and logits, which do not grow in step with the weights.
#
# The last lines are the memory of five cards. The GB of their names are GiB (1.07 GB), and 1 to 9 % of these cannot be
# used.
#
# ## 2. From scratch, in three steps
# **Step 1: count a matrix multiplication.** $n$ tokens times a matrix of shape $(D_{in}, D_{out})$ take $2 n D_{in}
# D_{out}$ operations, a multiplication and an addition each. In 16 bits, $2 (n D_{in} + D_{in} D_{out} + n D_{out})$
# bytes go in and out. The more tokens there are, the more operations come with each byte.


# %%
from cria_tricks.course import CARDS, find_shape


def matmul(n, d_in, d_out):
    """Operations and bytes of n tokens times a 16-bit matrix."""
    return 2 * n * d_in * d_out, 2 * (n * d_in + d_in * d_out + n * d_out)


for n in (16, 2048):
    operations, moved = matmul(n, 2048, 8192)
    print(f"{n:5,} tokens: {operations / moved:4.0f} operations for each byte")


# %% Draw figure 1 tags=["hide-input"]
def product(theme: Theme):
    """One product, with many tokens and with few, to scale."""
    sketch = course.Sketch(theme, 41, 12)
    for left, n in ((0.2, 2048), (21.2, 16)):
        tall, x, w, y = n / 760, 2 * n * 2048, 2 * 2048 * 8192, 2 * n * 8192
        sketch.tensor(left + 4.8, 1.8, 10.8, 2.7, "W (2,048, 8,192)", color=1)
        sketch.tensor(left, 5.6, 2.7, tall, "x" if n > 1000 else "", color=0)
        sketch.tensor(
            left + 4.8,
            5.6,
            10.8,
            tall,
            f"y ({n:,}, 8,192)" if n > 1000 else "",
            color=2,
        )
        sketch.arrow((left + 3, 5.6 + tall / 2), (left + 4.5, 5.6 + tall / 2))
        sketch.arrow((left + 10.2, 4.6), (left + 10.2, 5.5))
        sizes = f"x {x / 2**20:.3g}, W {w / 2**20:.0f}, y {y / 2**20:.3g} MiB"
        many = f"{2 * n * 2048 * 8192 / (x + w + y):,.0f} operations for each byte"
        for down, words in ((0.7, f"{n:,} tokens"), (9.6, sizes), (11, many)):
            sketch.text(left, down, words, align="left")
    return sketch.figure


course.show(
    product,
    "Figure 1. One product in 16 bits: "
    "with few tokens nearly all bytes are the matrix's.",
)

# %% [markdown]
# **Step 2: write a step as parts**, each with its operations and its bytes. $L$ blocks have $W$ weights each, in
# matrices whose widths add up to $S$, in and out. $D$ is the width of the model, $Q$ and $K$ the widths of queries and
# keys, $V$ the vocabulary, $r$ the rank of the adapters, and $k$ the micro-batches of a step. The blocks are frozen and
# checkpointed, so each matrix is used three times: forward, forward again, and backward to its input.
#
# Norms, activations, sums and casts multiply no matrices, but each of them reads whole tensors and writes them back.
# `between` adds up these bytes, for a token and a block in all three passes. Its constants are bytes for one number,
# counted operation by operation (deeper part).

# %%
import math


def between(shape):
    """Bytes for a token and a block, outside the multiplications."""
    pairs = shape.linears.values()  # widths in and out of each matrix
    inputs, outputs = (sum(widths) for widths in zip(*pairs, strict=True))
    heads = shape.query_width + shape.kv_width
    # norms and residual sums; activation; rotary positions; sums around the adapters
    once = 84 * shape.width + 10 * shape.inner + 21 * heads + 10 * outputs
    back = 206 * shape.width + 18 * shape.inner + 34 * heads
    return 2 * once + back + 6 * inputs + 4 * outputs  # twice forward, and backward


def parts(shape, r=16, k=8, T=2048, fp16=True):
    """(operations, bytes) of each part of a QLoRA step of k rows of T tokens."""
    L, D, V = shape.layers, shape.width, shape.vocabulary
    Q, K = shape.query_width, shape.kv_width
    W = sum(d_in * d_out for d_in, d_out in shape.linears.values())
    S = sum(d_in + d_out for d_in, d_out in shape.linears.values())
    # bytes of a weight: 4 bits, and a scale of 1 byte (plus 4 for 256) for 64 weights
    packed, unpacked = 0.5 + (1 + 4 / 256) / 64, 2
    frozen = 2 * T * L * W, L * (2 * T * S + unpacked * W)
    chunks = math.ceil(T / 256)  # of the loss
    micro_batch = {
        "unpacking": (0, 3 * L * (packed + unpacked) * W),
        "blocks forward": frozen,
        "blocks again": frozen,
        "blocks backward": frozen,
        # A and B: 2 r S forward, 2 again, 4 backward (input, weight); 7 matrices with
        # 8 tensors of r each; the very last multiplication is not repeated
        "adapter": (T * L * r * (8 * S - 2 * D), 2 * T * L * (4 * S + 55 * r - D)),
        # 2 + 2 + 5 matrix multiplications, and half of each is masked as future;
        # q, k, v, result: once forward and again, and with gradients backward
        "attention": (9 * L * T * Q * T, 16 * T * L * (Q + K)),
        "between": (0, T * L * between(shape)),
        "head": (4 * T * D * V, T * 4 * (D + V) + 4 * chunks * D * V),  # and backward
        "loss": (0, T * 52 * V),  # 52 bytes a logit, counted like those of `between`
    }
    # bytes of a trained weight: 8-bit AdamW; clipping; unscaling; gradients added up
    states = 16 + 12 + 8 * fp16 + 12 * (k - 1)
    found = {"optimizer": (0, L * r * S * states)}
    for name, (operations, moved) in micro_batch.items():
        found[name] = k * operations, k * moved
    return found


# %% [markdown]
# **Step 3: put a roof over it.** A part cannot be faster than its operations at the peak rate of the card, and not
# faster than its bytes at the peak rate of its memory. So it takes the longer of both times. This model is the
# *roofline*. No step reaches these peaks, so we divide by the share of them that public runs reached on this card
# (section 4). The host starts a step's kernels one after the other, so a step takes at least as long as all starts.
# Several cards divide the rows among them, and add up their gradients over PCIe.


# %%
def seconds(shape, found, card, starts=0, r=16, cards=1):
    """Seconds of a step, of its parts."""
    total = 0
    for operations, moved in found.values():
        total += max(operations / card.half_flops, moved / card.memory_rate)
    trained = shape.layers * r * sum(map(sum, shape.linears.values()))
    sent = 2 * (cards - 1) / cards * 4 * trained  # fp32 gradients, by all-reduce
    # the shares of its peaks that a card reaches, for a T4 0.283
    busy = total / card.reached.half + sent / (card.link_rate * card.reached.link)
    # a kernel start takes 17 microseconds
    return max(busy, starts * card.reached.launch)


llama = find_shape("llama-3.2-1b")
for name in ("t4", "a100"):
    step_parts = parts(llama, fp16=name == "t4")
    print(f"{name:5}{seconds(llama, step_parts, CARDS[name]):5.1f} s a step")

# %% Helper: the parts of a recipe, and offers of machines tags=["hide-input"]
import torch

torch.manual_seed(0)


def parts_of(recipe, shape, T=2048):
    found = parts(
        shape,
        recipe.lora.r,
        recipe.tricks.gradient_accumulation,
        T,
        recipe.tricks.precision == "fp16",
    )
    found["between products"] = found.pop("between")  # as the package calls it
    return found


def seconds_of(recipe, shape, card, cards=1):
    starts = sum(part.launches for part in counts(work(recipe, shape, card.device)))
    return seconds(shape, parts_of(recipe, shape), card, starts, recipe.lora.r, cards)


# The guide's table: the lowest and the highest price of an hour [USD]
GUIDE = {
    "t4-small": (0.5, 1),
    "t4-medium": (1, 2),
    "l4x1": (2, 3),
    "l4x4": (8, 12),
    "a10g-small": (3, 4),
    "a10g-large": (4, 6),
    "a10g-largex2": (8, 12),
    "a10g-largex4": (16, 24),
    "a100-large": (8, 12),
}


class Offer(NamedTuple):
    flavor: str
    fits: bool
    minutes: float
    cost: float
    low: float
    high: float


def offers(model, tokens):
    """What each rented machine would take for so many tokens of QLoRA: fit, minutes,
    USD today and by the guide."""
    found, shape = [], find_shape(model)
    for flavor in FLAVORS.values():
        card = CARDS[flavor.card]
        recipe = recipe_for("qlora", card.device)
        hours = (
            tokens
            / (8 * 2048 * flavor.cards)
            * seconds_of(recipe, shape, card, flavor.cards)
            / 3600
        )
        fits = needed(model, "qlora", card) <= card.device.memory_bytes
        prices = (hours * price for price in (flavor.price, *GUIDE[flavor.name]))
        found.append(Offer(flavor.name, fits, 60 * hours, *prices))
    return found


def best(found, by):
    """The machine that is least by something, of those that fit."""
    return min(
        (offer for offer in found if offer.fits),
        key=by,
        default=Offer(None, False, 0, 0, 0, 0),
    ).flavor


# %% [markdown] tags=["deep"]
# ### Deeper: where the bytes between the matrix multiplications come from
# Take an RMS norm of 16-bit numbers, and count the bytes for each number by hand: to fp32 (2 read, 4 written), square
# (4, 4), mean (4), divide (4, 4), back (4, 2), times its weight (2, 2). Together this is 36 bytes. The two norms of a
# block take 72 of the 84 bytes that `between` takes for each number of the hidden states. The two residual sums take
# the other 12. `bill/moved_bytes.py` holds such counts for everything, and a test counts them again in transformers
# 5.23 (`tests/hardware/test_cost.py`).


# %% tags=["deep"]
def norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


x, weight = torch.randn(64, 2048).bfloat16(), torch.ones(2048).bfloat16()
with Traffic() as moved:
    norm(x, weight)
# a little more: one root for each token, the weight
print(f"{moved.others / x.numel():.2f} bytes a number")
assert 36 <= moved.others / x.numel() < 36.3

# %% [markdown]
# ## 3. Prove it
# First we compare with the package, for four models and five cards: operations, bytes, seconds, prices, and the choice
# of a machine. This only shows that both have the same formulas. Then a two-layer Llama with LoRA, checkpointing and
# the chunked loss runs forward and backward on this machine, while torch counts the operations of its matrix
# multiplications. Ours must be the same number. (The seconds are not proved.)

# %% Compare with the package tags=["hide-input"]
for model in ("random:tiny", "llama-3.2-1b", "qwen2.5-7b", "llama-3.1-70b"):
    shape = find_shape(model)
    for card in CARDS.values():
        recipe = recipes.capstone(card.device)
        theirs = step(recipe, shape, card)
        assert {part.name: (part.flops, part.bytes) for part in theirs.parts[:-1]} == {
            name: (work, round(moved))
            for name, (work, moved) in parts_of(recipe, shape).items()
        }
        assert abs(seconds_of(recipe, shape, card) / theirs.seconds - 1) < 1e-9
    # `cria plan kwanzaa --gpu all` with the same switches, on rented machines
    switches = ["tricks.gradient_checkpointing=true", "tricks.chunked_loss=true"]
    full_rows = {"rows": 107, "rows_full": True}
    found = compare("kwanzaa", model=model, settings=switches, as_is=True, **full_rows)
    plans = {plan.machine: plan for plan in found if plan.price}
    mine = offers(model, 107 * 3 * 2048)
    for offer in mine:
        plan = plans[offer.flavor]
        assert plan.fits == offer.fits
        if offer.fits:
            minutes, cost = (
                math.prod(both) ** 0.5 for both in (plan.minutes, plan.cost)
            )
            # several cards share the eight rows there; here each of them has eight
            near = 1e-9 if FLAVORS[offer.flavor].cards == 1 else 0.01
            assert abs(minutes / offer.minutes - 1) < near
            assert abs(cost / offer.cost - 1) < near
    cheapest = best(mine, lambda offer: offer.cost)
    fastest = best(mine, lambda offer: offer.minutes)
    print(f"{model:15} QLoRA, cheapest {cheapest}, fastest {fastest}")


# %% Compare with the operations of a real step tags=["hide-input"]
switches = ("peft=lora", "gradient_checkpointing=true", "chunked_loss=true")
recipe = with_settings(
    Recipe(), ["model=random:tiny", *(f"tricks.{switch}" for switch in switches)]
)
plan, T, shape = resolve(recipe), 64, find_shape("tiny")
model = load(plan, models.find(recipe.model)).model.train()
model.config.use_cache = False
model.gradient_checkpointing_enable({"use_reentrant": False})
ids = torch.randint(3, 500, (1, T), device=model.device)
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
loss_sum = losses.find(plan, contextlib.nullcontext)
counted = flops(lambda: loss_sum(model, batch).backward())

by_hand = {name: work for name, (work, _) in parts_of(recipe, shape, T).items()}
# Attention is eager here, with all T x T scores: 8 whole multiplications, and not 9
# halves. And T tokens have T - 1 next ones.
eager = 8 * 2 * shape.layers * T * shape.query_width * T
predicted = (
    sum(by_hand.values())
    - by_hand["attention"]
    + eager
    - 4 * shape.width * shape.vocabulary
)
print(f"predicted {predicted:,} operations, counted {counted:,}")
assert counted == predicted


# %% Draw figure 2 tags=["hide-input"]
def roofs(theme: Theme):
    """What each card can do at best, and where the parts of our step lie under a T4's
    roof."""
    drawn, axes = course.figure(height=3.6)
    grid = [10 ** (n / 20) for n in range(0, 71)]
    # the A100 with 80 GB: the same top
    for (name, card), colour in zip(CARDS.items(), theme.series, strict=False):
        axes.plot(
            grid,
            [min(card.half_flops, card.memory_rate * i) / 1e12 for i in grid],
            color=colour,
            label=name.upper(),
        )
    job = parts_of(recipes.capstone(T4), find_shape("llama-3.2-1b"))
    shown = {
        "blocks forward": ("blocks", "o"),
        "attention": ("attention", "^"),
        "head": ("head", "s"),
        "adapter": ("adapter", "D"),
    }
    for part, (says, marker) in shown.items():
        work, moved = job[part]
        reached = (
            min(CARDS["t4"].half_flops, CARDS["t4"].memory_rate * work / moved) / 1e12
        )
        axes.scatter(
            work / moved,
            reached,
            color=theme.series[0],
            edgecolor=theme.page,
            marker=marker,
            s=46,
            zorder=3,
            label=says,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations for each byte",
        ylabel="$10^{12}$ operations a second",
    )
    axes.grid()
    axes.legend(loc="lower right", ncols=2)
    return drawn


course.show(
    roofs,
    "Figure 2. Four roofs (lines) from data sheets, and the parts of our step (marks) "
    "under the T4's. "
    "The adapter is on the slope, where bytes decide. What lies between the matrix "
    "multiplications has no such operations and is not in the figure.",
)

# %% [markdown]
# ## 4. What it costs
# An L4 does $121\cdot10^{12}$ operations a second, and a T4 $65\cdot10^{12}$. But the L4's memory reads only 300 GB/s,
# and the T4's 320. How many times as fast is our step on the L4, by the middles of both ranges? (A range goes by the
# same factor up and down from its middle.)

# %% Your guess: how many times as fast our step is on an L4 tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Estimate a step's seconds on each card tags=["hide-input"]
groups = {
    "blocks' products, attention": (
        "blocks forward",
        "blocks again",
        "blocks backward",
        "attention",
    ),
    "adapter": ("adapter",),
    "head": ("head",),
    "no products": ("unpacking", "between products", "loss", "optimizer"),
}
spent, lines = {}, []
for name, card in CARDS.items():
    job = parts_of(recipes.capstone(card.device), find_shape("llama-3.2-1b"))
    share = card.reached.half
    roof = {
        part: max(ops / card.half_flops, moved / card.memory_rate) / share
        for part, (ops, moved) in job.items()
    }
    spent[name] = {
        group: sum(roof[part] for part in members) for group, members in groups.items()
    }
    low, high = ends(sum(roof.values()), card.reached.spread)
    times = (f"{s:.1f}" for s in (sum(roof.values()), *spent[name].values()))
    lines.append([name, f"{low:.1f} to {high:.1f}", *times])
course.show_table(table(("seconds", "range", "a step", *groups), lines))
idle = {name: one["no products"] / sum(one.values()) for name, one in spent.items()}
print(
    "share of the step without products:",
    ", ".join(f"{name} {share:.0%}" for name, share in idle.items()),
)
course.reveal(guess, sum(spent["t4"].values()) / sum(spent["l4"].values()), "times")

# %% [markdown]
# It is about 1.6 times as fast by the middles, but the two ranges overlap, so the estimate does not say which card is
# faster. About half of either step multiplies nothing, if both kinds of parts reach the same share, which public runs
# do not tell.
#
# **How good is the share that we divide by?**

# %% Compare with two public runs tags=["hide-input"]
usual = "tricks.expand_kv=false tricks.lean_preparation=false train.batch_size=4"
of_a100 = (
    "tricks.quantization=none tricks.double_quantization=false "
    "tricks.chunked_loss=false lora.r=8"
)
of_a100 += (
    " tricks.attention=flash_attention_2 lora.target_modules=q_proj,v_proj "
    "tricks.gradient_accumulation=2"
)
for model, name, tokens, measured, words in (
    ("llama-3.2-1b", "t4", 403, 1060, "tricks.gradient_accumulation=4"),
    ("llama-2-7b", "a100", 1024, 2954, of_a100),
):
    recipe = with_settings(
        recipes.capstone(CARDS[name].device), f"{usual} {words}".split()
    )
    reckoned, share = (
        step(recipe, find_shape(model), CARDS[name], tokens),
        CARDS[name].reached.half,
    )
    took = reckoned.tokens / measured
    print(
        f"{model} on {name}: {reckoned.low:.1f} to {reckoned.high:.1f} s a step, "
        f"measured {took:.1f}"
    )
    reached = share * reckoned.seconds / took
    print(f"    it reached {reached:.2f} of its peaks, and we divide by {share}")
    assert reckoned.low < took < reckoned.high

# %% [markdown]
# Six such runs on a T4 reached 0.24 to 0.32 of its peaks, and five on an A100 reached 0.46 to 0.56. So each card has
# its own share, the mean of its runs, and a range whose high end is 1.5 times its low end. Each of the eleven also
# falls into the range that the *other* runs on its card give. We found no run on an L4 or an A10G, so we assume a share
# between the two, with a range of a factor of 2.8. (In its second sitting, 12 of 21 steps of an H200 were inside,
# and nine slower.)

# %% [markdown] tags=["deep"]
# ### Deeper: the slope of a roof, on this machine
# A T4 is held to 70 watts, which may explain its lower share. (On one
# [H200](../docs/benchmarks.md#a-first-sitting-on-an-h200), all six measured steps were inside their range. Held to the
# rules of a T4, only two of 22 were, and half took less than 0.63 of the middle, so they were faster. Then we mended
# the calibration, and 12 of 21 were inside. The nine others took up to 1.37 times the upper end, and eight of them have
# 4-bit weights, as our job has.) Your own machine can be measured with `cria doctor --calibrate`. You can see the slope
# of the roof on any machine. Here is this one, with a matrix of 2,048 x 2,048 in fp32: with 256 tokens it does several
# times as many operations a second as with 1.

# %% tags=["deep"]
W = torch.randn(2048, 2048)
for n in (1, 16, 256):
    x = torch.randn(n, 2048)
    torch.mm(x, W)  # warms up
    start = time.perf_counter()
    for _ in range(5):
        torch.mm(x, W)
    spent_here = (time.perf_counter() - start) / 5
    print(
        f"{n:4} tokens: {2 * n * W.numel() / spent_here / 1e9:8.1f} billion "
        "operations a second"
    )

# %% [markdown]
# ## 5. The production switch
# In plain PyTorch, ask the card for its real memory and for its real bf16 units:
#
# ```python
# torch.cuda.get_device_properties(0).total_memory
# torch.cuda.is_bf16_supported(including_emulation=False)
# ```
#
# One command compares all machines; with `--gpu t4` it shows the whole bill of one:
#
# ```bash
# cria plan kwanzaa --gpu all --rows 107 --rows-full \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# ```
#
# Our 107 rows, three times and taken as full, are 657,408 tokens. (With their real lengths a T4 takes 6 to 9 minutes,
# not 8 to 12.) Prices are those of Hugging Face Jobs of 2026-08-21, and those of the guide.

# %%
tokens = run_tokens(recipes.capstone(T4), 107, 2048)
ours = offers("llama-3.2-1b", tokens)
today = {offer.flavor: offer.cost for offer in ours}
span, lines = {}, []
for name, _, minutes, now, low, high in ours:
    spread = CARDS[FLAVORS[name].card].reached.spread
    (first, last), span[name] = ends(minutes, spread), ends(now, spread)
    hourly = f"{FLAVORS[name].price:.2f}"
    timed = f"{minutes:.1f}", f"{first:.1f} to {last:.1f}"
    costs = (f"{a:.2f} to {b:.2f}" for a, b in (span[name], (low, high)))
    lines.append([name, hourly, *timed, *costs])
titles = ("machine", "USD an hour", "minutes", "range", "USD", "USD by the guide")
course.show_table(table(titles, lines))
assert span["a100-large"][1] < span["t4-small"][0] < span["l4x1"][1], (
    "the A100 is cheaper; T4 or L4 is not known"
)
assert tokens == 657_408
t4_time, a100_time = (
    offer.minutes for offer in ours if offer.flavor in ("t4-small", "a100-large")
)
assert f"{0.4 * (10 + t4_time) / 60:.2f}" == "0.13"
assert f"{2.5 * (10 + a100_time) / 60:.2f}" == "0.46"
# with 10 minutes of loading on both, the bills are equal at so many minutes on a T4
equal = (2.5 - 0.4) * 10 / (0.4 - 2.5 * a100_time / t4_time)
assert 125 < equal < 140
# the same with the ends of both ranges
share, half = a100_time / t4_time, CARDS["t4"].reached.spread ** 0.5
ends_of_equal = [
    (2.5 - 0.4) * 10 / (0.4 * up - 2.5 * share / up) / 60 for up in (half, 1 / half)
]
assert [f"{hours:.1f}" for hours in ends_of_equal] == ["1.2", "11.5"]


# %% Draw figure 3 tags=["hide-input"]
def priced(theme: Theme):
    """Price of the run on each machine, by the guide's range and by today's price, with
    its minutes."""
    drawn, axes = course.figure(height=3.3)
    for place, offer in enumerate(ours):
        axes.plot(
            (offer.low, offer.high),
            (place, place),
            color=theme.series[0],
            linewidth=5,
            solid_capstyle="butt",
        )
        axes.scatter(today[offer.flavor], place, color=theme.series[1], zorder=3)
        axes.plot(
            span[offer.flavor],
            (place, place),
            color=theme.series[1],
            linewidth=2,
            zorder=3,
        )
        axes.text(
            max(offer.high, span[offer.flavor][1]) + 0.012,
            place,
            f"{offer.minutes:.1f} min",
            va="center",
            color=theme.ink,
            bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 0.6},
        )
    axes.plot([], [], color=theme.series[0], linewidth=5, label="the guide's prices")
    listed = {"linewidth": 2, "marker": "o", "label": "the hub's list, with its range"}
    axes.plot([], [], color=theme.series[1], **listed)
    axes.set_yticks(range(len(ours)), [offer.flavor for offer in ours])
    axes.set(
        xlabel="USD for the training of our job",
        xlim=(0, 0.6),
        ylim=(len(ours) - 0.4, -0.6),
    )
    axes.grid(axis="x")
    axes.legend(loc="upper right")
    return drawn


course.show(
    priced,
    "Figure 3. The same run on nine machines: minutes, and cents everywhere. Loading "
    "and downloads come on top. The list's a100-large has 80 GB, and the guide's 40.",
)

# %% [markdown]
# An hour of A100 costs six times as much as an hour of T4, but the training on it costs less: its range, \$0.03 to
# \$0.05, ends below the T4's, \$0.06 to \$0.08. However, loading is billed, too. With ten minutes of it on both, the
# T4 costs \$0.13 and the A100 \$0.46. By the middles, the A100 is cheaper for a run of more than about two hours on a
# T4; between 1.2 and 11.5 hours, the ranges overlap.
#
# **The guide, rule by rule.** We take eight rows of 2,048 tokens in a step, and say that a rule holds if it is within a
# fifth of ours. Rules 1 and 2: the bill divided by the rule, for 0.5B, 1B, 7B and 13B. Rule 7: our hours, and the
# guide's in brackets, for LoRA of 0.5B (1,000 rows), 1.5B, 7B, 8B and 13B (10,000 rows).


# %% Recompute the guide's rules tags=["hide-input"]
def run(model, method, flavor, rows=1000, more=()):
    """Minutes of so many rows by the package, and USD for them by the guide."""
    machine = FLAVORS[flavor]
    card = CARDS[machine.card]
    recipe = with_settings(recipe_for(method, card.device), more)
    timed = step(recipe, find_shape(model), card, cards=machine.cards)
    steps = rows * recipe.data.max_length / (timed.tokens * machine.cards)
    hours = steps * timed.seconds / 3600
    low, high = GUIDE[flavor]
    return SimpleNamespace(minutes=60 * hours, low=hours * low, high=hours * high)


def gb(model, method, card="a100"):
    return needed(model, method, CARDS[card]) / GB


real = sum(many for many, _ in row_lengths("train")) / (107 * 2048)
assert [round(real * end) for end in ends(t4_time, CARDS["t4"].reached.spread)] == [
    6,
    9,
]
l4, copied = CARDS["l4"].device, find_shape("llama-2-13b")
sharded = per_process(recipe_for("lora", l4), copied, l4, "fsdp", 4)
assert sharded.fits
sizes = {
    model: find_shape(model).weights / 1e9
    for model in ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b", "llama-2-13b")
}
full, lora = (
    [gb(m, way) / (rule * n) for m, n in sizes.items()]
    for way, rule in (("full", 20), ("lora", 4))
)
on_one = (
    run("llama-3.2-1b", "full", "a100-large").minutes
    / run("llama-3.2-1b", "lora", "a100-large").minutes
)
cheaper = [
    getattr(run("llama-3.2-1b", "full", "a100-large"), p)
    / getattr(run("llama-3.2-1b", "lora", "t4-small"), p)
    for p in ("low", "high")
]
hours = [
    (
        *ends(
            run(model, "lora", flavor, rows).minutes / 60,
            CARDS[FLAVORS[flavor].card].reached.spread,
        ),
        low,
        high,
    )
    for model, flavor, rows, low, high in (
        ("qwen2.5-0.5b", "t4-small", 1_000, 1, 2),
        ("qwen2.5-1.5b", "t4-medium", 10_000, 2, 4),
        ("qwen2.5-7b", "a10g-small", 10_000, 4, 8),
        ("llama-3.1-8b", "a10g-large", 10_000, 6, 12),
        ("llama-2-13b", "a100-large", 10_000, 8, 24),
    )
]
speed_up = [
    run(m, way, "l4x1").minutes / run(m, way, "l4x4").minutes
    for m, way in (("llama-3.2-1b", "qlora"), ("qwen2.5-0.5b", "full"))
]
five, fifty = (
    run("qwen2.5-0.5b", "lora", "t4-small", 2 * 500),
    run("qwen2.5-7b", "lora", "a10g-small", 3 * 5000),
)
verdicts = (
    (
        "full fine-tuning, 20 GB a billion",
        "times " + ", ".join(f"{x:.2f}" for x in full),
        "holds from 1B on, with 32-bit AdamW",
    ),
    ("LoRA, 4 GB a billion", "times " + ", ".join(f"{x:.2f}" for x in lora), "no"),
    (
        "7B by LoRA fits an A10G",
        f"{gb('qwen2.5-7b', 'lora', 'a10g'):.1f} GB of 23.7",
        "no: right by luck",
    ),
    (
        "four L4 are 96 GB",
        f"13B by LoRA: {gb('llama-2-13b', 'lora', 'l4'):.0f} GB a copy, of 23.6; "
        f"sharded {sharded.least_bytes / GB:.0f}",
        "only if sharded",
    ),
    (
        "-medium, -large for larger models",
        "the same card in a larger machine, up to twice the price",
        "no, for the card",
    ),
    (
        "LoRA is 4-5 times cheaper",
        f"{on_one:.1f} times; on a cheaper card {cheaper[1]:.1f} to {cheaper[0]:.1f}",
        "no",
    ),
    (
        "hours by size",
        ", ".join(f"{h:.2g}-{i:.2g} ({a}-{b})" for h, i, a, b in hours),
        "no",
    ),
    (
        "several cards: linear",
        "4 L4: " + ", ".join(f"{x:.2f} times" for x in speed_up),
        "holds, by estimate",
    ),
    (
        "70B by LoRA on a100-large",
        "; ".join(
            f"{way} {gb('llama-3.1-70b', way, 'a100-80'):.0f} GB"
            for way in ("lora", "qlora")
        )
        + " of 85",
        "no; QLoRA fits",
    ),
    (
        "budgets",
        f"USD 5: {five.low:.2f} to {five.high:.2f}; "
        f"USD 20-50: {fifty.low:.0f} to {fifty.high:.0f} at least",
        "no",
    ),
)
numbered = [[str(n), *verdict] for n, verdict in enumerate(verdicts, 1)]
course.show_table(table(("no.", "rule", "by our count", "does it hold?"), numbered))
assert full[0] > 1.25 > 1.05 > max(full[1:])
assert max(lora) / min(lora) > 4
assert hours[0][1] < hours[0][2], (
    "the first is sooner done than the guide says, at the end of its range"
)
assert hours[1][0] > hours[1][3], "and the second takes longer"
large = CARDS["a100-80"]
assert [
    needed("llama-3.1-70b", way, large) <= large.device.memory_bytes for way in METHODS
] == [False, False, True]

# %% [markdown]
# Two rules hold: 1, and by our estimate 8. (Not measured.) Rule 3 is right by luck: by rule 2, the guide's own 7B takes
# 28 GB, and an A10G has 24. Rule 8 is about copies of one model. A larger one, as in rule 4, must be
# [sharded](sharding.py). Rule 1 is for 32-bit AdamW ([half](weights_elsewhere.py) is enough).

# %% [markdown] tags=["deep"]
# ### Deeper: when LoRA is cheaper
# Rule 6, *LoRA is cheaper*, is false on the same card. LoRA saves the gradients of the frozen matrices, but its
# adapters need more passes over memory, and with 16,384 tokens in a step the optimizer hardly counts. With 768 tokens
# and a 3B model it does count: AdamW goes over all weights each time, and full fine-tuning takes 1.9 times as long. (In
# peft's benchmark, with a 3B model and at most 3,072 tokens in a step, 2.3 times was measured.) What LoRA buys is a
# smaller card.

# %% tags=["deep"]
short = ["tricks.gradient_accumulation=1", "data.max_length=768"]
times = [
    run("llama-3.2-3b", way, "a100-large", more=short).minutes
    for way in ("full", "lora")
]
print(f"768 tokens a step: full takes {times[0] / times[1]:.1f} times as long as LoRA")
assert 1.8 < times[0] / times[1] < 1.95

# %% [markdown]
# ## 6. Where it breaks
# **`is_bf16_supported()` says True, but the run is very slow**, because torch counts emulation as support. No card
# before compute capability 8.0 has bf16 units, so a T4 has none. At the rate of fp32, an eighth, and with torch's slow
# math kernel for attention, we estimate 76 seconds a step instead of 15. The cure is to ask without emulation, or to
# take the recipe's precision.
#
# **`does not fit`, although the name of the card says 16 GB.** Without checkpointing, a row of 8,192 tokens needs at
# least 14.85 GiB, and 18.8 with what the allocator may reserve. But of the 16 in its name a T4 has only 14.74 GiB to
# use. On a card the end is `torch.OutOfMemoryError: CUDA out of memory`. The cure is to plan with `total_memory`, and
# to turn on a switch, here checkpointing.

# %%
# torch's questions about the card, answered as a T4 would
as_a_t4 = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "get_device_properties": lambda device: SimpleNamespace(major=7, minor=5),
    "_check_bf16_tensor_supported": lambda device: True,
}
with patch.multiple(torch.cuda, **as_a_t4):
    print("supported:", torch.cuda.is_bf16_supported())
    print(
        "and without emulation:",
        torch.cuda.is_bf16_supported(including_emulation=False),
    )
    assert torch.cuda.is_bf16_supported() is not torch.cuda.is_bf16_supported(
        including_emulation=False
    )

job, card = find_shape("llama-3.2-1b"), CARDS["t4"]
emulated = with_settings(recipes.capstone(T4), ["tricks.precision=bf16"])
slow, fast = (
    step(recipe, job, card).seconds for recipe in (emulated, recipes.capstone(T4))
)
print(f"bf16 {slow:.0f} s a step, fp16 {fast:.0f}, by estimate")
assert slow > 3 * fast
try:
    resolve(emulated, T4)
except BadInput as refused:
    print(refused)
    assert "has no bf16 units and only emulates it; use tricks.precision=fp16" in str(
        refused
    )
assert recipes.best_precision(T4) == "fp16"  # the cure

tight = (
    "cria plan kwanzaa --gpu t4 --set data.max_length=8192 --set "
    "tricks.gradient_checkpointing="
)
assert cria(f"{tight}false") == 3
assert cria(f"{tight}true") == 0  # the cure

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** From how many tokens on is the multiplication with a 16-bit matrix of 2,048 x 8,192 limited by the
#    operations of a T4 ($65\cdot10^{12}$ a second), and not by the bytes of step 1 ($320\cdot10^9$ a second)?
# 2. **Build.** `offers(model, tokens)` gives a list of machines with the fields `flavor` (its name), `fits`, `minutes`
#    and `cost`. Fill in `choose(found, minutes)`: it returns the name of the cheapest machine (by `cost`) on which the
#    run fits and is done in at most `minutes`, or `"none"` if there is none.
# 3. **Reach.** Loading and downloads take 10 minutes on either machine, and are billed. At which price of an hour is
#    the A100 as cheap for our job as a T4 at \$0.40? The runs take 10.2 and 1.0 minutes (section 5).

# %% tags=["exercise"]
tokens_at_the_ridge = None


def choose(found, minutes):
    """FILL ME IN."""


usd_an_hour = None


# %% Check the exercises tags=["hide-input"]
def of_choose(answer):
    # on paper: the dear one is fast, the cheapest does not fit, two are done in exactly
    # ten minutes
    made = [
        Offer("dear", True, 2.0, 0.9, 1.0, 2.0),
        Offer("small", False, 1.0, 0.1, 0.2, 0.3),
        Offer("slow", True, 30.0, 0.2, 0.1, 0.2),
        Offer("right", True, 10.0, 0.3, 0.9, 1.9),
        Offer("other", True, 10.0, 0.4, 0.3, 0.4),
    ]
    lists = [
        made,
        *(
            offers(model, 10**6)
            for model in ("llama-3.2-1b", "llama-2-13b", "llama-3.1-70b")
        ),
    ]
    for found in lists:
        for minutes in (1, 2, 10, 60, 1000):
            right = [
                offer for offer in found if offer.fits and offer.minutes <= minutes
            ]
            name = min(right, key=lambda offer: offer.cost).flavor if right else "none"
            if (said := answer(list(found), minutes)) is None:
                raise NotImplementedError
            if not isinstance(said, str):
                raise TypeError(f"it returned a {type(said).__name__}")
            offer = next((one for one in found if one.flavor == said), None)
            assert offer or said == "none", f"{said!r} is no machine of the list"
            assert not offer or offer.fits, f"{said}: the run does not fit it"
            assert not offer or offer.minutes <= minutes, (
                f"{said} takes {offer.minutes:.1f} of {minutes} minutes"
            )
            assert offer or name == "none", (
                f"a machine is done within {minutes} minutes; "
                "exactly that many are allowed"
            )
            assert said == name, (
                f"{said} is not the cheapest by its cost of those that are done "
                f"within {minutes} minutes"
            )


ridge = CARDS["t4"].half_flops / CARDS["t4"].memory_rate
at_the_ridge = ridge * 2048 * 8192 / (2048 * 8192 - ridge * (2048 + 8192))
t4_job, a100_job = (
    offer.minutes for offer in ours if offer.flavor in ("t4-small", "a100-large")
)
hint = (
    "count 2 operations for each product of two numbers, "
    "and 2 bytes for each number of "
    "input, matrix and output"
)
course.check(
    1, tokens_at_the_ridge, course.about(at_the_ridge, hint), "a number of tokens"
)
course.check(
    2,
    choose,
    of_choose,
    "a function (found, minutes) -> the name of a machine, or 'none'",
)
hint = (
    "a run is billed for its own minutes and ten more, on both; "
    "with equal bills, what may an hour cost?"
)
course.check(
    3,
    usd_an_hour,
    course.about(0.4 * (10 + t4_job) / (10 + a100_job), hint),
    "USD an hour",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # 2 n D F / (2 (n D + D F + n F)) = 65e12 / 320e9; for few tokens this is n
# ridge_of_a_t4 = 65e12 / 320e9
# tokens_at_the_ridge = (
#     ridge_of_a_t4 * 2048 * 8192 / (2048 * 8192 - ridge_of_a_t4 * (2048 + 8192))
# )
#
#
# def choose(found, minutes):
#     possible = [offer for offer in found if offer.fits and offer.minutes <= minutes]
#     return min(possible, key=lambda offer: offer.cost).flavor if possible else "none"
#
#
# usd_an_hour = 0.40 * (10 + 10.19) / (10 + 0.985)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** a wrong choice: first fit, then minutes, then money. Of ten rules of thumb two hold, because most know
#   neither rows nor vocabulary. Count the minutes of loading as well.
# - **Costs** arithmetic. Bytes are as good as the bill; seconds are a range, and cards whose ranges overlap cannot be
#   told apart.
# - **A step** has matrix multiplications, which are limited by the card's peak rate, and everything between them, which
#   is limited by its memory.
# - **When**: a run of hours, or a model that nearly fills a card.
# - **When not**: a run of minutes. Take the card that you have, because the failed attempt costs more.
# - **Other cards**: `cria plan --gpu` also knows RTX 3090 to 5090, L40S, H100 and H200. [Where to
#   train](../docs/guide/where_to_train.md) has other providers.
#
# ## Sources
# - Williams et al. 2009, *Roofline*, doi:10.1145/1498765.1498785.
# - The project's Hardware Selection Guide (seed document 004), unpublished; its prices are in the code of this lesson.
# - Data sheets: NVIDIA T4, L4, A10G for AWS (17 February 2022), A100 (40 GB and 80 GB); a T4's 320 GB/s: Turing
#   whitepaper.
# - The public runs: `benchmarks/published_runs.toml`, with their sources; the two above are a workshop's notes of
#   2026-09-20 (T4), and LLaMA-Factory's wiki, *Performance comparison* (A100). peft's `method_comparison/MetaMathQA`
#   (2,147 s and 942 s, L40S). Prices: huggingface/hub-docs, `docs/hub/jobs-pricing.md` at commit a9fef576 (2026-08-21).
# - torch 2.13: `is_bf16_supported` in `torch/cuda/__init__.py`, `torch/utils/flop_counter.py`.
# - Ours: `cria_tricks/bill/` (`step_time.py`, `products.py`, `moved_bytes.py`), `cria_tricks/run/machines.py`,
#   `docs/guide/where_to_train.md`.
