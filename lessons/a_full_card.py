# ---
# jupyter:
#   question: Why do the savings of twelve switches not add up, and why is a card full before its tensors fill it?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # A full card: why savings do not add up, and what PyTorch reserves
# > **Promise.** Measured one at a time, the savings of the twelve switches add up to 41,327 MiB, but the step has only
# > 32,046 MiB. You learn the rule behind this, so that you can tell beforehand how much a switch can save. Then you see
# > why `CUDA out of memory` comes although the tensors would fit, and which setting prevents it.
#
# > **Card.** saves 1.4 GiB that PyTorch reserves in our example and no tensor uses / costs nothing that we know of /
# > exact: no number of a run changes / about 25 minutes / after [fused LoRA](fused_lora.py)
#
# The job is QLoRA of Llama-3.2-1B, with rows of 2,048 tokens, on a T4 with 14.74 GiB. Twelve switches have lowered the
# [peak](../docs/glossary.md#peak) of its step from 32,046 to 1,516 MiB. We call this the *whole job*.

# %% Imports and settings tags=["hide-input"]
import bisect
import itertools
import logging
import random
import time

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from transformers import AutoConfig, AutoModelForCausalLM

from cria_tricks import BadInput, course, recipes
from cria_tricks.course import ALLOCATOR as DEFAULT
from cria_tricks.course import (
    CONFIGS,
    T4,
    CachingAllocator,
    SavedBytes,
    Theme,
    diff,
    find_shape,
    memory_trace,
    quiet_libraries,
    readable,
    replay,
    resolve,
    results,
    row_lengths,
    toggles,
    with_settings,
)
from cria_tricks.course import AllocatorFull as OutOfMemory
from cria_tricks.course import AllocatorSettings as Settings
from cria_tricks.techniques import compile as compile_switch
from cria_tricks.techniques.compile import fused

quiet_libraries()
torch.manual_seed(0)
MIB, GIB = 2**20, 2**30
whole = course.CAPSTONE
fields = toggles.switched_on(whole)
target = toggles.Target(find_shape(whole.model), T4)
assert course.so_far("fused_lora").tricks == whole.tricks
assert len(fields) == 12

# %% [markdown]
# ## 1. The bill
# There are three ways to ask what a switch saves:
#
# - *alone*: we add it to plain fp32 training. If it needs another switch, as NF4 needs LoRA, that one is on before and
#   after.
# - *in order*: we add it to the switches of the lessons before.
# - *taken away*: we remove it from the whole job, together with the switches that need it.
#
# The paged optimizer saves 9,428 MiB alone, because it moves the optimizer states of all weights to the host. The whole
# job has 8-bit states of 11 million weights. How many MiB come back without paging?

# %% Your guess: MiB that come back without the paged optimizer tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Show the three savings of each switch tags=["hide-input"]
ladder = toggles.ladder(target, whole)
peaks = [setting.memory.peak_bytes for setting in ladder]
saved = {
    "alone": [change.saved_bytes for change in toggles.alone(target, whole)],
    "in order": [before - after for before, after in itertools.pairwise(peaks)],
    "taken away": [change.saved_bytes for change in toggles.removed(target, whole)],
}
print(f"{'MiB saved':28}", *(f"{name:>12}" for name in saved))
for place, field in enumerate(fields):
    numbers = (f"{column[place] / MIB:12,.0f}" for column in saved.values())
    print(f"{toggles.named(whole, field):28}", *numbers)
print(f"{'sum':28}", *(f"{sum(column) / MIB:12,.0f}" for column in saved.values()))
course.reveal(guess, saved["taken away"][fields.index("paged_optimizer")] / MIB, "MiB")
assert round(sum(saved["alone"]) / MIB) == 41_327
assert round(sum(saved["in order"]) / MIB) == 30_530
assert sum(saved["in order"]) == peaks[0] - peaks[-1]
of_two = sum(saved["alone"][fields.index(name)] for name in ("peft", "paged_optimizer"))
assert round((peaks[0] - of_two) / MIB) == 12_773
unpaged = course.bill(with_settings(whole, ["tricks.paged_optimizer=false"]))
states = {line.name: line.bytes for line in unpaged.lines}["optimizer states"]
assert round(states / MIB, 1) == 21.8

# the bill against two counts of the repository: a dry run, and real steps on a CPU
dry = (results.study("ladder") or {"cases": {}})["cases"].values()
off = [case["estimated_bytes"] / case["peak_bytes"] - 1 for case in dry]
real = [
    case
    for case in results.read(results.COMMITTED)
    if (case.bench, case.kind) == ("together", "cpu")
]
off += [case.estimated_bytes / case.peak_allocated_bytes - 1 for case in real]
print(
    f"bills of {len(dry)} sets of switches against a dry run, and of {len(real)} "
    "against real\nsteps of a small model: "
    f"at most {max(map(abs, off)):.2%} off"
)
assert max(map(abs, off)) < 0.002

# %% [markdown]
# Only the column *in order* adds up to what is saved, because it goes from the first bill to the last. But all numbers
# are right. With LoRA, little is left to move to the host: 12.2 of 21.8 MiB, because bitsandbytes pages only larger
# tensors. Alone, fp16 costs memory, because autocast adds 16-bit copies of all weights, and accumulation keeps a
# gradient. `sdpa` saves nothing until `expand_kv` gives it a kernel that keeps no scores, and without either the scores
# are back.
#
# ## 2. From scratch, in four steps
# **Step 1: a training step is a table.** The peak is the largest sum of a moment. At the loss, our toy holds weights (4
# MiB), optimizer states (3), activations (6) and logits (5), which is 18 MiB. At the update, it holds the weights, the
# states and the gradients (5), which is 12 MiB.
#
# **Step 2: perfect switches remove whole lines.** Without the activations the peak is 12 MiB, which saves 6. Without
# the logits it is 13 MiB, which saves 5. How many MiB do both switches save together?

# %% Your guess: MiB that both switches save together tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
import math

toy = {
    "loss": {"weights": 4, "states": 3, "activations": 6, "logits": 5},
    "update": {"weights": 4, "states": 3, "gradients": 5},
}


def sums(table):
    return {moment: sum(lines.values()) for moment, lines in table.items()}


def peak(table):
    return max(sums(table).values())


