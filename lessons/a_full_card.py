# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Together: why savings do not add up
# > **Promise.** Each alone, twelve switches save 43,866 MiB of a step that has 32,046. You find where the rest went:
# > one rule, proved in a few lines and checked on all 14,080 ways to flip a switch, says what it is worth beside
# > others.
#
# > **Card.** saves nothing itself, and shows what does; its last switch, compile, may save seconds / costs a
# > compilation / the rule is exact, compile exact within rounding / 35 minutes / after [choosing
# > hardware](choose_your_hardware.py)
#
# The job: QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. The course began at a
# peak of 31.3 GiB, and every lesson flipped a switch. This one flips them together.

# %% Imports and settings tags=["hide-input"]
import itertools
import logging
import math
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from cria_tricks import course, recipes
from cria_tricks.bench import results
from cria_tricks.bench.style import Theme, readable
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.compile import fused

torch.manual_seed(0)
MIB = 2**20


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
# What does a switch save? That depends on what you ask. *Alone*: over plain fp32 training, and what it cannot do
# without (chunked loss and quantization need LoRA, `expand_kv` sdpa). *On the ladder*: over the switches of the lessons
# before it. *Beside all*: what comes back when it is taken out of the whole, with those that need it. Write down which
# switch you think saves most alone. Then compare.

# %%
whole = course.CAPSTONE
fields = toggles.switched_on(whole)
target = toggles.Target(find_shape(whole.model), T4)
rungs = toggles.ladder(target, whole)
peaks = [rung.memory.peak_bytes for rung in rungs]
saved = {
    "alone": [change.saved_bytes for change in toggles.alone(target, whole)],
    "on the ladder": [before - after for before, after in itertools.pairwise(peaks)],
    "beside all": [change.saved_bytes for change in toggles.removed(target, whole)],
}
print(f"{'MiB saved':28}", *(f"{name:>14}" for name in saved))
for place, field in enumerate(fields):
    print(
        f"{toggles.named(whole, field):28}",
        *(f"{column[place] / MIB:14,.0f}" for column in saved.values()),
    )
print(f"{'added up':28}", *(f"{sum(column) / MIB:14,.0f}" for column in saved.values()))
assert sum(saved["on the ladder"]) == peaks[0] - peaks[-1]
assert sum(saved["alone"]) > peaks[0] > peaks[0] - peaks[-1] > sum(saved["beside all"])
first = {name: fields[column.index(max(column))] for name, column in saved.items()}
assert round(sum(saved["alone"]) / MIB) == 43_866
CHECKPOINTING = "gradient_checkpointing"
assert first == {
    "alone": CHECKPOINTING,
    "on the ladder": CHECKPOINTING,
    "beside all": "peft",
}

# %% [markdown]
# Checkpointing saves most alone and on the ladder, LoRA beside all, and only the middle column adds up to what is
# really saved. The paged optimizer saves 9,428 MiB alone, and 12 in the end. `expand_kv` saves nothing on the ladder,
# and 1,320 beside all. None of these numbers is wrong.
#
# They are by hand. The repository has two counts to hold them against: a dry run of the same ladder, and real steps of
# a two-layer model on a CPU, with each of its switches alone, taken out, and in a row.

# %%
counted = (results.study("ladder") or {"cases": {}})["cases"]
off = [
    rung.memory.peak_bytes / counted[rung.set[0]]["peak_bytes"] - 1
    for rung in rungs
    if rung.set[0] in counted
]
print("over the dry run:", *(f"{share:+.2%}" for share in off))
real = [
    case
    for case in results.read(results.COMMITTED)
    if (case.bench, case.kind) == ("together", "cpu")
]
off_real = [case.estimated_bytes / case.peak_allocated_bytes - 1 for case in real]
print(f"over {len(real)} real steps: at most {max(map(abs, off_real), default=0):.2%}")
assert all(abs(share) < 0.002 for share in off + off_real)