def without(table, *gone):
    """The table after perfect switches have removed these lines."""
    left = {}
    for moment, lines in table.items():
        left[moment] = {name: size for name, size in lines.items() if name not in gone}
    return left


def saves(*gone):
    return peak(toy) - peak(without(toy, *gone))


# they add up: the states are in both moments, so they are in each peak
assert saves("states", "activations") == saves("states") + saves("activations")
# less than their sum: without the activations the update is as high as the loss
assert saves("activations", "logits") < saves("activations") + saves("logits")
# more than their sum: the gradients alone save nothing, because the loss is the peak
assert saves("gradients") == 0
assert saves("activations", "logits", "gradients") == 11


# %% Compare with your guess, and draw figure 1 tags=["hide-input"]
course.reveal(guess, saves("activations", "logits"), "MiB")


def toy_steps(theme: Theme):
    """The toy's two moments, as one line after the other is taken away."""
    sketch = course.Sketch(theme, 41.4, 16)
    ground, unit = 14.6, 0.7
    colours = {"weights": 0, "states": 3, "activations": 1, "logits": 2, "gradients": 1}
    short = {"activations": "activ.", "gradients": "grads", "weights": "W"}
    removed = ("activations", "logits", "gradients")
    for place in range(4):
        gone = removed[:place]
        left = 0.2 + 10.4 * place
        for column, (moment, lines) in enumerate(toy.items()):
            top = ground
            # what is gone lies on top of what is left, so that the sums left can be
            # compared
            for line in sorted(lines, key=lambda line: line in gone):
                top -= unit * lines[line]
                sketch.tensor(
                    left + 4.6 * column,
                    top,
                    4.2,
                    unit * lines[line],
                    short.get(line, line),
                    color=colours[line],
                    kept=line not in gone,
                )
            sketch.text(left + 4.6 * column + 2.1, ground + 0.8, moment, quiet=True)
        sketch.text(left + 4.4, 0.6, f"peak {peak(without(toy, *gone))}")
    return sketch.figure


course.show(
    toy_steps,
    "Figure 1. The loss and the update of the toy step, with everything, and without "
    "the activations, the logits and the gradients (W: weights). Dashed boxes are "
    "removed. The "
    "peak is 18, then 12, still 12 without the logits, and 7 without the gradients.",
)

# %% [markdown]
# This is the rule: **a switch saves at most what it removes at the moment of the peak, and less if the peak then moves
# to another moment.** A switch that saves nothing now may save much once its own moment is the peak.
#
# **Step 3: we write PyTorch's allocator.** The bill counts [allocated](../docs/glossary.md#reserved) bytes, those of
# living tensors. But a card holds all that PyTorch has *reserved*. PyTorch takes large
# [segments](../docs/glossary.md#segment) from the card, divides them into blocks for tensors, and keeps blocks that are
# freed, because asking CUDA is slow. Its rules for tensors above 1 MiB (smaller ones share segments of 2 MiB):
#
# - *Best fit*: a tensor gets the smallest free block that is large enough.
# - *New segment*: if no block is large enough, PyTorch takes a segment. It has 20 MiB for a tensor of less than 10 MiB,
#   and otherwise the tensor's size, rounded up to a multiple of 2 MiB.
# - *Split*: if a block is more than 1 MiB too large, its rest stays free.
# - *Merge*: a freed block is merged with free neighbours in its segment.
# - *Full card*: PyTorch gives segments back in which no tensor is left, and tries once more.


# %%
class Cache:
    """Segments of a card's memory: lists of blocks (MiB, tensor's name or None)."""

    def __init__(self, limit=math.inf):
        self.limit = limit
        self.segments = []

    def reserved(self):
        return sum(size for segment in self.segments for size, _ in segment)

    def free_blocks(self):
        for s, segment in enumerate(self.segments):
            for b, (size, name) in enumerate(segment):
                if name is None:
                    yield size, s, b

    def allocate(self, name, size):
        fitting = [block for block in self.free_blocks() if block[0] >= size]
        if not fitting:
            fitting = [(self.new_segment(size), -1, 0)]  # the last segment, block 0
        have, s, b = min(fitting)  # best fit: the smallest size comes first
        if have - size > 1:
            self.segments[s][b : b + 1] = [(size, name), (have - size, None)]  # split
        else:
            self.segments[s][b] = (have, name)

    def release(self, name):
        for segment in self.segments:
            merged = []
            for size, owner in segment:
                owner = None if owner == name else owner
                if owner is None and merged and merged[-1][1] is None:
                    size += merged.pop()[0]  # merge with the free block before it
                merged.append((size, owner))
            segment[:] = merged

    def new_segment(self, size):
        have = 20 if size < 10 else 2 * math.ceil(size / 2)
        if self.reserved() + have > self.limit:
            self.empty()  # the card is full: give back what can be given back
        if self.reserved() + have > self.limit:
            raise MemoryError(f"{size:.0f} MiB wanted, {self.reserved():.0f} reserved")
        self.segments.append([(have, None)])
        return have

    def empty(self):
        """Give back segments without a tensor, as torch.cuda.empty_cache does."""
        in_use = [each for each in self.segments if any(name for _, name in each)]
        self.segments = in_use


# %% [markdown]
# **Step 4: we run three scripts.** `a=30 -a b=32` allocates 30 MiB as `a`, frees it, and allocates 32 MiB as `b`, as
# for a longer row. The free block is too small, so PyTorch reserves 62 MiB. How many MiB does this script reserve?
#
# ```
# a=5 b=5 c=5 d=5 -a -c e=8
# ```

# %% Your guess: MiB that the script reserves tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def play(script, limit=math.inf):
    cache = Cache(limit)
    for word in script.split():
        if word.startswith("-"):
            cache.release(word[1:])
        else:
            name, size = word.split("=")
            cache.allocate(name, float(size))
    return cache


same, longer, holes = "a=30 -a b=30", "a=30 -a b=32", "a=5 b=5 c=5 d=5 -a -c e=8"
for script in (same, longer):
    print(f"{script:14} reserves {play(script).reserved():.0f} MiB")

# %% Compare with your guess, and draw figure 2 tags=["hide-input"]
course.reveal(guess, play(holes).reserved(), "MiB")
print(f"{longer:26} on a card of 40 MiB: {play(longer, limit=40).segments}")
try:
    play(holes, limit=20)
except MemoryError as error:
    print(f"{holes:26} on a card of 20 MiB: {error}")


def of_segments(theme: Theme):
    """The segments of the three scripts at their end."""
    sketch = course.Sketch(theme, 46, 13.4)
    for row, script in enumerate((same, longer, holes)):
        top, left = 0.6 + 4.4 * row, 0.3
        sketch.text(left, top, script, align="left", quiet=True)
        for segment in play(script).segments:
            for size, name in segment:
                words = f"{size:.0f} free" if name is None else f"{name} {size:.0f}"
                sketch.tensor(
                    left,
                    top + 0.8,
                    0.7 * size,
                    2.2,
                    words,
                    color=int(name is None),
                    kept=name is not None,
                )
                left += 0.7 * size
            left += 0.8
    return sketch.figure


course.show(
    of_segments,
    "Figure 2. The segments after each script: filled blocks hold a tensor, and "
    "dashed blocks are free. A free block of 30 MiB is of no use to a tensor of 32, "
    "and two free blocks of 5 MiB are of no use to a tensor of 8.",
)

# %% [markdown]
# The second script works on a card of 40 MiB, because the segment of `a` is given back. The third fails on a card of 20
# MiB, although 10 are free, because only whole segments are given back. Such memory is
# [fragmented](../docs/glossary.md#fragmentation).
#
# ## 3. Prove it
# The real step is such a table, too (`course.bill(recipe).moments`). Three pairs show the toy's three cases:


# %%
def table(on):
    """The lines of each moment of the job's step with these switches on, in bytes."""
    moments = {}
    for moment in course.bill(toggles.with_only(whole, on)).moments:
        moments[moment.name] = {line.name: line.bytes for line in moment.lines}
    return moments


def peak_with(on):
    return peak(table(on)) / MIB


def compare(one, other, over=()):
    """Print and return what two switches save one by one, and what both save."""
    first, second, both = (
        peak_with(over) - peak_with([*over, *added])
        for added in ([one], [other], [one, other])
    )
    print(f"{one} {first:,.1f}, {other} {second:,.1f}: both {both:,.1f}")
    return first + second, both


pair = ("gradient_checkpointing", "chunked_loss")
total, both = compare(*pair, over=[field for field in fields if field not in pair])
assert round(total - both, 1) == 21.5
total, both = compare("peft", "paged_optimizer")
assert both < 0.6 * total
total, both = compare("gradient_checkpointing", "peft")
assert round(both - total) == 2_910

# %% [markdown]
# - Checkpointing and the chunked loss, each added to the ten others, shrink two lines of the *same moment*, so their
#   savings add up, but for 21.5 MiB.
# - LoRA and the paged optimizer remove the *same line*, the optimizer states, so the second finds little.
# - Checkpointing alone stops at the *next moment*, the end of the backward pass, where all gradients are in memory.
#   LoRA removes these, so together the two save 2,910 MiB more than the sum.
#
# We also compare our `Cache` with the package's model of PyTorch's source on 300 random scripts (and with PyTorch
# itself on a GPU). Both must make the same segments and fail at the same tensor.


# %% Draw figure 3 tags=["hide-input"]
def moving(theme: Theme):
    """The sum of each moment, switch after switch; the peak is the highest."""
    drawn, axes = course.figure(height=3.9)
    kinds = {
        "loss": ("loss", "log-softmax"),
        "a block's backward pass": ("last block", "first block"),
        "end of backward": ("embedding",),
        "optimizer step": ("optimizer step",),
    }
    found = [sums(table(fields[:n])) for n in range(len(fields) + 1)]
    axes.plot(
        range(len(ladder)),
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
            range(len(ladder)),
            sizes,
            color=colour,
            marker="o",
            markersize=4,
            label=name,
        )
    axes.set(yscale="log", ylabel="in memory, MiB")
    labels = readable([setting.set[0].partition(",")[0] for setting in ladder])
    axes.set_xticks(range(len(ladder)), labels, rotation=35, ha="right", fontsize=7.5)
    axes.grid()
    axes.legend()
    return drawn


course.show(
    moving,
    "Figure 3. The sum of each moment, switch after switch in the course's order. "
    "The peak is the upper edge: the loss until the chunked loss is on, then the "
    "backward pass of a block, and in the end again the loss, 21 MiB above the block.",
)


# %% Check 300 random scripts against the package's allocator tags=["hide-input"]
def segments_of(allocator, blocks):
    """The segments of the package's allocator, in the form of ours."""
    names = {id(block): name for name, block in blocks.items()}
    everything = [*blocks.values(), *allocator.large.free_blocks()]
    firsts = [block for block in everything if block.before is None]
    found = []
    for first in sorted(firsts, key=lambda block: block.address):
        segment = []
        block = first
        while block and block.mapped:
            segment.append((block.size / MIB, names.get(id(block))))
            block = block.after
        found.append(segment)
    return found


def random_scripts(number):
    """Yield (words, limit): each frees a third of the times."""
    draw = random.Random(0)
    for _ in range(number):
        words, alive = [], []
        for n in range(25):
            if alive and draw.random() < 0.35:
                words.append("-" + alive.pop(draw.randrange(len(alive))))
            else:
                alive.append(f"t{n}")
                words.append(f"t{n}={draw.randint(3, 80) / 2}")
        yield words, draw.choice([math.inf, 400, 250])


ended_early = 0
for words, limit in random_scripts(300):
    ours = Cache(limit)
    theirs = CachingAllocator(limit=limit * MIB)
    blocks = {}
    for word in words:
        if word.startswith("-"):
            ours.release(word[1:])
            theirs.release(blocks.pop(word[1:]))
            continue
        name, size = word.split("=")
        full = False
        try:
            ours.allocate(name, float(size))
        except MemoryError:
            full = True
        try:
            blocks[name] = theirs.allocate(round(float(size) * MIB))
        except OutOfMemory:
            assert full
            ended_early += 1
            break
        assert not full
        assert segments_of(theirs, blocks) == ours.segments
print(f"300 scripts: the same segments; {ended_early} ran out of memory in both")
assert 30 < ended_early < 270

if torch.cuda.is_available():  # then compare one script with the reader's card
    before = torch.cuda.memory_reserved()
    tensors = {}
    for word in longer.split():
        if word.startswith("-"):
            del tensors[word[1:]]
        else:
            name, size = word.split("=")
            tensors[name] = torch.empty(
                int(size) * MIB, dtype=torch.uint8, device="cuda"
            )
    here = (torch.cuda.memory_reserved() - before) / MIB
    print(f"{longer}: we predict 62 MiB, this card reserves {here:.0f}")