# %% Draw figure 1 tags=["hide-input"]
def three_answers(theme: Theme):
    """What each switch saves alone, on the ladder and beside all others."""
    drawn, axes = course.figure(height=4.6)
    for number, (name, column) in enumerate(saved.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(fields))]
        axes.barh(
            places,
            [size / 2**30 for size in column],
            height=0.25,
            color=theme.series[number],
            label=name,
        )
    axes.axvline(0, color=theme.quiet, linewidth=1)
    axes.set_yticks(
        range(len(fields)), [toggles.named(whole, field) for field in fields]
    )
    axes.set(xlabel="saved at the peak, GiB", ylim=(len(fields) - 0.4, -0.6))
    axes.grid(axis="x")
    axes.legend(loc="lower right")
    return drawn


course.show(
    three_answers, "Figure 1. What does a switch save? Three questions, three answers."
)

# %%
course.show(
    course.staircase("a_full_card"),
    "Figure 2. The whole course: the peak of a step, switch after switch.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# **A step is a table.** It has *rows*, things that take bytes, and *moments*. At each moment some rows are alive. The
# card must hold the fullest moment, so the peak is a maximum of sums.


# %%
def heights(table):
    return {moment: sum(rows.values()) for moment, rows in table.items()}


def peak(table):
    return max(heights(table).values())


toy = {
    "loss": {"weights": 4, "states": 3, "kept": 6, "logits": 5},
    "update": {"weights": 4, "states": 3, "gradients": 5},
}
assert heights(toy) == {"loss": 18, "update": 12}

# %% [markdown]
# **Take rows away.** A perfect trick removes its row. What do these save, alone and together? *states* and *kept*;
# *kept* and *logits*; and *gradients* with the last two. Guess first.

# %% Your guess: what kept and logits save together tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def without(table, *gone):
    return {
        moment: {row: size for row, size in rows.items() if row not in gone}
        for moment, rows in table.items()
    }


def saves(*gone):
    return peak(toy) - peak(without(toy, *gone))


# they add up
assert saves("states") + saves("kept") == 3 + 6 == saves("states", "kept")
# less than their sum
assert saves("kept") + saves("logits") == 6 + 5 > saves("kept", "logits") == 6
# more than their sum
assert (
    saves("kept", "logits") + saves("gradients")
    == 6 + 0
    < saves("kept", "logits", "gradients")
    == 11
)
course.reveal(guess, saves("kept", "logits"))


# %% Draw figure 3 tags=["hide-input"]
def toy_steps(theme: Theme):
    """The toy's two moments, as one row after the other is taken away."""
    sketch = course.Sketch(theme, 41.4, 16)
    ground, unit = 14.6, 0.7
    colours = {"weights": 0, "states": 3, "kept": 1, "logits": 2, "gradients": 1}
    for place, gone in enumerate(
        ((), ("kept",), ("kept", "logits"), ("kept", "logits", "gradients"))
    ):
        left = 0.2 + 10.4 * place
        for column, (moment, rows) in enumerate(toy.items()):
            top = ground
            # what is gone lies on top of what is left, so that the height left can be
            # compared
            for row in sorted(rows, key=lambda row: row in gone):
                top -= unit * rows[row]
                sketch.tensor(
                    left + 4.6 * column,
                    top,
                    4.2,
                    unit * rows[row],
                    row,
                    color=colours[row],
                    kept=row not in gone,
                )
            sketch.text(left + 4.6 * column + 2.1, ground + 0.8, moment, quiet=True)
        says = f"- {gone[-1]}" if gone else "all"
        sketch.text(left + 4.4, 0.6, f"{says}: peak {peak(without(toy, *gone))}")
    return sketch.figure


course.show(
    toy_steps,
    "Figure 3. Two moments of a step. Dashed is gone. "
    "Logits save nothing once the update is as high; the "
    "gradients, which saved nothing before, then save five.",
)

# %% [markdown]
# **Bound what a switch can save.** A real switch shrinks some rows and lets others grow. Let the old peak be at moment
# $m$, the new one at $m'$. The new peak is at least as high as the new $m$. So the saving is at most what the switch
# took *at the old peak's moment*. And the old peak was at least as high as the old $m'$. So it is at least what it took
# *at the new peak's moment*. When the peak stays where it was, both are the same number, and that is the saving.


# %%
def bounds(before, after):
    """The least and the most that can be saved from one table to another."""
    old, new = heights(before), heights(after)
    m, m_new = max(old, key=old.get), max(new, key=new.get)
    return old.get(m_new, 0) - new[m_new], old[m] - new.get(m, 0)


assert bounds(without(toy, "kept"), without(toy, "kept", "logits")) == (0, 5)

# %% [markdown]
# **Read the real table.** Sizes and moments are those of the lessons on one card, from the package's bill.


# %%
def table(recipe):
    found = course.bill(recipe).moments
    return {
        moment.name: {line.name: line.bytes for line in moment.lines if line.bytes}
        for moment in found
    }


for name, recipe in {"plain": toggles.with_only(whole, []), "whole": whole}.items():
    print(
        f"{name}:",
        *(
            f"{moment} {size / MIB:,.0f};"
            for moment, size in heights(table(recipe)).items()
        ),
    )

# %% [markdown]
# ## 3. Prove it
# Twelve switches make 4,096 sets. 1,536 of them are refused, as quantization or chunked loss would have no LoRA. For
# each of the others our peak must be the package's. And for each switch over each set that lacks it, the saving must
# lie within its bounds.

# %%
tables = {}
for chosen in itertools.product((False, True), repeat=len(fields)):
    on = frozenset(itertools.compress(fields, chosen))
    recipe = toggles.with_only(whole, on)
    if target.works(recipe):
        tables[on] = table(recipe)
        assert peak(tables[on]) == course.bill(recipe).peak_bytes
assert len(tables) == 2560

flips = [
    (on, on | {field})
    for on in tables
    for field in fields
    if field not in on and on | {field} in tables
]
stayed, short, dearer = 0, 0, 0
for before, after in flips:
    least, most = bounds(tables[before], tables[after])
    gain = peak(tables[before]) - peak(tables[after])
    assert least <= gain <= most
    stayed, short, dearer = (
        stayed + (least == most),
        short + (gain < most),
        dearer + (gain < 0),
    )
print(
    f"{len(flips):,} flips: in {stayed:,} the bounds meet; "
    f"in {short:,} a part is lost; {dearer:,} cost memory"
)
assert len(flips) == 14_080
assert round(7 * stayed / len(flips)) == 6

# %% [markdown]
# The sums agree by construction; the bounds had to be proved, and hold. In six of seven flips the peak stays at its
# moment: then what a switch takes there is what you get. Now the three ways to meet, on the real step:


# %%
def together(pair, over=()):
    """What two switches save one by one, added up, and both at once, MiB."""
    sets = [frozenset(over) | set(more) for more in ((), pair[:1], pair[1:], pair)]
    start, *rest = (peak(tables[on]) / MIB for on in sets)
    one, two, both = (start - end for end in rest)
    where = ", ".join(max(h := heights(tables[on]), key=h.get) for on in sets)
    print(
        f"{pair[0]} {one:,.0f}, {pair[1]} {two:,.0f}: added {one + two:,.0f}, "
        f"both {both:,.0f}; peaks at: {where}"
    )
    return one + two, both


pair = ("gradient_checkpointing", "chunked_loss")
# the last two to be switched on
added, both = together(pair, over=set(fields) - set(pair))
assert round(added - both, 1) == 21.5
added, both = together(("peft", "paged_optimizer"))
assert both < 0.6 * added
added, both = together(("gradient_checkpointing", "peft"))
assert round(both - added) == 2_910

# %% [markdown]
# Checkpointing and chunked loss shrink two lines of one moment, so their savings *add*, less 21.5 MiB: only with both
# does the peak hold autocast's copies of the adapters. LoRA and paging remove the *same line*, the optimizer states, so
# the second finds little. And checkpointing alone stops at the *next moment*, the end of the backward pass, where all
# gradients lie. LoRA takes these away, so together they save 2,910 MiB more than their sum.


# %% Draw figure 4 tags=["hide-input"]
def moving(theme: Theme):
    """The height of each moment, rung by rung; the peak is the highest."""
    drawn, axes = course.figure(height=3.9)
    kinds = {
        "loss": ("loss", "log-softmax"),
        "a block's backward pass": ("last block", "first block"),
        "end of backward": ("embedding",),
        "optimizer step": ("optimizer step",),
    }
    found = [heights(table(rung.recipe)) for rung in rungs]
    axes.plot(
        range(len(rungs)),
        [p / MIB for p in peaks],
        color=theme.quiet,
        linewidth=7,
        alpha=0.35,
        label="the peak",
    )
    for (name, members), colour in zip(kinds.items(), theme.series, strict=False):
        sizes = [
            max(one.get(member, 0) for member in members) / MIB or math.nan
            for one in found
        ]
        axes.plot(
            range(len(rungs)), sizes, color=colour, marker="o", markersize=4, label=name
        )
    axes.set(yscale="log", ylabel="alive, MiB")
    labels = readable([rung.set[0].partition(",")[0] for rung in rungs])
    axes.set_xticks(range(len(rungs)), labels, rotation=35, ha="right", fontsize=7.5)
    axes.grid()
    axes.legend()
    return drawn


course.show(
    moving,
    "Figure 4. The peak is the upper edge of the moments. "
    "expand_kv takes a third off a block's backward pass, and "
    "nothing off the peak; in the end loss and block are 22 MiB apart.",
)

# %% [markdown]
# ## 4. What it costs
# Bytes were the easy half. By [the lesson on choosing hardware](choose_your_hardware.py)'s reckoning, on one card, a
# token takes so much of its first time:

# %%
print(
    ", ".join(
        f"{rung.set[0].partition('=')[0]} {rung.seconds / rungs[0].seconds:.2f}"
        for rung in rungs
    )
)
assert rungs[-1].seconds < rungs[0].seconds / 4

# %% [markdown]
# The smallest step is the fastest of the ladder: 16-bit products and `expand_kv` gain more than checkpointing and
# unpacking cost. Times interact too, and our rule does not hold for them. Three pairs, measured (two-layer model, CPU;
# the machine was shared, and a tenth is noise):

# %% Show measured pairs tags=["hide-input"]
cases = {
    case.name: case for case in results.read(results.COMMITTED) if case.kind == "cpu"
}
for pair in ("checkpointing_chunked_loss", "nf4_batch", "packing_sdpa"):
    if f"{pair}-both" not in cases:
        print(f"no committed results of {pair} beside this package")
        continue
    four = [
        cases[f"{pair}-{which}"] for which in ("neither", "first", "second", "both")
    ]
    sizes, times = (
        [getattr(case, what) for case in four]
        for what in ("peak_allocated_bytes", "median_seconds")
    )
    one, two, both = ((sizes[0] - size) / MIB for size in sizes[1:])
    print(
        f"{pair:27}saved {one:6.1f} and {two:6.1f}, together {both:6.1f} MiB;", end=" "
    )
    print(
        f"time of the first: x {times[1] / times[0]:.2f} without the second, "
        f"x {times[3] / times[2]:.2f} with it"
    )
    assert abs(one + two - both) < 0.2

# %% [markdown]
# Bytes add in all three, as the peak stays at the loss. Time does not: NF4 costs half a step when four rows come one
# after the other, and a fifth when they come at once, as a matrix is then unpacked once for all four. Packing's two
# numbers are noise.
#
# **One switch is left, and it is for time: compile.** Between a block's products lie chains of small operations. Each
# reads its tensors, writes its result, and autograd keeps what it asks for. Fused, a chain goes through memory once,
# tile by tile, and is computed again on the way back. By hand, for the gate of a Llama:


# %%
def gate(a, b):
    return F.silu(a) * b


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # and not silu(a)
        out = torch.empty_like(a)
        for o, x, y in zip(*(t.view(-1).split(1024) for t in (out, a, b)), strict=True):
            o.copy_(F.silu(x) * y)  # all operations on a tile while it is near
        return out

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        s = a.sigmoid()
        return grad * b * s * (1 + a * (1 - s)), grad * F.silu(a)


# %% [markdown]
# Predict how many tensors of the size of $a$ wait: plain; by hand; with the package's `fused`; with torch's compiler.

# %%
a, b = (torch.randn(256, 512, requires_grad=True) for _ in range(2))
torch._dynamo.reset()
ways = {"plain": gate, "by hand": Fused.apply, "package": fused(gate)}
try:
    resolve(with_settings(whole, ["tricks.compile=true", "tricks.precision=fp32"]))
    ways["torch.compile"] = torch.compile(gate, dynamic=True)
except BadInput as refused:  # it needs a C++ compiler
    print(refused)
right, kernels = None, metrics.generated_kernel_count
with fresh_cache():  # nothing compiled on an earlier day
    for name, way in ways.items():
        start = time.perf_counter()
        with SavedBytes() as kept:
            y = way(a, b)
        first, start = time.perf_counter() - start, time.perf_counter()
        way(a, b)
        again = time.perf_counter() - start
        found = [y, *torch.autograd.grad(y.square().sum(), (a, b))]
        right = right or found
        apart = max(
            (p - q).abs().max().item() for p, q in zip(found, right, strict=True)
        )
        print(
            f"{name:14}keeps {kept.peak / a.nbytes:.0f}, off by {apart:.0e}; "
            f"first call {first:.4f} s, then {again:.4f}"
        )
        assert kept.peak == (3 if name == "plain" else 2) * a.nbytes
        assert apart < 1e-5
print(
    f"kernels that torch made: {metrics.generated_kernel_count - kernels}, "
    "one forward and one backward"
)

# %% [markdown]
# Three become two. The first call takes as long as very many later ones, and a run must be long enough to earn it back:
# ours has 42 steps. On two CPU cores a compiled step of the two-layer model was no faster at all (committed):

# %%
step_of = "peft=lora attention=best precision=best chunked_loss=true"
course.on_a_gpu("compile", off=step_of, on=f"{step_of} compile=true")

# %% [markdown]
# And in bytes? `silu(a)` is 32 MiB in a block of the capstone. The bill does not count it as saved, since what is fused
# is the compiler's choice. Suppose it were. How far would the peak fall?

# %%
spared = 2 * 2048 * target.shape.inner  # 16 bits, tokens, inner width
compiled = {moment: dict(rows) for moment, rows in table(whole).items()}
for moment in ("last block", "first block"):
    compiled[moment]["open block: saved"] -= spared
print(
    f"spared {spared / MIB:.0f} MiB in the block, "
    f"{(peak(table(whole)) - peak(compiled)) / MIB:.0f} at the peak"
)
assert peak(table(whole)) == peak(compiled)

# %% [markdown]
# Not at all: the peak is at the loss.
#
# ## 5. The production switch
# Each switch is one flag. Both commands switch everything on: over a baseline, and over the Kwanzaa run's recipe, which
# leaves two switches out on a T4.

# %%
sets = [f"tricks.{toggles.named(whole, field)}" for field in fields]
over = "cria plan baseline --gpu t4 --set model=llama-3.2-1b --set data.max_length=2048"
print(over, *(f"--set {one}" for one in sets), sep=" \\\n    ")
print(
    "cria plan kwanzaa --gpu t4 --set tricks.gradient_checkpointing=true --set "
    "tricks.chunked_loss=true"
)
plain = with_settings(
    recipes.baseline(T4), ["model=llama-3.2-1b", "data.max_length=2048"]
)
assert with_settings(plain, sets).tricks == whole.tricks
left_out = ["tricks.gradient_checkpointing=true", "tricks.chunked_loss=true"]
assert (
    with_settings(recipes.kwanzaa(T4), left_out).tricks
    == whole.tricks
    != recipes.kwanzaa(T4).tricks
)
course.show_bill(plain, whole)

# %% [markdown]
# Line by line, for the last time. *Weights: blocks* went to an eighth (LoRA froze them, NF4 packed them), *weights: all
# others* to half (16 bits, which the lean preparation left alone). *Optimizer states* are those of 11 million weights,
# some paged. *Batch*: no mask. *Saved activations*: sixteen inputs. *Final norm*: nothing in it trains. *Logits*: of
# 256 tokens. On top came the adapter, its waiting gradient ([gradient accumulation](gradient_accumulation.py)), its
# 16-bit copy, and hidden states.
#
# **Now switch something off.** The step needs 2.0 GiB, and a T4 has 14.74. Memory that stays empty buys nothing. So
# `cria plan kwanzaa --gpu t4 --front` tries all sets that train the same weights. No other is both smaller and faster
# than one of these:

# %%
front = toggles.front(target, whole)
for entry in front:
    needs, ms = entry.memory.needed_bytes / 2**30, 1000 * entry.seconds
    changes = " ".join(f"--set {change}" for change in entry.set)
    print(f"{needs:4.1f} GiB, {ms:.3f} ms a token: {changes or 'as it is'}")
assert front[0].memory.fits
assert front[0].seconds < 0.7 * next(entry.seconds for entry in front if not entry.set)

# %% [markdown]
# Without checkpointing, and with all logits, a token takes a third less time by estimate, in two thirds of the card.
# So the recipe `kwanzaa` leaves these two out on a T4. `cria plan --fit fastest` finds the fastest set that fits your
# card, and `cria train --fit fastest` trains with it. Compile is one more flag. The same estimate gives it a third less
# time on a T4; not measured:

# %%
with_compile = with_settings(whole, ["tricks.compile=true"])
print("--set tricks.compile=true")
print(diff(resolve(whole, T4), resolve(with_compile, T4)))
print(
    f"{8 * 2048 * target.bill(whole).seconds:.1f} s a step -> "
    f"{8 * 2048 * target.bill(with_compile).seconds:.1f}"
)

# %% [markdown]
# ## 6. Where it breaks
# **`does not fit`, where the savings said it would.** LoRA saves 9,846 MiB alone, a paged optimizer 9,428. From 32,046
# that leaves 12,772 MiB: with CUDA's own 381 MiB still under the card's 15,094. The run ends with
# `torch.OutOfMemoryError: CUDA out of memory`. Cause: both savings are the same states. Cure: read the table and
# shrink another line.

# %%
added_up = peaks[0] - sum(
    saved["alone"][fields.index(field)] for field in ("peft", "paged_optimizer")
)
print(f"by the sum: {added_up / MIB:,.0f} MiB")
assert added_up + 400e6 < T4.memory_bytes
base = (
    "cria plan baseline --gpu t4 --set model=llama-3.2-1b --set data.max_length=2048 "
    "--set tricks.peft=lora"
)
# the exit code of: does not fit
assert cria(f"{base} --set tricks.paged_optimizer=true") == 3
assert cria(f"{base} --set tricks.gradient_checkpointing=true") == 0  # the cure

# %% [markdown]
# **`torch._dynamo hit config.recompile_limit (8)`.** One warning, and from then on torch runs new lengths uncompiled,
# slower than you think. Cause: a graph was made for one length, and rows have many. Here twelve lengths go through the
# two blocks of a small Llama. (`backend="eager"` captures graphs and makes no kernels, which is enough to count them.)
# Cure: `dynamic=True`, one graph for any length, as our switch sets it.

# %%
from transformers import AutoConfig, AutoModelForCausalLM

said = []
logging.getLogger("torch._dynamo.convert_frame").addFilter(
    lambda record: said.append(record.getMessage())
)


def graphs(dynamic):
    """How many graphs exist after each of twelve rows, each longer by a token than the
    last."""
    torch._dynamo.reset()
    counters.clear()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIGS["tiny"]), attn_implementation="sdpa"
    )
    for block in model.model.layers:
        block.compile(dynamic=dynamic, backend="eager")
    made = []
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own
        for n in range(20, 32):
            model(input_ids=torch.zeros(1, n, dtype=torch.long), use_cache=False)
            made.append(counters["stats"]["unique_graphs"])
    return made