# %% [markdown] tags=["deep"]
# ### Deeper: the rule as two bounds, proved and checked on every set of switches
# A real switch makes some lines smaller and others larger. Let the old peak be at moment $m$, and the new peak at
# moment $m'$. The new peak is at least as high as the new sum of $m$. So a switch saves at most what it takes *at the
# old peak's moment*. The old peak was at least as high as the old sum of $m'$. So a switch saves at least what it takes
# *at the new peak's moment*. If the peak stays at its moment, both bounds are the same number, and that is the saving.
#
# Twelve switches make 4,096 sets. Of these 1,536 are refused, because quantization or the chunked loss would have no
# LoRA, for example. For each of the others our peak must be the package's. For each switch over each set that lacks it,
# the saving must lie between its bounds.


# %% tags=["deep"]
def bounds(before, after):
    """The least and the most that can be saved from one table to another."""
    old, new = sums(before), sums(after)
    m, m_new = max(old, key=old.get), max(new, key=new.get)
    return old.get(m_new, 0) - new[m_new], old[m] - new.get(m, 0)


assert bounds(without(toy, "activations"), without(toy, "activations", "logits")) == (
    0,
    5,
)

tables = {}
for chosen in itertools.product((False, True), repeat=len(fields)):
    on = frozenset(itertools.compress(fields, chosen))
    recipe = toggles.with_only(whole, on)
    if target.works(recipe):
        tables[on] = table(on)
        assert peak(tables[on]) == course.bill(recipe).peak_bytes
assert len(tables) == 2560

changes = [
    (on, on | {field})
    for on in tables
    for field in fields
    if field not in on and on | {field} in tables
]
stayed, short, dearer = 0, 0, 0
for before, after in changes:
    least, most = bounds(tables[before], tables[after])
    gain = peak(tables[before]) - peak(tables[after])
    assert least <= gain <= most
    stayed += least == most
    short += gain < most
    dearer += gain < 0
print(f"{len(changes):,} switches over a set:")
print(f"  in {stayed:,} cases the bounds are equal")
print(f"  in {short:,} a part of the saving is lost; {dearer:,} cost memory")
assert round(stayed / len(changes), 2) == 0.87

fitting = [on for on in tables if course.bill(toggles.with_only(whole, on)).fits]
fewest = min(fitting, key=lambda on: (len(on), peak(tables[on])))
print("the fewest switches that fit on a T4:", *sorted(fewest))

# %% [markdown] tags=["deep"]
# In 87 of 100 of these cases the two bounds are equal, so you get exactly what the switch takes at the peak's moment.
# Checkpointing and the chunked loss miss their sum by 21.5 MiB, because the peak holds autocast's 16-bit copies of the
# adapters only if both are on. The last line is a practical result: two switches alone bring the plain step under a
# T4's memory.

# %% [markdown]
# ## 4. What it costs
# With all switches a step is slow, because checkpointing computes blocks twice, and NF4 must be unpacked. Therefore:
# **where memory is left over, switch off what costs time.** Below are the sets that no other set beats in both seconds
# and memory, and what each changes in the whole job. ([`activation_offload`](long_rows.py) keeps block inputs on the
# host. Fused LoRA is left out.) A row's seconds are predicted, with a range of 0.82 to 1.22 times. The memory includes
# CUDA's own and what PyTorch may reserve.

# %%
for setting in toggles.front(target, whole):
    # double quantization goes with quantization
    changes = [one for one in setting.set if not one.startswith("tricks.double")]
    off = ", ".join(change.removeprefix("tricks.") for change in changes)
    needs = setting.memory.needed_bytes / GIB
    print(f"{2048 * setting.seconds:.2f} s, {needs:5.2f} GiB: {off or 'all switches'}")


# %% Check the numbers of the text tags=["hide-input"]
fast = recipes.kwanzaa(T4)
changed = ["tricks.gradient_checkpointing=false", "tricks.chunked_loss=false"]
assert with_settings(whole, changed).tricks == fast.tricks
found = target.bill(fast)
assert round(found.seconds / target.bill(whole).seconds, 2) == 0.72
assert round(found.memory.needed_bytes / GIB, 1) == 9.5
assert round(found.spread**0.5, 2) == 1.22
by_bill = found.memory.allocated_bytes
assert round(by_bill / GIB, 1) == 7.3

# %% [markdown] tags=["deep"]
# ### Deeper: seconds do not add up either
# The rule is about memory, and it does not hold for time. In the course's order, a row takes this share of its first
# time. Three pairs of switches were also measured, on a two-layer model and a CPU. (The machine was shared, so a tenth
# is noise.)

# %% tags=["deep"]
for setting in ladder:
    share = setting.seconds / ladder[0].seconds
    print(f"{setting.set[0].partition(',')[0]:28}{share:.2f}")
assert ladder[-1].seconds < ladder[0].seconds / 4

# %% Show measured pairs tags=["deep", "hide-input"]
cases = {
    case.name: case for case in results.read(results.COMMITTED) if case.kind == "cpu"
}
for pair in ("checkpointing_chunked_loss", "nf4_batch", "packing_sdpa"):
    if f"{pair}-both" not in cases:
        print(f"no committed results of {pair} in this package")
        continue
    ways = ("neither", "first", "second", "both")
    four = [cases[f"{pair}-{which}"] for which in ways]
    sizes = [case.peak_allocated_bytes for case in four]
    times = [case.median_seconds for case in four]
    one, two, both = ((sizes[0] - size) / MIB for size in sizes[1:])
    print(f"{pair:27}saved {one:5.1f} and {two:5.1f}, together {both:5.1f} MiB")
    print(
        f"  time of the first       x {times[1] / times[0]:.2f} without the second, "
        f"x {times[3] / times[2]:.2f} with it"
    )
    assert abs(one + two - both) < 0.2

# %% [markdown] tags=["deep"]
# The bytes of all three pairs add up, because the peak stays at the loss. The seconds do not. NF4 costs half a step if
# four rows come one after the other, and a fifth if they come at once, because a matrix is then unpacked once for all
# four rows. The two numbers of packing differ by noise.

# %% [markdown]
# ### What the card holds in addition to tensors
# Our example is the recipe `kwanzaa` on a T4. There it leaves out two of the twelve switches, checkpointing and the
# chunked loss. By estimate a row takes 28 % less time, and tensors take 7.3 GiB. (The second set above is faster and
# smaller, but it lacks NF4, and this recipe reproduces a QLoRA run.) How much will PyTorch reserve? `memory_trace` runs
# the training on tensors without data, first with rows of 1,536 tokens and then of 2,048, and records every allocation.
# The package's allocator carries them out, so the number is predicted.

# %% Your guess: GiB that PyTorch reserves for 7.3 GiB of tensors tags=["predict"]
guess = 0  # @param {type:"number"}


# %% Helper: carry out a list of allocations tags=["hide-input"]
class Card(CachingAllocator):
    """Also counts how often the card was full, so that segments were given back."""

    retries = 0  # torch.cuda.memory_stats()["num_alloc_retries"]

    def release_cached(self):
        self.retries += 1
        super().release_cached()


def watch(events, settings=DEFAULT, limit=math.inf):
    """Carry the events out. Return the card, allocated and reserved bytes after each,
    and where memory ran out."""
    card = Card(settings, limit)
    blocks, curve = {}, []
    for event in events:
        if event.size:
            try:
                blocks[event.tensor] = card.allocate(event.size)
            except OutOfMemory:
                return card, curve, event
        elif event.tensor in blocks:
            card.release(blocks.pop(event.tensor))
        curve.append((card.allocated, card.reserved))
    return card, curve, None


# %%
plan = resolve(fast, T4)
config = AutoConfig.for_model(**CONFIGS[fast.model])
# a copy, because the recorder goes on writing while the model is deleted
events = list(memory_trace(plan, config, rows=1, tokens=2048, shorter=0.75))
card, curve, _ = watch(events)
assert abs(card.peak_allocated / by_bill - 1) < 0.005  # the bill is right
print(f"{len(events):,} allocations and releases: ")
print(f"tensors take {card.peak_allocated / GIB:.1f} GiB")
course.reveal(guess, card.peak_reserved / GIB, "GiB")

# %% [markdown]
# ## 5. The production switch
# PyTorch reserves 27 % more than the tensors need. The shorter rows have left segments that fit *their* logits, 752 MiB
# in fp32. The longer row needs 1,002 MiB, so PyTorch takes new segments, and the old ones stay empty. One setting
# changes that:
#
# ```bash
# PYTORCH_ALLOC_CONF=expandable_segments:True python train.py
# ```
#
# Then one segment for all large tensors *grows* in pages of 20 MiB, so a longer row can use the memory of a shorter
# one. Set it before you import torch. (The older name `PYTORCH_CUDA_ALLOC_CONF` still works.) `cria train` sets it by
# itself, and can find the fastest set that fits and changes results by rounding only:
#
# ```bash
# cria plan kwanzaa --gpu t4 --fit fastest
# cria train kwanzaa --fit fastest
# ```

# %%
expandable = Settings(expandable_segments=True)
grown = CachingAllocator(expandable)
grown.release(grown.allocate(30 * MIB))
grown.allocate(32 * MIB)
print(f"{longer}: reserves {grown.reserved / MIB:.0f} MiB, not 62")

wide, wide_curve, _ = watch(events, expandable)
print(f"our example: reserves {wide.peak_reserved / GIB:.2f} GiB", end=", ")
print(f"not {card.peak_reserved / GIB:.2f}")


# %% Draw figure 4 tags=["hide-input"]
assert round(card.peak_reserved / card.peak_allocated, 2) == 1.27
sitting = results.read_json(results.COMMITTED / "h200-as-t4" / "second_sitting.json")
on_a_card = next(case for case in sitting["cases"] if case["name"] == "kwanzaa")
assert round(on_a_card["peak_reserved_bytes"] / GIB, 2) == 7.88
assert card.peak_reserved == replay(events).reserved_bytes
assert round((card.peak_reserved - wide.peak_reserved) / GIB, 1) == 1.4