broken, cured = graphs(dynamic=False), graphs(dynamic=True)
print(said[0].splitlines()[0])
print("for each length:", *broken)
print("dynamic=True:   ", *cured)
assert "hit config.recompile_limit (8)" in said[0]
assert (broken[0], broken[-1]) == (1, 8)
assert set(cured) == {1}
assert len(said) == 1

# %% [markdown]
# Beside lengths, other things ask for another graph: a mask or none, one row or several, training or evaluation. For
# our blocks that can be twelve, so the switch also raises the limit.
#
# ## 7. Exercises
# 1. **Predict.** With chunks of 64 tokens and not 256, the whole recipe's *logits* row would be a quarter; alone that
#    saves 22 MiB, as a block's backward pass comes next. Sparing 32 MiB in a block alone saves nothing. How many MiB do
#    both together save at the peak? (Two of the heights printed in section 2 and one row of the bill are all you need.)
# 2. **Build.** Fill in `fewest(limit)`: of all sets in `tables`, the one with the fewest switches whose peak is at most
#    `limit` bytes; of equals the one with the lowest peak. Return the set, a key of `tables`.
# 3. **Reach.** Which saving is a switch's own? A fair answer, Shapley's: go through all orders of the switches, note
#    what each saves when its turn comes, take the mean. Fill in `fair(switches)`: from a list of switches, with all
#    others off, to a dict from each switch to its bytes. (`itertools.permutations`: four switches have 24 orders.)

# %% tags=["exercise"]
mib_of_both = None


def fewest(limit):
    """FILL ME IN."""


def fair(switches):
    """FILL ME IN."""


# %% Check the exercises tags=["hide-input"]
def of_fewest(answer):
    exactly = peak(tables[frozenset(["gradient_checkpointing", "peft"])])
    for limit in (14 * 2**30, 4 * 2**30, 2 * 2**30, 40 * 2**30, exactly):
        if (found := answer(limit)) is None:
            raise NotImplementedError
        if not isinstance(found, frozenset | set | list | tuple):
            raise TypeError(f"it returned a {type(found).__name__}")
        found = frozenset(found)
        assert found in tables, f"{sorted(map(str, found))} is no set of tables"
        assert peak(tables[found]) <= limit, (
            f"{sorted(found)} takes more than {limit / MIB:,.0f} MiB"
        )
        least = min(len(on) for on, one in tables.items() if peak(one) <= limit)
        hint = "a peak of exactly the limit is allowed"
        assert len(found) == least, (
            f"{limit / MIB:,.0f} MiB can be had with fewer switches than "
            f"{len(found)}; {hint}"
        )
        lowest = min(peak(one) for on, one in tables.items() if len(on) == least)
        assert peak(tables[found]) == lowest, (
            "another set with as few switches has a lower peak"
        )