def thinned(values, points=500):
    """The largest value of each of so many pieces."""
    width = -(-len(values) // points)
    return [max(values[n : n + width]) for n in range(0, len(values), width)]


def over_the_run(theme: Theme):
    """Allocated and reserved bytes over the run, without and with the setting."""
    drawn, axes = course.figure(height=3.2)
    width = -(-len(events) // 500)
    moments = [event.moment for event in events]
    first = next(n for n, moment in enumerate(moments) if "1,536" in moment)
    second = next(n for n, moment in enumerate(moments) if "2,048" in moment)
    last = next(n for n, each in enumerate(moments) if each.startswith("evaluation"))
    # the lines end below the names, because "load" is wider than its part
    axes.vlines((first, second, last), 0, 9.8, theme.quiet, ":", linewidth=0.8)
    parts = ((0, first, "load"), (first, second, "1,536"), (second, last, "2,048"))
    for begin, end, name in (*parts, (last, len(events), "eval.")):
        middle = (begin + end) / 2
        axes.text(middle, 10.5, name, ha="center", va="center", color=theme.ink)
    axes.set(xlabel="allocations and releases", ylabel="GiB", ylim=(0, 11))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    places = range(0, len(events), width)
    allocated = thinned([allocated / GIB for allocated, _ in curve])
    axes.fill_between(places, allocated, color=theme.series[0], alpha=0.35, linewidth=0)
    axes.plot(places, allocated, color=theme.series[0], linewidth=0.8, label="tensors")
    for values, name, color in (
        (curve, "reserved", 1),
        (wide_curve, "reserved, expandable", 2),
    ):
        reserved = thinned([reserved / GIB for _, reserved in values])
        axes.plot(places, reserved, color=theme.series[color], label=name)
    axes.grid(axis="y")
    drawn.legend(loc="outside upper center", ncols=3)
    return drawn


course.show(
    over_the_run,
    "Figure 4. The run with rows of 1,536 and then of 2,048 tokens; dotted lines "
    "part loading, both lengths and the evaluation. The bytes of "
    "tensors rise and fall with every micro-batch. Reserved bytes only rise, "
    "and most at the loss of the first longer row. With expandable segments they stay "
    "close above the largest bytes of tensors so far.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: how small may the card be?
# Does the run need the 9.3 GiB that PyTorch reserves? No, because on a smaller card PyTorch gives empty segments back.
# We search the smallest memory that suffices, by halving the range from 7.3 to 9.3 GiB.


# %% tags=["deep"]
def smallest(events, settings=DEFAULT):
    """The smallest memory, in steps of 2 MiB, in which the events can be carried
    out."""
    most = replay(events, settings)
    steps = range(
        most.allocated_bytes // (2 * MIB), most.reserved_bytes // (2 * MIB) + 1
    )
    place = bisect.bisect_left(
        steps, True, key=lambda step: watch(events, settings, 2 * MIB * step)[2] is None
    )
    return 2 * MIB * steps[place]


least = smallest(events)
for limit in (least, 1.02 * least, math.inf):
    tried = watch(events, limit=limit)[0]
    print(
        f"memory {limit / GIB:5.2f} GiB: reserved {tried.peak_reserved / GIB:.2f}, "
        f"full {tried.retries} times"
    )
    assert (tried.retries == 0) == (limit == math.inf)
least_wide = smallest(events, expandable)
print(f"with expandable segments {least_wide / GIB:.2f} GiB suffice")
assert 1.02 < least / card.peak_allocated < 1.08
assert least_wide < least
assert [round(each / GIB, 1) for each in (least, least_wide)] == [7.6, 7.4]

# %% [markdown] tags=["deep"]
# So there are three numbers: 7.3 GiB of tensors, 9.3 GiB reserved where there is plenty, and 7.6 GiB that the run must
# have. Near this smallest memory you pay with time: whenever the card is full, PyTorch waits for it, gives segments
# back and takes new ones. A speech model with rows of changing length reported about 30 % more time (NeMo, in the
# sources).

# %% [markdown] tags=["deep"]
# ### Deeper: an expandable segment from scratch
# With the setting there is one list of blocks. A tensor gets the smallest free block that is large enough, but the last
# block of the list only if no other is. If none is, the list grows at its end by as many pages of 20 MiB as are
# missing, and a free last block counts. Every rest is split off, also one below 1 MiB. We compare this with the
# package's model on 20 random scripts.


# %% tags=["deep"]
def grow(script):
    """The MiB that a script reserves with expandable segments."""
    blocks = []
    for word in script.split():
        if word.startswith("-"):
            merged = []
            for size, owner in blocks:
                owner = None if owner == word[1:] else owner
                if owner is None and merged and merged[-1][1] is None:
                    size += merged.pop()[0]
                merged.append((size, owner))
            blocks = merged
            continue
        name, size = word.split("=")[0], float(word.split("=")[1])
        fitting = [
            (have, b)
            for b, (have, owner) in enumerate(blocks[:-1])
            if owner is None and have >= size
        ]
        if fitting:
            have, b = min(fitting)
        else:  # the last block, if it is free, with as many pages as are missing
            have = blocks.pop()[0] if blocks and blocks[-1][1] is None else 0
            have += 20 * max(0, math.ceil((size - have) / 20))
            b = len(blocks)
        rest = [(have - size, None)] if have > size else []
        blocks[b : b + 1] = [(size, name), *rest]
    return sum(size for size, _ in blocks)


for words, _ in random_scripts(20):
    theirs, blocks = CachingAllocator(expandable), {}
    for word in words:
        if word.startswith("-"):
            theirs.release(blocks.pop(word[1:]))
        else:
            name, size = word.split("=")
            blocks[name] = theirs.allocate(round(float(size) * MIB))
    assert abs(grow(" ".join(words)) - theirs.reserved / MIB) < 1e-9
print(f"{longer}: {grow(longer):.0f} MiB; 20 random scripts agree with the package")

# %% [markdown] tags=["deep"]
# ### Deeper: rows of equal length, and two older settings
# If all rows are equally long, each row can use the segments of the row before it. But padding means more tokens to
# compute. Two other settings are older than expandable segments. `max_split_size_mb` forbids that blocks of this size
# or more are split, so that they stay whole for large tensors. `roundup_power2_divisions` rounds all sizes up, so that
# similar lengths ask for equal blocks.

# %% tags=["deep"]
padded = replay(memory_trace(plan, config, rows=1, tokens=2048, shorter=1.0))
lengths = [tokens for tokens, _ in row_lengths("train")]
for multiple in (2048, 512):
    filled = sum(multiple * math.ceil(tokens / multiple) for tokens in lengths)
    more = filled / sum(lengths) - 1
    print(f"rows padded to a multiple of {multiple:5,}: {more:.0%} more tokens")
print(f"all rows of 2,048 tokens: reserved {padded.reserved_bytes / GIB:.2f} GiB")
assert wide.peak_reserved < padded.reserved_bytes < card.peak_reserved
for name, other, gib in (
    ("max_split_size_mb=128", Settings(max_split_size=128 * MIB), 10.9),
    ("roundup_power2_divisions=8", Settings(roundup_power2_divisions=8), 9.3),
):
    found = replay(events, other).reserved_bytes / GIB
    print(f"{name:26} reserves {found:.1f} GiB")
    assert abs(found - gib) < 0.05

# %% [markdown] tags=["deep"]
# Padding helps, but expandable segments reserve less and compute no more tokens. Multiples of 512 would not help here,
# because 1,536 and 2,048 are such lengths already. Neither of the older settings helps this run. On a platform without
# expandable segments torch warns and goes on without them.
#
# How much does the allocator reserve in general? Over four sets of switches of this job it reserves 12 to 53 % more
# than the tensors need, and must have 2 to 8 % more. With expandable segments it reserves 2 to 11 % more, and must have
# 1 to 4 %. (These are replays of 2026-11-23: the recipe as it is; without checkpointing; this lesson's set; all logits
# with the usual preparation.)

# %% [markdown] tags=["deep"]
# ### Deeper: compile, one more switch for time
# Between a block's matrix multiplications there are chains of small operations. Each reads its tensors and writes its
# result, and autograd saves what it needs. `torch.compile` fuses such a chain, as [fused LoRA](fused_lora.py) does by
# hand: the chain goes through memory once, tile by tile, and is computed again in the backward pass. In plain Hugging
# Face code, compile each block:

# %% tags=["deep"]
print(compile_switch.PLAIN)

# %% [markdown] tags=["deep"]
# Here is the idea by hand, for the gate of a Llama. We count how many tensors of the size of $a$ are saved: by plain
# autograd, by hand, by the package's `fused`, and by torch's compiler.


# %% tags=["deep"]
def gate(a, b):
    return F.silu(a) * b


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # and not silu(a)
        out = torch.empty_like(a)
        tiles = zip(*(t.view(-1).split(1024) for t in (out, a, b)), strict=True)
        for o, x, y in tiles:  # all operations on a tile while it is in the cache
            o.copy_(F.silu(x) * y)
        return out

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        s = a.sigmoid()
        return grad * b * s * (1 + a * (1 - s)), grad * F.silu(a)


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
            f"{name:14}saves {kept.peak / a.nbytes:.0f}, off by {apart:.0e}; "
            f"first call {first:.4f} s, then {again:.4f}"
        )
        assert kept.peak == (3 if name == "plain" else 2) * a.nbytes
        assert apart < 1e-5
print(
    f"kernels that torch made: {metrics.generated_kernel_count - kernels}, "
    "one forward and one backward"
)

# %% [markdown] tags=["deep"]
# Three saved tensors become two. The first call takes as long as very many later ones, so a run must be long enough to
# earn it back. Ours has 42 steps, which would save 197 s by the estimate below, and how long a T4 compiles is not
# measured. On two CPU cores a compiled step of the two-layer model was no faster at all (committed results). For a T4
# the estimate is a third less time, which no card has measured yet. The complete command is `cria train kwanzaa --set
# tricks.compile=true`.

# %% tags=["deep"]
step_of = "peft=lora attention=best precision=best chunked_loss=true"
course.on_a_gpu("compile", off=step_of, on=f"{step_of} compile=true")
compiled_job = with_settings(whole, ["tricks.compile=true"])
print(diff(resolve(whole, T4), resolve(compiled_job, T4)))
a_step = [8 * 2048 * target.bill(each).seconds for each in (whole, compiled_job)]
print(*(f"{seconds:.1f} s a step" for seconds in a_step), sep="\n")
assert round(42 * (a_step[0] - a_step[1])) == 197

# %% [markdown] tags=["deep"]
# Does it save memory, too? The tensor `silu(a)` is 32 MiB in a block of our job. The bill counts it as saved, because
# the compiler chooses what it fuses. Suppose it were gone. How far would the peak fall?

# %% tags=["deep"]
spared = 2 * 2048 * target.shape.inner  # 16 bits, tokens, inner width
compiled = {moment: dict(lines) for moment, lines in table(fields).items()}
for moment in ("last block", "first block"):
    compiled[moment]["open block: saved"] -= spared
falls = (peak(table(fields)) - peak(compiled)) / MIB
print(f"{spared / MIB:.0f} MiB less in the block, {falls:.0f} MiB less at the peak")
assert peak(table(fields)) == peak(compiled)

# %% [markdown] tags=["deep"]
# The peak does not fall at all, because it is at the loss. The rule of this lesson says so.
#
# **`torch._dynamo hit config.recompile_limit (8)`.** This is one warning, and from then on torch runs new lengths
# uncompiled, slower than you think. The cause is that a graph was made for one length, and rows have many. Here twelve
# lengths go through the two blocks of a small Llama. (`backend="eager"` captures graphs and makes no kernels, which is
# enough to count them.) The cure is `dynamic=True`, one graph for any length, as our switch sets it.

# %% tags=["deep"]
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

# %% [markdown] tags=["deep"]
# In addition to lengths, other things need another graph: a mask or none, one row or several, training or evaluation.
# For our blocks that can be twelve graphs, so the switch also raises the limit.

# %% [markdown]
# ## 6. Where it breaks
# **`does not fit`, where the savings said that it would.** LoRA saves 9,846 MiB alone, and the paged optimizer 9,428.
# From 32,046 MiB that would leave 12,773, which fits. But both remove the same optimizer states, so choose a switch
# that shrinks another line at the peak:

# %%
for other in ("paged_optimizer", "gradient_checkpointing"):
    found = course.bill(toggles.with_only(whole, ["peft", other]))
    tensors, needs = found.peak_bytes / GIB, found.needed_bytes / GIB
    print(f"LoRA and {other}: {tensors:.1f} GiB of tensors, needs {needs:.1f} GiB")
    print(f"  with CUDA's own and what may be reserved: {found.verdict} on a T4")

# %% [markdown]
# **`... is reserved by PyTorch but unallocated.`** If a card has only 7.5 GiB left, our example ends with the message
# below. PyTorch has then given back all empty segments, which would be enough in 7.6 GiB. So "unallocated" is memory
# that is stuck: free blocks in segments that still hold a tensor. Add it to what is free. If the sum is at least what
# PyTorch tried to allocate, memory is fragmented, and expandable segments can help: here 7.4 GiB then suffice. If not,
# lower the peak.

# %%
small, _, failed = watch(events, limit=int(7.5 * GIB))
free = (small.limit - small.reserved) / MIB
unallocated = (small.reserved - small.allocated) / MIB
print(f"CUDA out of memory. Tried to allocate {failed.size / MIB:.0f} MiB, of which")
print(
    f"{free:.0f} MiB is free. {small.allocated / GIB:.2f} GiB is allocated by PyTorch,"
)
print(f"and {unallocated:.0f} MiB is reserved by PyTorch but unallocated.")
print(f"It happens in the {failed.moment}.")
print(f"(free and unallocated: {free + unallocated:,.0f} MiB)")
assert free < failed.size / MIB < free + unallocated

# %% [markdown] tags=["deep"]
# ### Deeper: why `torch.cuda.empty_cache()` in every step does not help
# PyTorch gives free segments back by itself when the card is full, and stuck blocks stay where they are. Only others
# gain memory: other processes, and [paged states](optimizers.py), which CUDA manages. Your run loses time, because it
# must take the segments again.

# %% tags=["deep"]
for script in ("a=30 -a", "a=5 b=5 c=5 d=5 -a -c"):
    cache = play(script)
    before = cache.reserved()
    cache.empty()
    print(f"{script:24} reserved {before:.0f} MiB, then {cache.reserved():.0f}")

# %% [markdown]
# ## 7. Exercises
# 1. **Predict**: in the whole job, the loss has 1,516.2 MiB, of which the logits of a chunk of 256 tokens take 250.5.
#    The second highest moment is a block's backward pass, 1,494.8 MiB, and all others are below 1,400. By how many MiB
#    does the peak fall if you use chunks of 64 tokens (a quarter of the logits) and save 32 MiB in the block?
# 2. **Build**: fill in `stuck(segments)`, which returns how many MiB are free and cannot be given back. The segments
#    are as in `Cache`.
# 3. **Reach**: fill in `fair(switches)`, which returns a dict from each switch to its fair share in MiB, with all
#    others off. Shapley's fair share is a mean over all orders of the switches. In each order, switch them on one after
#    the other, and note what each saves at its turn. Use `peak_with(switches)` from section 3. (All orders are
#    allowed.)

# %% tags=["exercise"]
mib_of_both = None


def stuck(segments):
    """Return MiB. FILL ME IN."""


def fair(switches):
    """Return a dict from each switch to MiB. FILL ME IN."""


# %% Check the exercises tags=["hide-input"]
def of_stuck(answer):
    free_whole = "a segment that is free as a whole can be given back"
    lives = "in a segment where a tensor lives, all free blocks are stuck"
    cases = (
        ([[(5, None), (5, "b"), (10, None)]], 15, lives),
        ([[(30, None)]], 0, free_whole),
        (
            [[(30, None)], [(5, None), (5, "b"), (5, None), (5, "d")], [(32, "e")]],
            10,
            free_whole,
        ),
        ([[(8, "a"), (12, None)], [(2, None), (18, "b")]], 14, lives),
        ([], 0, "without segments nothing is stuck"),
    )
    for segments, right, hint in cases:
        if (found := answer(segments)) is None:
            raise NotImplementedError
        assert abs(found - right) < 1e-9, (
            f"{found} instead of {right} for {segments}; {hint}"
        )


def shares_of(switches):
    """Shapley's shares, by the weights of the sets that come before a switch."""
    n = len(switches)
    shares = dict.fromkeys(switches, 0.0)
    for field in switches:
        others = [other for other in switches if other != field]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - 1 - size)
            for on in itertools.combinations(others, size):
                gain = peak_with(on) - peak_with([*on, field])
                shares[field] += weight / math.factorial(n) * gain
    return shares


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
        together = peak_with([]) - peak_with(some)
        assert abs(sum(found.values()) - together) < 1e-3, (
            "the shares must add up to what all of them save together, in MiB"
        )
        for field, right in shares_of(some).items():
            assert abs(found[field] - right) < 1e-3, (
                f"{field} has {found[field]:,.0f} MiB; "
                "is every order in it, each as often as any other?"
            )


final = sums(table(fields))
assert round(final["loss"] / MIB, 1) == 1516.2
assert round(final["last block"] / MIB, 1) == 1494.8
assert round(table(fields)["loss"]["logits"] / MIB, 1) == 250.5
assert final["last block"] - spared > final["loss"] - 0.75 * 250.5 * MIB
rest = [name for name in final if name not in ("loss", "last block")]
assert max(final[name] for name in rest) < 1400 * MIB
course.check(
    1,
    mib_of_both,
    course.about(
        (peak(table(fields)) - (final["last block"] - spared)) / MIB,
        "which moment is the highest when both are done, and how high is it?",
    ),
    "a number of MiB",
)
course.check(2, stuck, of_stuck, "a function (segments) -> a number of MiB")
course.check(
    3,
    fair,
    of_fair,
    "a function (switches) -> a dict from each switch to a number of MiB",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # the loss falls by 188 MiB, so the block is the peak
# mib_of_both = 1516.2 - (1494.8 - 32)
#
#
# def stuck(segments):
#     in_use = [each for each in segments if any(name for _, name in each)]
#     return sum(size for each in in_use for size, name in each if name is None)
#
#
# def fair(switches):
#     shares = dict.fromkeys(switches, 0)
#     orders = list(itertools.permutations(switches))
#     for order in orders:
#         for n, switch in enumerate(order):
#             gain = peak_with(order[:n]) - peak_with(order[: n + 1])
#             shares[switch] += gain / len(orders)
#     return shares
# ```
#
# </details>
#
# ## In one breath
# - **The rule**: a switch saves at most what it removes at the moment of the peak, and less if the peak then moves.
# - **Together** the twelve switches save 30,530 of 32,046 MiB, and alone they would claim 41,327.
# - **Where memory is left over**, switch off what costs time: checkpointing first. `cria train kwanzaa --fit fastest`
#   does it for you.
# - **A card limits reserved bytes**, and free memory goes back to it only as whole segments. So 7.3 GiB of tensors
#   reserve 9.27 GiB in our example, and 7.83 GiB with expandable segments, which change no number of the run. (Both are
#   predicted. With them [an H200](../docs/benchmarks.md#a-first-sitting-on-an-h200), held to a T4's rules, reserved
#   7.88.)
# - **When not**: if little is "reserved by PyTorch but unallocated", no setting helps.
#
# ## Sources
# - PyTorch, `c10/cuda/CUDACachingAllocator.cpp` at commit 001074d, class `DeviceCachingAllocator`: `malloc` (what is
#   tried before the error, and its words), `get_free_block`, `should_split`, `try_merge_blocks`,
#   `release_cached_blocks`, `try_allocate_expandable_block`. Its sizes: `c10/core/AllocatorConfig.h` of torch 2.13.
# - PyTorch, *CUDA semantics*, "Memory management" and "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
# - NVIDIA NeMo, pull request 9061, 2024: 30 % overhead near the limit with batches of changing shapes, and its cure.
# - *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation*,
#   doi:10.1145/3620665.3640366, sections 4 and 5 (Ansel and others, 2024). `torch/_dynamo/convert_frame.py` of 2.13.
# - *A Value for n-Person Games* (Shapley, 1953; exercise 3).
# - torchtune's README, "Optimization flags": a ladder on an A100, stacked only. Hugging Face's documentation has each
#   switch alone.
# - Lengths of rows: `data/kwanzaa_lengths.json`, in SmolLM2's tokens.
# - Ours: `cria_tricks/bill/moments.py`, `cria_tricks/predict/allocator.py`, `cria_tricks/predict/memory_trace.py`,
#   `cria_tricks/techniques/compile.py`, `benchmarks/bench_together.py`, `tests/memory/test_allocator.py`,
#   `tests/techniques/test_compile.py`.