def of_fair(answer):
    for some in (
        ["gradient_checkpointing", "peft", "optimizer", "paged_optimizer"],
        ["attention", "precision", "peft"],
    ):
        if (found := answer(list(some))) is None:
            raise NotImplementedError
        if not isinstance(found, dict):
            raise TypeError(f"it returned a {type(found).__name__}")
        assert set(found) == set(some), (
            "every switch of the list is a key of the dict, and nothing else is"
        )
        all_of_it = peak(tables[frozenset()]) - peak(tables[frozenset(some)])
        hint = "what all of them save together, in bytes"
        assert abs(sum(found.values()) - all_of_it) < 1, (
            f"the shares must add up to {hint}"
        )
        value = {on: peak(tables[on]) for on in tables if on <= set(some)}
        n = len(some)
        for field in some:
            others = [on for on in value if field not in on]
            weigh = {
                on: math.factorial(len(on))
                * math.factorial(n - 1 - len(on))
                / math.factorial(n)
                for on in others
            }
            right = sum(weigh[on] * (value[on] - value[on | {field}]) for on in others)
            hint = "is every order in it, each as often as any other?"
            assert abs(found[field] - right) < 1, (
                f"{field} has {found[field] / MIB:,.0f} MiB; {hint}"
            )


both_done = (peak(table(whole)) - heights(compiled)["last block"]) / MIB
course.check(
    1,
    mib_of_both,
    course.about(
        both_done, "which moment is the highest when both are done, and how high?"
    ),
    "a number of MiB",
)
course.check(
    2,
    fewest,
    of_fewest,
    "a function (limit) -> a set of switches, one of the keys of tables",
)
course.check(
    3,
    fair,
    of_fair,
    "a function (switches) -> a dict from each switch to a number of bytes",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # the loss falls 188 MiB, so the block is the peak, less its 32
# mib_of_both = 1516.2 - (1494.8 - 32)
#
#
# def fewest(limit):
#     return min(
#         (on for on in tables if peak(tables[on]) <= limit),
#         key=lambda on: (len(on), peak(tables[on])),
#     )
#
#
# def fair(switches):
#     shares = dict.fromkeys(switches, 0)
#     orders = list(itertools.permutations(switches))
#     for order in orders:
#         for n, field in enumerate(order):
#             before, after = frozenset(order[:n]), frozenset(order[: n + 1])
#             shares[field] += (peak(tables[before]) - peak(tables[after])) / len(orders)
#     return shares
# ```
#
# Two switches, checkpointing and LoRA, bring the plain step under a T4's memory.
#
# </details>
#
# ## In one breath
# - **Saves**: together 30,530 of 32,046 MiB, and three quarters of the time by estimate; alone the same switches claim
#   43,866.
# - **The rule**: what a switch saves lies between what it takes at the new peak's moment and at the old one's.
# - **Costs**: checkpointing's second forward pass, unpacking, the rounding of 4 and 8 bits; compile, its first call.
# - **When**: shrink the row that is largest at the peak, look again, repeat. Compile last, for a long run on a card.
# - **When not**: memory is left over (section 5), or the switch takes nothing at the peak. Here the paged and the 8-bit
#   optimizer are worth 12 and 28 MiB; with all weights trained they are gigabytes.
#
# ## Sources
# - Ansel et al. 2024, *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, doi:10.1145/3620665.3640366, sections 4 and 5.
# - Shapley 1953, *A Value for n-Person Games* (exercise 3).
# - torchtune's README, "Optimization flags": a ladder on an A100, stacked only. Hugging Face's documentation has each
#   switch alone.
# - torch 2.13: `torch/_dynamo/convert_frame.py` (the limit), `torch/_dynamo/config.py`.
# - Ours: `cria_tricks/bill/moments.py`, `cria_tricks/predict/toggles.py`, `cria_tricks/tricks/compile.py`,
#   `benchmarks/bench_together.py`, `benchmarks/bench_interactions.py`, `tests/tricks/test_compile.py`.
