# ---
# jupyter:
#   question: How can AdamW's two numbers for every trained weight take less memory, and when is that worth it?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Optimizer states: 8-bit AdamW and paging
# > **Promise.** AdamW keeps eight bytes of states for every trained weight. With LoRA these are 86 MiB, but in full
# > fine-tuning of the same model they are 9.2 GiB, more than half of a T4. You will build 8-bit AdamW, which saves 5.4
# > GiB of them, and paged states, with which the run should fit (predicted). You will also know when paging slows every
# > step down.
# >
# > **Card.** saves three quarters of AdamW's states with 8 bits, but none of an embedding's; with paging, large states
# > leave the card while something else needs the room / costs a rounding of both moments in every step; PCIe traffic,
# > but only when the card is full / claim: 8 bits approximate, moving pages exact bit for bit / about 25 minutes /
# > after [NF4](nf4.py)

# %% Imports and settings tags=["hide-input"]

import warnings
from functools import partial
from itertools import pairwise
from unittest import mock

import bitsandbytes as bnb
import torch

from cria_tricks import course
from cria_tricks.course import (
    CARDS,
    T4,
    Target,
    Theme,
    diff,
    find_shape,
    resolve,
    results,
    tables,
    with_settings,
)
from cria_tricks.course import longest_row as longest
from cria_tricks.course import memory_bill as estimate
from cria_tricks.course import time_bill as step
from cria_tricks.techniques import adamw_8bit, paged_optimizer

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# AdamW keeps two running means, its *moments*, for each trained weight: $m$ of the gradient $g$, and $v$ of $g^2$. In
# fp32 they take 8 bytes. 8-bit AdamW keeps a byte for each, and one fp32 scale for every 256 bytes:
# $2 + 2 \cdot 4 / 256 = 2.03$ bytes. A [paged optimizer](../docs/glossary.md#paged-optimizer) keeps the bytes as they
# are, but in pages that may leave the card.
#
# After [NF4](nf4.py) the peak of our job is 1,550 MiB, and only 86 MiB of that are states, because LoRA trains just 11
# million weights. So we also bill a run that trains all 1,236 million weights. It has the earlier switches except for
# LoRA, NF4, the chunked loss and lean preparation, which here do not work with it. Its states take 9,428 MiB in 32
# bits. How many with `adamw_8bit`, if transformers keeps 32 bits for the embedding (263 of the 1,236 million weights)?

# %% Your guess: MiB of 8-bit states, if all weights train tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Print the bills of six runs tags=["hide-input"]
before, after = course.so_far("nf4"), course.so_far("optimizers")
full = with_settings(
    course.so_far("mixed_precision"),
    [f"tricks.{off}" for off in ("peft=none", "chunked_loss=false")]
    + ["tricks.lean_preparation=false"],
)
shape = find_shape(full.model)


def state_bytes(recipe):
    lines = course.bill(recipe).lines
    return sum(line.bytes for line in lines if line.name == "optimizer states")


EIGHT, PAGED = "tricks.optimizer=adamw_8bit", "tricks.paged_optimizer=true"
print(f"{'MiB':28}{'states':>10}{'peak':>10}{'needed':>10}")
peaks = {}
for name, recipe in (("LoRA", before), ("all weights", full)):
    for how, on in (
        ("32 bits", []),
        ("8 bits", [EIGHT]),
        ("8 bits, paged", [EIGHT, PAGED]),
    ):
        bill = course.bill(with_settings(recipe, on))
        peaks[name, how] = bill.peak_bytes / MIB
        verdict = "fits" if bill.fits else "does not fit"
        label, states = f"{name}, {how}", state_bytes(with_settings(recipe, on))
        print(
            f"{label:28}{states / MIB:10,.1f}{bill.peak_bytes / MIB:10,.1f}"
            f"{bill.least_bytes / MIB:10,.1f}  {verdict}"
        )
full_8bit = with_settings(full, [EIGHT])
full_paged = with_settings(full, [PAGED])
course.reveal(guess, state_bytes(full_8bit) / MIB, "MiB")
assert course.bill(after).peak_bytes / MIB == peaks["LoRA", "8 bits, paged"]
found = [round(peaks["LoRA", how]) for how in ("32 bits", "8 bits", "8 bits, paged")]
assert found == [1550, 1485, 1473]
found = [round(peak / 1024, 1) for (name, _), peak in peaks.items() if name != "LoRA"]
assert found == [20.4, 15.0, 11.2]
assert round(state_bytes(full) / MIB) == 9429  # 9,428.5
saved = (state_bytes(full) - state_bytes(full_8bit)) / 2**30
assert round(saved, 1) == 5.4

# %% [markdown]
# In our job 8 bits lower the peak from 1,550 to 1,485 MiB. The 1,473 do not count paged states, because these may
# leave; but while the card has room, they stay on it. Where all weights train, the peak falls from 20.4 GiB to 15.0,
# and to 11.2 without the pages. Only then the run fits a T4.
#
# At 2.03 bytes for all weights the states would take 2,394 MiB. The other 1,495 MiB belong to the embedding: the paper
# found 8 bits unstable there. bitsandbytes also keeps 32 bits for a tensor of fewer than 4,096 elements.
#
# ## 2. From scratch, in three steps
# ### Step 1: look at the numbers that must be stored
# For real moments, a small model learns to guess the next byte of training rows from the eight bytes before.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks.course import find_rows as find

rows = find("nguzo_saba", "train").rows  # 32 short rows of the package
text = "\n".join(part["content"] for row in rows for part in row.messages)
data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
SETTINGS = {"lr": 3e-3, "weight_decay": 0.01}


def train(make, steps=200):
    """Return losses, weights and optimizer; start and batches are always the same."""
    torch.manual_seed(1)
    inner, outer = nn.Linear(8 * 32, 128, bias=False), nn.Linear(128, 256)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), inner, nn.GELU(), outer)
    optimizer, losses = make(list(model.parameters())), []
    for _ in range(steps):
        batch = data[torch.randint(len(data) - 8, (256, 1)) + torch.arange(9)]
        loss = F.cross_entropy(model(batch[:, :8]), batch[:, 8])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), list(model.parameters()), optimizer


exact_losses, weights, adamw = train(lambda w: torch.optim.AdamW(w, **SETTINGS))
v = adamw.state[weights[2]]["exp_avg_sq"].view(-1, 256)  # of the last matrix
shares = v / v.amax(dim=1, keepdim=True)
lost = (shares < 1 / 510).float().mean()  # half of an even level
print(f"with 256 even levels from 0 to 1, {lost:.1%} of v would become zero")
assert lost > 0.03

# %% [markdown]
# ### Step 2: levels that follow the size, and a step in fp32
# Second moments spread over twice as many powers of ten as gradients, because they are squares. Therefore the *dynamic
# map* gives levels to each power of ten: 128 between 0.1 and 1 of the scale, 64 between 0.01 and 0.1, and so on down to
# 2. For $m$ half of them are negative. A code is the index in the sorted list of levels. Every 256 numbers share a
# scale, as in [NF4](nf4.py).
#
# A step unpacks the moments of one matrix to fp32, makes AdamW's usual update, and packs them again. Between two steps
# only the bytes exist.


# %%
def dynamic_map(signed):
    levels = [0.0, 1.0]
    for zeros in range(7):  # factors of ten below the scale
        # a byte holds the zeros, a one, for m a sign, and the fraction
        fraction_bits = 6 - zeros + (not signed)
        cuts = torch.linspace(0.1, 1, 2**fraction_bits + 1)
        sizes = 10.0**-zeros * (cuts[:-1] + cuts[1:]) / 2  # middles between cuts
        levels += sizes.tolist()
        if signed:
            levels += (-sizes).tolist()
    return torch.tensor(sorted(levels))


MAPS = dynamic_map(signed=True), dynamic_map(signed=False)  # for m, for v


def pack(x, levels):
    """Return the code of each number, and the scale of each 256: the largest."""
    groups = x.reshape(-1, 256)
    scales = groups.abs().amax(dim=1, keepdim=True)
    middles = (levels[:-1] + levels[1:]) / 2
    # a group of zeros has the scale 0, by which nothing can be divided
    codes = torch.bucketize(groups / scales.clamp(min=1e-38), middles)
    # a negative number that becomes zero keeps its sign, as on a GPU
    codes -= ((groups < 0) & (levels[codes] == 0)).long()
    return codes.to(torch.uint8), scales


def unpack(codes, scales, levels):
    return levels[codes.int()] * scales


def adamw_(weight, grad, m, v, steps, lr, decay):
    """Update a weight and both moments in place, as torch.optim.AdamW does."""
    weight.mul_(1 - lr * decay)
    m.lerp_(grad, 1 - 0.9)  # m = 0.9 m + 0.1 g
    v.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)  # v = 0.999 v + 0.001 g^2
    root = (v.sqrt() / (1 - 0.999**steps) ** 0.5).add_(1e-8)
    weight.addcdiv_(m, root, value=-lr / (1 - 0.9**steps))


class AdamW8:
    def __init__(self, weights, lr, weight_decay=0.0, maps=MAPS):
        self.weights, self.lr, self.decay = weights, lr, weight_decay
        self.maps, self.steps = maps, 0
        self.moments = [
            [pack(torch.zeros_like(weight), levels) for levels in maps]
            for weight in weights
        ]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for weight, packed in zip(self.weights, self.moments, strict=True):
            m, v = unpack(*packed[0], self.maps[0]), unpack(*packed[1], self.maps[1])
            # our tensors are multiples of 256; bitsandbytes also takes a shorter group
            groups, grad = weight.view(-1, 256), weight.grad.view(-1, 256)
            adamw_(groups, grad, m, v, self.steps, self.lr, self.decay)
            packed[:] = pack(m, self.maps[0]), pack(v, self.maps[1])


# %% Draw figure 1 tags=["hide-input"]
even = torch.linspace(0, 1, 256)


def spread_of_moments(theme: Theme):
    """Second moments over the largest of their group, above the levels of two maps."""
    drawn, axes = course.figure(height=2.9)
    found = shares[shares > 0].log10().flatten()
    axes.hist(
        found.numpy(),
        bins=96,
        range=(-8, 0),
        density=True,
        color=theme.quiet,
        alpha=0.6,
    )
    for place, levels in enumerate((MAPS[1], even)):
        at = levels[levels > 0].log10()
        heights = [-0.09 - 0.12 * place] * len(at)
        color = theme.series[place]
        axes.scatter(at, heights, marker="|", s=60, color=color, linewidth=1)
    axes.set_yticks(
        [-0.21, -0.09, 0, 0.2, 0.4, 0.6], ["even", "dynamic", "0", "0.2", "0.4", "0.6"]
    )
    axes.set_xticks(range(-8, 1), [f"$10^{{{n}}}$" for n in range(-8, 1)])
    axes.set(
        xlabel="second moment / largest of its group",
        ylabel="share (density)",
        xlim=(-8, 0.1),
    )
    return drawn


course.show(
    spread_of_moments,
    "Figure 1. Real second moments, and the levels of two maps of a byte. Numbers left "
    "of a map's lowest level become zero; the dynamic map reaches much further left.",
)

# %% [markdown]
# ### Step 3: states in pages
# States are used in the optimizer's step only, and could be in the host's memory at other times. A paged optimizer cuts
# them into *pages*. A page that is used must be on the card. If the card is full, the page whose last use is longest
# ago leaves (*least recently used*, LRU). On a GPU, CUDA's *unified memory* does nearly this. Here we build a *model*
# of it, which counts the pages that move.

# %%
from collections import OrderedDict

PAGE = 256  # numbers of a page


class Card:
    """Room for so many pages, and a host behind a bus."""

    def __init__(self, room):
        self.room = room
        self.here, self.host = OrderedDict(), {}  # pages by their key
        self.out = self.back = 0  # pages that moved

    def keep(self, room):
        """Let pages leave until no more than so many are here."""
        while len(self.here) > room:
            key, page = self.here.popitem(last=False)  # last used longest ago
            self.host[key] = page
            self.out += 1

    def page(self, key):
        if key not in self.here:
            self.keep(self.room - 1)
            if key in self.host:
                self.here[key] = self.host.pop(key)
                self.back += 1
            else:  # a new page comes from nowhere
                self.here[key] = torch.zeros(PAGE)
        self.here.move_to_end(key)
        return self.here[key]


def paged_step(weights, card, steps, order):
    """AdamW page by page: an update needs only its own gradient and moments."""
    places = []  # of all pages: which weight, and where in it
    for n, weight in enumerate(weights):
        places += [(n, at) for at in range(0, len(weight), PAGE)]
    for n, at in order(steps, places):
        weight, grad = weights[n][at : at + PAGE], weights[n].grad[at : at + PAGE]
        m, v = card.page((n, at, "m")), card.page((n, at, "v"))
        adamw_(weight, grad, m, v, steps, lr=0.1, decay=0.1)


# %% Draw figure 2 tags=["hide-input"]
def aside(theme: Theme):
    """A card in a forward pass and in the optimizer's step."""
    sketch = course.Sketch(theme, 51.5, 11)
    times = ((5, "a long forward pass", 1), (30, "the optimizer's step", 4))
    for left, when, here in times:
        sketch.text(left, 0.8, when, align="left", quiet=True)
        wide = 20 - 3 * here
        name = "activations" if here == 1 else "weights"
        sketch.tensor(left, 1.8, wide - 0.4, 2.6, name, color=0)
        for n in range(4):
            at = left + 3 * n
            on_card = n >= 4 - here
            if on_card:
                place = left + wide + 3 * (n - 4 + here)
                sketch.tensor(place, 1.8, 2.6, 2.6, str(n), color=1)
            name = "" if on_card else str(n)
            sketch.tensor(at + 8, 7.4, 2.6, 2.6, name, color=1, kept=not on_card)
    for top, name in ((3.1, "card"), (8.7, "host")):
        sketch.text(0, top, name, align="left")
    sketch.arrow((17.2, 4.8), (17.2, 7.0))
    sketch.text(17.8, 5.9, "out", align="left", quiet=True)
    sketch.arrow((42.2, 7.0), (42.2, 4.8))
    sketch.text(42.8, 5.9, "back", align="left", quiet=True)
    return sketch.figure


course.show(
    aside,
    "Figure 2. A long forward pass pushes three of four pages to the host; "
    "the optimizer's step fetches them.",
)

# %% [markdown]
# ## 3. Prove it
# **8 bits** are *approximate*, so we need a bound. For $v$, the highest power of ten, from 0.1 to 1 of the scale, has
# $2^7$ levels that lie $0.9 / 128$ apart. A number moves by at most half of that, and the smallest one there is 0.1. So
# it moves by at most $\frac{0.45}{128} / 0.1 = 3.5\,\%$ of itself. Each power of ten below has half as many levels,
# which doubles that.

# %%
codes, scales = pack(v, MAPS[1])
moved = (unpack(codes, scales, MAPS[1]) - v).abs() / v
for power, bound in ((1, 4.5 / 128), (2, 4.5 / 64), (3, 4.5 / 32)):
    within = (shares > 10.0**-power) & (shares <= 10.0 ** (1 - power))
    worst = moved[within].max().item()
    print(f"from 10^-{power} on: moved by {worst:.2%} of itself, bound {bound:.2%}")
    assert worst < bound

losses_8bit, weights_8bit, optimizer = train(lambda w: AdamW8(w, **SETTINGS))
pieces = [part for packed in optimizer.moments for pair in packed for part in pair]
kept = sum(part.nbytes for part in pieces)
assert kept == sum(weight.numel() for weight in weights_8bit) * (2 + 8 / 256)
final_32, final_8 = exact_losses[-20:].mean(), losses_8bit[-20:].mean()
print(f"loss {final_32:.4f} in 32 bits, {final_8:.4f} in 8")
assert abs(final_8 - final_32) < 0.03

# %% [markdown]
# The small model learns as well with a quarter of the bytes. **Paging** is *exact*, because it only moves bytes: every
# weight must have the same bits as with torch's AdamW, on a card of any size. There are 80 pages, always used in the
# same order. With room for 80 nothing moves. With room for 79, how many pages come back in each step?

# %% Your guess: pages that come back in each step, with room for 79 tags=["predict"]
pages_back = 0  # @param {type:"number"}

# %%
SIZES, STEPS, PAGES = (4096, 2048, 4096), 5, 80


def run(card, less=PAGES, order=lambda steps, places: places):
    """Take five steps in pages and in torch, and return whether all bits agree.

    Before each step, only ``less`` pages may stay on the card.
    """
    torch.manual_seed(1)
    ours = [torch.randn(size) for size in SIZES]
    theirs = [nn.Parameter(weight.clone()) for weight in ours]
    adamw = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1, foreach=False)
    for steps in range(1, STEPS + 1):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn_like(mine)
        card.keep(less)
        paged_step(ours, card, steps, order)
        adamw.step()
    return all(map(torch.equal, ours, theirs))


for room in (2, 40, 79, 80):
    card = Card(room)
    assert run(card)
    # the first step makes the pages, the others fetch them
    assert card.back == (0 if room == PAGES else (STEPS - 1) * PAGES)
    if room == 79:
        course.reveal(pages_back, card.back / (STEPS - 1), "pages")
card = Card(PAGES)  # room for all in the step, but not in the forward pass
assert run(card, less=30)
assert card.back == card.out == (STEPS - 1) * (PAGES - 30)

# %% Draw figure 3 tags=["hide-input"]
rooms = [2, *range(10, 80, 10), 78, 79, 80, 84]
thrashing, stepping = [], []
for room in rooms:
    run(small := Card(room))
    thrashing.append(small.back / (STEPS - 1))
    run(large := Card(PAGES), less=room)
    stepping.append(large.back / (STEPS - 1))


def cliff(theme: Theme):
    """Pages that come back in a step, against the pages that there is room for."""
    drawn, axes = course.figure(height=2.7)
    axes.plot(rooms, thrashing, color=theme.series[1], label="short in the step")
    axes.plot(rooms, stepping, color=theme.series[0], label="short in forward only")
    axes.set(
        xlabel="room for so many of 80 pages",
        ylabel="pages back, each step",
        ylim=(0, 88),
        xlim=(0, 84),
    )
    axes.grid(axis="y")
    axes.legend(loc="lower left")
    return drawn


course.show(
    cliff,
    "Figure 3. If only the forward pass is short of room, just the pages that were too "
    "many move. If the optimizer's step is short, all pages move until all fit.",
)

# %% [markdown]
# In our model all 80 pages come back, whether the card is short by one page or by 78. LRU sends away the page that was
# not used for longest, and in a fixed order that is the very page that is needed next. This is *thrashing*. If only the
# forward pass is short of room and pushes 50 pages out, then just these 50 come back.

# %% [markdown] tags=["deep"]
# ### Deeper: against the package and bitsandbytes, on a CPU and on a GPU
# bitsandbytes has no kernel for 8-bit states on a CPU. It unpacks, updates and packs in torch, and it finds codes in a
# table of 65,536 places. So its rounding and ours may differ within the width of an entry, $2^{-15}$ of the scale.


# %% tags=["deep"]
def of_bnb(weights, **settings):
    # the small model has tensors of fewer than 4,096 elements
    return bnb.optim.AdamW8bit(weights, min_8bit_size=256, **settings)


def same(first, second):
    return all(map(torch.equal, first, second))


def optimize(make):
    """Return the weights after five steps, with the gradients of `run`."""
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = make(weights, lr=0.1, weight_decay=0.1)
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weights


for levels, signed in zip(MAPS, (True, False), strict=True):
    assert torch.equal(levels, adamw_8bit.dynamic_levels(signed))
    assert torch.equal(levels, bnb.functional.create_dynamic_map(signed))
_, packages, _ = train(lambda w: adamw_8bit.AdamW8bit(w, **SETTINGS), steps=1)
_, first, one = train(lambda w: AdamW8(w, **SETTINGS), steps=1)
assert same(first, packages)  # bit for bit
losses_bnb, _, _ = train(lambda w: of_bnb(w, **SETTINGS))
_, their_first, their_one = train(lambda w: of_bnb(w, **SETTINGS), steps=1)
for weight, mine, packed in zip(their_first, first, one.moments, strict=True):
    assert torch.allclose(weight, mine, rtol=0, atol=1e-6)
    state = their_one.state[weight]
    for number, levels in enumerate(MAPS):
        codes, scales = packed[number]
        assert torch.equal(scales.flatten(), state[f"absmax{number + 1}"])
        their_codes = state[f"state{number + 1}"].view(-1, 256)
        ours, theirs = (unpack(some, scales, levels) for some in (codes, their_codes))
        neighbours = (codes.int() - their_codes.int()).abs() <= 1
        assert (neighbours | ((ours - theirs).abs() <= 2**-15 * scales)).all()
final_bnb = losses_bnb[-20:].mean()
print(f"loss {final_8:.4f} with ours, {final_bnb:.4f} with bitsandbytes'")
assert abs(final_bnb - final_32) < 0.03

in_torch = optimize(partial(torch.optim.AdamW, foreach=False))
for room in (2, 40, 79, 80):  # the package's pager moves as much as ours
    card, pager = Card(room), paged_optimizer.Pager(room, PAGE)
    in_pages = optimize(partial(paged_optimizer.PagedAdamW, pager=pager))
    assert run(card)
    assert same(in_pages, in_torch)
    moved_bytes = (pager.bytes_to_host, pager.bytes_to_device)
    assert moved_bytes == (4 * PAGE * card.out, 4 * PAGE * card.back)

# %% [markdown] tags=["deep"]
# On a CUDA card one kernel does it all. On an H200 its steps followed our reference (`tests/gpu/test_numbers.py`). By
# its source, it differs from the CPU in three places:
#
# - *Rounding.* The kernel takes the nearest level. But a negative $m$ that would become zero goes to the level below,
#   so it keeps its sign. Our `pack` does the same. A CPU's table has no entry for zero, so even zero becomes a small
#   number.
# - *Weight decay.* The kernel shrinks the weight after the step. A CPU does so before it, like torch and ours.
# - *A gradient that is not finite.* The kernel sets both moments of that single weight to zero and leaves the weight as
#   it is. On a CPU the scale of its group becomes infinite, and after the next step all 256 weights of it are `nan`.

# %% tags=["deep"]
x = torch.zeros(1, 256)
x[0, :3] = torch.tensor([1, -1e-7, 1e-7])  # the first is the largest
on_a_card = unpack(*pack(x, MAPS[0]), MAPS[0])[0]
codes, scales = torch.ops.bitsandbytes.quantize_blockwise(x, MAPS[0], 256)
at_cpu = unpack(codes, scales[:, None], MAPS[0])[0]
for name, found in (("as on a card", on_a_card), ("on a CPU", at_cpu)):
    print(
        f"{name:13} -1e-07 becomes {found[1]:.1e}, 1e-07 {found[2]:.1e}, "
        f"and 0 {found[3]:.1e}"
    )
assert on_a_card[1:4].tolist() == [MAPS[0][MAPS[0] < 0].max(), 0, 0]
assert at_cpu.abs().min() > 1e-5

# %% [markdown]
# ## 4. What it costs
# **8 bits.** They are more work for each number, but fewer bytes to read. On a GPU these nearly cancel: torchtune
# measured 4.7 % fewer tokens a second and 19.6 % less memory (all weights of Llama-3.2-3B, A100). Here is the loss of
# SmolLM2-135M after 20 steps of LoRA, with three seeds:

# %% Print what was measured tags=["hide-input"]
study = results.study("quality") or {}
runs = [run for run in study.get("runs", ()) if run["case"] in ("fp32", "adamw_8bit")]
course.show_table(
    tables.quality(runs) if runs else "no committed results next to this package"
)

# %% [markdown]
# 8 bits cost a ten-thousandth of loss, where the seeds lie 0.03 apart. That is LoRA on a CPU; we measured neither full
# fine-tuning nor a long run.
#
# **Paging** costs nothing while the card has room. If the optimizer's step lacks it, all states cross PCIe twice in
# every step. A T4's link carries 16 GB/s in one direction, and bitsandbytes' documentation expects half of that at
# best. We compare the travel with a step's time in full fine-tuning (predicted):

# %% Print the seconds of work and of travel tags=["hide-input"]
link = CARDS["t4"].link_rate / 2
paged_bytes, rooms_of = {}, {}
print("MiB                          in pages      room   seconds: work    travel")
for optimizer in ("adamw", "adamw_8bit"):
    for k in (1, 8):
        settings = [
            f"tricks.optimizer={optimizer}",
            f"tricks.gradient_accumulation={k}",
        ]
        chosen = with_settings(full, settings)
        bill = course.bill(with_settings(chosen, [PAGED]))
        paged_bytes[optimizer] = state_bytes(chosen) - state_bytes(
            with_settings(chosen, [PAGED])
        )
        # torch keeps the memory of its peak until the optimizer's step
        room = T4.memory_bytes - bill.least_bytes
        rooms_of[k] = room / MIB
        work = step(chosen, shape, CARDS["t4"]).seconds
        travel = 2 * paged_bytes[optimizer] / link
        label = f"{optimizer}, {k} x 2,048 tokens"
        print(
            f"{label:28}{paged_bytes[optimizer] / MIB:9,.0f}{room / MIB:10,.0f}"
            f"{work:16.1f}{travel:10.1f}"
        )
        assert room < paged_bytes[optimizer]
assert [round(room) for room in rooms_of.values()] == [3248, 1465]
peak_8 = course.bill(
    with_settings(full, [EIGHT, PAGED, "tricks.gradient_accumulation=8"])
)
assert round(peak_8.peak_bytes / 2**30, 1) == 12.9

# %% [markdown]
# Torch keeps the memory of its peak, so at most 15,095 - 398 (CUDA's own) - 11,450 = 3,247 MiB are left for states.
# With eight micro-batches it is 1,464, because gradients are then in memory during the forward pass, and the peak is
# 12.9 GiB. Even in 8 bits the states are more, so in our model all of them travel in every step. With eight
# micro-batches, by [gradient accumulation](gradient_accumulation.py), the travel adds 14 % in 32 bits and 6 % in 8. So
# take both switches, and many micro-batches. The host must hold what leaves: 9.2 GiB in 32 bits, of Colab's 11.8.
#
# We timed no full card. (Deeper: torchtune's report.)

# %% [markdown] tags=["deep"]
# ### Deeper: torchtune's figures, our benchmarks, and why a CPU shows so little
# torchtune reports 46 % less peak memory for *paged* 8-bit AdamW of Llama-3-8B than for 8-bit AdamW, at equal speed.
# That is torch's count, which does not see pages, so they may never have left. Paged 32-bit AdamW took over 6 s a step
# there, because large states went out and came back. Our benchmarks train a copy of whole blocks, because an adapter is
# too small to show anything. Without a GPU here, the tables are from two CPU cores.

# %% tags=["deep"]
step_of = "peft=side_network attention=best precision=best gradient_checkpointing=true"
course.on_a_gpu("adamw_8bit", off=step_of, on=f"{step_of} optimizer=adamw_8bit")
course.on_a_gpu("paged_optimizer", off=step_of, on=f"{step_of} paged_optimizer=true")

# %% [markdown] tags=["deep"]
# On the CPU 8 bits took 1.6 times the time, because bitsandbytes has no kernel for them there. In the second table both
# lines ran the same code, because a CPU has no pages, so the difference is the noise of a shared machine. In the table
# of losses, 4 % of the trained weights (thin matrices of keys and values) kept 32 bits.

# %% [markdown] tags=["deep"]
# ### Deeper: second moments that get stuck, and random rounding as a cure
# 20 steps cannot show everything, because $v$ moves slowly. If gradients shrink to a tenth, it falls by 0.1 % a step,
# and after 3,000 steps it is at $0.01 + 0.99 \cdot 0.999^{3000} = 0.06$ of what it was. What does it do in 8 bits, if
# half of a group shrinks? Levels near the top lie 0.7 % apart.


# %% tags=["deep"]
def after_3000(pack, noise):
    """Return the mean v of what shrank, in 32 bits and in 8; at first it was 1."""
    shrinks, levels = torch.arange(256) % 2 == 0, MAPS[1]
    exact = torch.ones(1, 256)
    packed = pack(exact, levels)
    for _ in range(3000):
        gradients = torch.where(shrinks, 0.1, 1.0)
        if noise:
            gradients = gradients * torch.randn(256)
        exact = 0.999 * exact + 0.001 * gradients**2
        packed = pack(0.999 * unpack(*packed, levels) + 0.001 * gradients**2, levels)
    in_8_bits = unpack(*packed, levels)
    return exact[0, shrinks].mean().item(), in_8_bits[0, shrinks].mean().item()


def pack_at_random(x, levels):
    """Round up or down at random, so that the mean of many draws is the number."""
    _, scales = pack(x, levels)
    groups = x.reshape(-1, 256) / scales.clamp(min=1e-38)
    below = (torch.bucketize(groups, levels, right=True) - 1).clamp(max=254)
    share = (groups - levels[below]) / levels.diff()[below]
    up = torch.rand(groups.shape) < share
    return (below + up).to(torch.uint8), scales


stuck, noisy = after_3000(pack, noise=False), after_3000(pack, noise=True)
at_random = after_3000(pack_at_random, noise=False)
for kind, (exact, eight_bits) in (
    ("steady gradients", stuck),
    ("noisy gradients", noisy),
    ("random rounding", at_random),
):
    print(f"{kind:17} {exact:.3f} in 32 bits, {eight_bits:.3f} in 8")
assert abs(stuck[0] - 0.059) < 0.001
assert stuck[1] == 1
assert noisy[1] > 4 * noisy[0]
assert abs(at_random[1] / at_random[0] - 1) < 0.3

# %% [markdown] tags=["deep"]
# With steady gradients it does not fall at all: 0.1 % is less than half a level, so every step rounds back to where it
# was. Noise helps a little. Such weights take steps that are too short, and no message says so. (If the whole group
# shrinks, its scale falls, and all is well.) Papers on fewer bits call it swamping, or staleness. The cure rounds each
# number up or down at random, such that the mean of many draws is the number. Then $v$ falls as it should, but a single
# $v$ is noisier. Our run has 42 steps (107 rows, 8 a step, three times), too few for any of this to matter.

# %% [markdown] tags=["deep"]
# ### Deeper: one long row, and the memory that torch keeps
# Paging was made for spikes. Take Llama-3.1-8B with adapters of rank 64 and 32-bit states, in the rest of our job, with
# eight micro-batches a step. The lengths of its rows are distributed like ours, but they are seven times as long, up to
# 14,336 tokens. 24 rows go through our model, in pages of 2 MiB. An open question is what happens after a long row:
# torch *keeps* the memory that it got from CUDA, and pages cannot push that out. So we play both cases.

# %% tags=["deep"]
big = with_settings(
    after,
    [
        "model=llama-3.1-8b",
        "lora.r=64",
        "tricks.optimizer=adamw",
        "tricks.gradient_accumulation=8",
    ],
)
big_shape = find_shape(big.model)
for how in ("paged_optimizer=false", "optimizer=adamw_8bit", "paged_optimizer=true"):
    chosen = with_settings(big, ["tricks.paged_optimizer=false", f"tricks.{how}"])
    needed = estimate(chosen, big_shape, T4, 7 * 2048).least_bytes / MIB
    print(f"{how:24}needs {needed:9,.1f} MiB for {7 * 2048:,} tokens")

SHORT = [7 * n for n in (1465, 920, 1733, 1301, 484, 1612, 1102, 1540)]
LONG = [7 * n for n in (1380, 2033, 760, 1950, 1420, 2048, 1199, 1670)]
unpaged = with_settings(big, ["tricks.paged_optimizer=false"])
big_pages = (
    estimate(unpaged, big_shape, T4).peak_bytes
    - estimate(big, big_shape, T4).peak_bytes
) // (2 * MIB)


def room_at(tokens):
    """Return the pages that a row of so many tokens leaves room for."""
    free = T4.memory_bytes - estimate(big, big_shape, T4, tokens).least_bytes
    return min(big_pages, free // (2 * MIB))


for gives_back in (True, False):
    card, least, moved = Card(big_pages), big_pages, [0]
    for window in (SHORT, LONG, SHORT):
        for tokens in window:
            least = min(least, room_at(tokens))
            card.keep(room_at(tokens) if gives_back else least)
        card.room = big_pages if gives_back else least
        for n in range(big_pages):  # the optimizer's step
            card.page(n)
        moved.append(2 * card.back)  # MiB
    steps = [now - then for then, now in pairwise(moved)]
    does = "gives back" if gives_back else "keeps"
    print(f"torch {does}: {steps} MiB come back in three steps")
    overflow = 2 * (big_pages - room_at(max(LONG)))
    assert overflow > 0
    thrashes = [0, 2 * big_pages, 2 * big_pages]
    assert steps == ([0, overflow, 0] if gives_back else thrashes)
way = 2 * 2 * MIB * big_pages / link
work = step(with_settings(big, ["data.max_length=8192"]), big_shape, CARDS["t4"])
print(f"at worst {way:.1f} s a step of travel, next to {work.seconds:.0f} s of work")


# %% Draw figure 4 tags=["deep"]
def rows_of_a_run(theme: Theme):
    """What each row needs, and whether all states may stay."""
    drawn, axes = course.figure(height=3.0)
    states = 2 * big_pages / 1024
    leaves = {
        "facecolor": "none",
        "edgecolor": theme.series[1],
        "linestyle": "--",
        "width": 0.7,
    }
    for n, tokens in enumerate(SHORT + LONG + SHORT):
        needed = estimate(big, big_shape, T4, tokens).least_bytes / 2**30
        stay = room_at(tokens) * 2 / 1024
        names = ("all but states", "states") if n == 0 else (None, None)
        blue, other = theme.series[:2]
        axes.bar(n, needed, color=blue, width=0.7, label=names[0])
        axes.bar(n, stay, bottom=needed, color=other, width=0.7, label=names[1])
        if stay < states:
            axes.bar(n, states - stay, bottom=needed + stay, **leaves)
    axes.bar(-9, 1, label="states that must leave", **leaves)
    has = T4.memory_bytes / 2**30
    axes.axhline(has, color=theme.alarm, linewidth=1, linestyle=(0, (4, 3)))
    says = {"color": theme.alarm, "ha": "right", "va": "bottom"}
    axes.text(23.5, has + 0.1, "a T4 has 14.7 GiB", **says)
    for edge in (7.5, 15.5):
        axes.axvline(edge, color=theme.quiet, linewidth=1)
    axes.set(xlabel="row (lines: optimizer steps)", ylabel="GiB")
    axes.set(ylim=(0, 16.5), xlim=(-0.6, 23.6))
    axes.set_xticks(range(0, 24, 4))
    drawn.legend(loc="outside lower center", ncols=3, fontsize=8)
    return drawn


course.show(
    rows_of_a_run,
    "Figure 4. Llama-3.1-8B, rank 64, long rows: three of 24 rows need the room of "
    "some of the optimizer states.",
)

# %% [markdown] tags=["deep"]
# If torch gives the memory back, only the pages that were too many move, and only after long rows. As it keeps its
# memory, one long row is enough, and from then on everything moves in every step. `torch.cuda.empty_cache()` before the
# step should help. *Should*: we have not tried it. Next to an 8B model's work either is little. How fast unified memory
# is depends on much: NVIDIA measured up to a factor of 100, by platform, hints, and how much is too much. On Windows it
# is limited. And NVIDIA's driver sees when a page comes, not when it is used (`block_mark_memory_used`), so the order
# of exercise 3 may gain less there.
#
# You will also meet "55 % less memory for 18 % fewer tokens a second" (pytorch/ao issue 1213). That compares fused
# AdamW with paged 8-bit AdamW, so it mixes the saving of 8 bits with that of paging. The figures above are from
# torchtune's pull request 990, which changes paging alone.

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code each switch is one argument. For both take `optim="paged_adamw_8bit"`, without
# `max_steps=1`. The tables show both switches, 8 bits alone, and paging alone:

# %%
print(adamw_8bit.PLAIN, paged_optimizer.PLAIN)
course.show_worth("optimizer", "paged_optimizer")
course.show_worth("optimizer")
course.show_worth("paged_optimizer")

# %% [markdown]
# Of these 77 MiB, 65 are due to 8 bits. The other 12 are only missing from the count: bitsandbytes pages states of
# 100,000 elements or more, and of a block's 14 LoRA matrices three are so large. So next to pages, 8 bits seem to save
# only 29.
#
# The complete commands, the second for full fine-tuning. (On a T4 the recipe has no chunked loss, and lean preparation
# has no effect there.)
#
# ```bash
# cria train kwanzaa --set tricks.optimizer=adamw_8bit --set tricks.paged_optimizer=true
# cria plan kwanzaa --gpu t4 --set tricks.peft=none --set tricks.quantization=none \
#     --set tricks.double_quantization=false --set tricks.gradient_checkpointing=true \
#     --set tricks.gradient_accumulation=1
# ```

# %% Draw figure 5 tags=["hide-input"]
course.show(
    course.ladder("optimizers"),
    "Figure 5. The peak after each switch so far; with LoRA the two switches of this "
    "lesson, which are coloured, are hardly visible.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: what changes in the plan, in the step, and in a row's length
# The plan of our job changes in two fields. Below it are all moments of a step of full fine-tuning: 8 bits save the
# same in each, because nothing else changes. transformers' default, the fused AdamW, makes nothing large in its step
# either. `torch.optim.AdamW` without `fused=True` does: on a card it uses *foreach*, which makes the square roots of
# all $v$ at once, 4 bytes a weight, here another 4,714 MiB.

# %% tags=["deep"]
print(diff(resolve(before, T4), resolve(after, T4)))
plain_bill, bill_8bit = (
    {moment.name: moment.bytes for moment in course.bill(recipe).moments}
    for recipe in (full, full_8bit)
)
for name in plain_bill:
    change = (bill_8bit[name] - plain_bill[name]) / MIB
    print(
        f"{name:16}{plain_bill[name] / MIB:10,.1f}{bill_8bit[name] / MIB:10,.1f}"
        f"{change:+11,.1f} MiB"
    )
    saved = state_bytes(full) - state_bytes(full_8bit)
    assert plain_bill[name] - bill_8bit[name] == saved

trained = course.bill(full).step.trained_weights
missing = state_bytes(full_8bit) - trained * (2 + 8 / 256)
of_embedding = find_shape(full.model).embedding_weights * (6 - 8 / 256)
print(f"missing {missing / MIB:,.1f} MiB, the embedding {of_embedding / MIB:,.1f}")
assert abs(missing / of_embedding - 1) < 0.001
assert state_bytes(after) < state_bytes(with_settings(before, [EIGHT]))
facts = course.bill(after).step
wide = sum(many * n for many, n in facts.trained if n >= 100_000)
in_pages = state_bytes(with_settings(before, [EIGHT])) - state_bytes(after)
print(f"{wide:,} of {facts.trained_weights:,} weights are paged")
assert in_pages == wide * (2 + 8 / 256)
tokens = [longest(Target(shape, T4), recipe) for recipe in (before, after)]
print(f"the longest row that fits: {tokens[0]:,} tokens, with both {tokens[1]:,}")


def seconds_of_work(micro_batches):
    of_a_step = [f"tricks.gradient_accumulation={micro_batches}"]
    return step(with_settings(full, of_a_step), shape, CARDS["t4"]).seconds


travel = 2 * paged_bytes["adamw"] / link
enough = next(k for k in range(1, 100) if seconds_of_work(k) >= 10 * travel)
print(f"from {enough} micro-batches on, travel takes a tenth of the work at most")
assert enough > 8

# %% [markdown] tags=["deep"]
# Paged states are still on the card while it has room. torch's allocator does not see them, but `nvidia-smi` does,
# where a paged run has even shown *more* (bitsandbytes issue 801).
#
# LoRA's A of a matrix with 2,048 inputs is paged from rank 49 on, where it has 100,352 elements. The limit counts
# elements, neither bytes nor both moments together.
#
# Our bill takes the two norms of a block for one tensor, and so forgets 0.4 MiB of 32-bit states. With both switches
# the longest row grows by less than 1 %. They are on in our recipe because they cost nothing there, and for the day
# that you choose a larger model.

# %% [markdown]
# ## 6. Where it breaks
# **No message, and states as large as before.** The tensors have fewer than 4,096 elements each, as LoRA's often have
# at a low rank. Cure: make the optimizer yourself with `min_8bit_size`, because transformers does not pass it on, and
# pass `Trainer(..., optimizers=(optimizer, None))`.
#
# **`nan`, some thirty steps into the run.** Somebody took even levels for $v$. In section 2 they made zeros of 6 % of
# the second moments, and AdamW divides by $\sqrt{v}$. In its next step such a $v$ is $(1 - \beta_2)\, g^2$ and nothing
# more. So the weight soon moves $1 / \sqrt{1 - \beta_2} = 32$ times too far. Cure: the dynamic map, for $v$ at least.

# %%
straight = torch.linspace(-1, 1, 255), torch.linspace(0, 1, 256)
losses, _, _ = train(lambda w: AdamW8(w, **SETTINGS, maps=straight), steps=40)
print("even levels:", " ".join(f"{loss:.3g}" for loss in losses[::5].tolist()))
assert not losses[-1] < 100

# %% [markdown] tags=["deep"]
# ### Deeper: the cliffs of both maps
# Where $v$ became zero and the next $g$ happens to be zero, too, the weight moves by $m / \epsilon$, which can be any
# number. $m$ alone does not mind even levels. But the dynamic map ends, too: below $1.6 \cdot 10^{-7}$ of the largest
# $v$ of a group, so for gradients some 2,500 times smaller than the largest. The cliffs of both maps follow.

# %% tags=["deep"]
halfway, _, _ = train(lambda w: AdamW8(w, **SETTINGS, maps=(straight[0], MAPS[1])))
print(f"even levels for m alone: {halfway[-20:].mean():.4f}, dynamic {final_8:.4f}")
assert halfway[-20:].mean() < final_32 + 0.05
sizes = torch.logspace(-5, 0, 256)


def last_step(make, steps=100):
    """Return how far each of 256 weights went in the last step, in learning rates.

    Its gradient is always the same.
    """
    optimizer = make([weight := torch.zeros(256, requires_grad=True)])
    for _ in range(steps):
        start, weight.grad = weight.detach().clone(), sizes.clone()
        optimizer.step()
    return start - weight.detach()


dynamic = last_step(lambda w: AdamW8(w, lr=1.0))
linear = last_step(lambda w: AdamW8(w, lr=1.0, maps=(MAPS[0], straight[1])))
on_cpu = last_step(lambda w: of_bnb(w, lr=1.0, weight_decay=0.0))
too_far = ((1 - 0.999**100) / (1 - 0.999)) ** 0.5
for went, floor in ((dynamic, MAPS[1][1] / 2), (linear, straight[1][1] / 2)):
    assert went[sizes < 0.99 * floor**0.5].median() > 0.9 * too_far
    assert went[sizes > 1.01 * floor**0.5].max() < 1.5


# %% Draw figure 6 tags=["deep"]
def cliffs(theme: Theme):
    """A weight's step against its gradient's share of the largest of its group."""
    drawn, axes = course.figure(height=3.0)
    named = (
        ("dynamic map", dynamic),
        ("even levels", linear),
        ("bitsandbytes on a CPU", on_cpu),
    )
    for (name, went), color in zip(named, theme.series, strict=False):
        axes.plot(sizes, went, color=color, label=name)
    axes.axhline(1, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1.2e-5, 1.15, "32 bits", color=theme.quiet)
    axes.set(xlabel="gradient / largest of its group", ylabel="step / learning rate")
    axes.set(xscale="log", yscale="log")
    axes.grid(axis="y")
    axes.legend(loc="lower right")
    return drawn


course.show(
    cliffs,
    "Figure 6. After 100 equal gradients 32-bit AdamW moves every weight by one "
    "learning rate. Left of its cliff a map moves them ten times as far, on the way to "
    "32; bitsandbytes' table on a CPU hardly moves them at all.",
)

# %% [markdown] tags=["deep"]
# On a CPU bitsandbytes errs the other way: its table rounds small $v$ *up*. So a test on a CPU says nothing about the
# cliff on a card. Cures: a larger $\epsilon$, 32 bits for that tensor, or levels without a zero (exercise 2).

# %% [markdown] tags=["deep"]
# ### Deeper: small tensors, paging without a GPU, and out of memory after a resume
# Here is the first failure above, counted: the dtype of the states of LoRA's A at rank 1, by `min_8bit_size`, which is
# 4,096 by default.

# %% tags=["deep"]
for least in (4096, 256):
    thin = [nn.Parameter(torch.zeros(1, 2048)), nn.Parameter(torch.zeros(1, 8192))]
    asked = bnb.optim.AdamW8bit(thin, min_8bit_size=least)
    for weight in thin:
        weight.grad = torch.ones_like(weight)
    asked.step()
    dtypes = {weight.numel(): asked.state[weight]["state1"].dtype for weight in thin}
    print(f"from {least:5,} elements:", dtypes)
    assert dtypes[2048] == (torch.float32 if least == 4096 else torch.uint8)

# %% [markdown] tags=["deep"]
# **`Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.`** There is a card, but bitsandbytes
# found no library for its CUDA, or it is Apple's. Cure: `cria doctor` says which library was loaded; install one that
# matches, or do not page. A machine without any card only warns, and it does not page. One footnote to *exact*: paging
# changes no bit, but in 32 bits the switch also takes bitsandbytes' AdamW instead of torch's, which rounds elsewhere.

# %% tags=["deep"]
try:
    bnb.functional.get_paged(100_000, device=torch.device("cuda", 0))
except RuntimeError as caught:
    print(str(caught).splitlines()[0])
    assert "cget_managed_ptr" in str(caught)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    fallen_back = optimize(bnb.optim.PagedAdamW32bit)
print(said[-1].message)
assert "Falling back to non-paged optimizer behavior" in str(said[-1].message)
assert same(fallen_back, optimize(bnb.optim.AdamW32bit))
in_torch = optimize(partial(torch.optim.AdamW, foreach=False))
furthest = max(
    (mine - other).abs().max().item()
    for mine, other in zip(fallen_back, in_torch, strict=True)
)
print(f"bitsandbytes' AdamW in 32 bits is {furthest:.0e} away from torch's")
assert 0 < furthest < 1e-5

# %% [markdown] tags=["deep"]
# **Out of memory after a resume, in a run that had fitted.** bitsandbytes 0.50 loads saved states into the card's own
# memory and does not page them again. Cure: ask for their buffers anew, as our trainer does after each resume. Here
# torch's device `meta`, which holds nothing, stands in for the card:

# %% tags=["deep"]
weight = nn.Parameter(torch.zeros(100_000, device="meta"))
optimizer = bnb.optim.PagedAdamW8bit([weight])


def stand_in(*shape, dtype, device):
    """Return what CUDA would give: memory of the host, marked as paged."""
    page = torch.zeros(shape, dtype=dtype)
    page.is_paged = True
    return page


with mock.patch.multiple(bnb.functional, get_paged=stand_in, fill=lambda *_: None):
    buffer = optimizer.get_state_buffer(weight, torch.uint8)
    optimizer.state[weight] = {"state1": buffer}
    assert buffer.is_paged
    optimizer.load_state_dict(optimizer.state_dict())
    loaded = optimizer.state[weight]["state1"]
    paged = getattr(loaded, "is_paged", False)
    print("after loading:", loaded.device, "paged:", paged)
    assert loaded.device == weight.device
    assert not paged
    # the cure; then copy the loaded state into it
    optimizer.state[weight]["state1"] = optimizer.get_state_buffer(weight, torch.uint8)
    assert optimizer.state[weight]["state1"].is_paged

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** With $r = 1$ our adapters are 16 times smaller. How many bytes do the states take under `adamw_8bit`,
#    without paging, step counters and maps? (There are 16 blocks. q and o go from 2,048 to 2,048 numbers, k and v from
#    2,048 to 512, gate and up from 2,048 to 8,192, down back. A has as many elements as its matrix has inputs, B as it
#    has outputs.)
# 2. **Build.** Fill in `pack_above_zero(x, levels)`. It does what `pack` does, but a number above zero never gets
#    zero's code. It is for $v$, so no number is negative, and `levels[0]` is zero. Return codes (uint8, groups x 256)
#    and scales (fp32, groups x 1).
# 3. **Reach.** LRU and a fixed order are the worst pair, but AdamW allows any order. Fill in `order(steps, places)`. It
#    gets the step's number (from 1) and the list of places, and returns a list of the same places in your order. With
#    room for $F$ of $P$ pages, $F$ even, only $P - F$ may come back in each step after the first.

# %% tags=["exercise"]
bytes_at_rank_1 = None


def pack_above_zero(x, levels):
    """FILL ME IN: return codes and scales, as `pack` does."""


def order(steps, places):
    """FILL ME IN: return a list of the same places."""


# %% Check the exercises tags=["hide-input"]
PAIR = (
    "a function (x, levels) -> codes, uint8 of shape (groups, 256), and scales, "
    "fp32 of shape (groups, 1)"
)


def answered(answer, x, levels):
    """Return a reader's codes and scales, after a check of their dtypes and shapes."""
    if (found := answer(x.clone(), levels)) is None:
        raise NotImplementedError
    codes, scales = found
    right_codes, right_scales = pack(x, levels)
    assert codes.dtype == torch.uint8, (
        f"codes are bytes (torch.uint8), and yours are {codes.dtype}"
    )
    for name, mine, right in (
        ("codes", codes, right_codes),
        ("scales", scales, right_scales),
    ):
        assert mine.shape == right.shape, (
            f"your {name} have shape {tuple(mine.shape)}, pack's {tuple(right.shape)}"
        )
    assert torch.equal(scales, right_scales), (
        "each group keeps its own scale, its largest number, as in pack"
    )
    return codes, scales


def of_above_zero(answer):
    # of three groups; the last is all zeros
    ends = torch.tensor([1.0, 1e-4, 0.0])[:, None]
    x = torch.cat([torch.zeros(56), torch.logspace(-12, 0, 200)]) * ends
    for levels in (MAPS[1], torch.linspace(0, 1, 256)):
        codes, _ = answered(answer, x, levels)
        plain, _ = pack(x, levels)
        assert not codes[x == 0].any(), "zero itself must keep zero's code"
        assert codes[x > 0].all(), "some number above zero still has zero's code"
        assert torch.equal(codes[plain > 0], plain[plain > 0]), (
            "all other numbers go to the nearest level, as in pack"
        )
        assert (codes[(x > 0) & (plain == 0)] == 1).all(), (
            "the smallest numbers take the lowest level above zero"
        )


def of_order(answer):
    places = [(n, at) for n in range(2) for at in range(0, 4 * PAGE, PAGE)]
    once = "every place must come exactly once in each step, or a weight is not updated"
    for steps in (1, 2, 3):
        if (found := answer(steps, list(places))) is None:
            raise NotImplementedError
        assert isinstance(found, list), f"this is a {type(found).__name__}, not a list"
        assert sorted(found) == places, once
    for room in (20, 40, 78):
        card = Card(room)
        assert run(card, order=answer), f"the weights are not torch's: {once}"
        back = card.back / (STEPS - 1)
        assert back <= PAGES - room, (
            f"room for {room} of {PAGES} pages: {back:.0f} come back in each step, "
            "and fewer are possible; which pages "
            "does the last step leave on the card?"
        )


course.check(
    1,
    bytes_at_rank_1,
    course.about(
        3_289_088,
        "which of the 14 tensors of a block have 4,096 elements or more? Only those "
        "have 8-bit states",
        within=1e-9,
        mistakes={
            704_512 * (2 + 8 / 256): "not all states are 8-bit: "
            "tensors with fewer than 4,096 elements keep 32 bits",
            704_512 * 8: "some tensors do have 4,096 elements or more, "
            "and their states are 8-bit",
            8 * 311_296
            + 2 * 393_216: "8-bit states also need a scale of 4 bytes for every 256 "
            "numbers of a moment",
            4 * 311_296
            + (2 + 8 / 256)
            * 393_216: "AdamW keeps two moments, also where they have 32 bits",
            3_289_088 / 16: "that is for one block, and there are 16",
        },
    ),
    "a number of bytes, of all states of all 16 blocks",
)
course.check(2, pack_above_zero, of_above_zero, PAIR)
course.check(
    3,
    order,
    of_order,
    "a function (steps, places) -> a list of the same places, in another order",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# large, all_of_them = 16 * 3 * 8192, 704_512  # B of gate and up, A of down
# bytes_at_rank_1 = 8 * (all_of_them - large) + int(large * (2 + 8 / 256))
#
#
# def pack_above_zero(x, levels):
#     codes, scales = pack(x, levels)
#     return torch.where(x.reshape(-1, 256) > 0, codes.clamp(min=1), 0), scales
#
#
# def order(steps, places):
#     # begin with what the last step left on the card
#     return places if steps % 2 else places[::-1]
# ```
#
# </details>
#
# ## In one breath
# - **Saves** with 8 bits three quarters of AdamW's states, 8 bytes a trained weight become 2.03, but not those of
#   embeddings and small tensors. With pages, it should save all large states while something else needs the room.
# - **Costs** 0.0001 of loss in our runs of 20 steps at one rate. Paging costs PCIe traffic when the card is full, and
#   if the optimizer's step itself has too little room, all states travel twice in every step (in our model; we timed no
#   full card).
# - **8 bits are approximate**: a $v$ near its group's largest moves by at most 3.5 % of itself. **Moving pages is
#   exact** (an H200 has confirmed it, also with a full card), but `paged_adamw_32bit` is bitsandbytes' AdamW, which
#   rounds differently from torch's (by 5e-07 in five steps).
# - **When**: all or most weights train, with many micro-batches a step. Full fine-tuning then falls from 20.4 to 11.2
#   GiB (12.9 with eight micro-batches), without its pages.
# - **When not**: with small adapters they save next to nothing. For long runs with $\beta_2$ near 1, compare first.
# - **Others with fewer states**: `optim="adafactor"` and `"lion_8bit"`; GaLore and APOLLO ([All
#   weights](weights_elsewhere.py), deeper part); [Muon](../docs/left_out.md#muon).
#
# ## Sources
# - Dettmers et al. 2021, *8-bit Optimizers via Block-wise Quantization*, arXiv 2110.02861, section 2, appendix F.1.
#   Dettmers 2015, arXiv 1511.04561, section 2.3 (the dynamic map). Loshchilov and Hutter 2019, arXiv 1711.05101.
# - Xu et al. 2025, arXiv 2505.00347 (swamping); Topollai and Choromanska 2026, arXiv 2603.16731 (staleness). Li et al.
#   2023, *Memory Efficient Optimizers with 4-bit States*, arXiv 2309.01507 (levels without a zero).
# - Dettmers et al. 2023, *QLoRA*, arXiv 2305.14314, section 3 (paged optimizers). bitsandbytes' documentation, "8-bit
#   optimizers", section "Paged optimizers" (half of PCIe's rate); its issues 801 (`nvidia-smi` shows more), 962 (pages
#   of 2 MiB) and 2069.
# - NVIDIA's *CUDA Programming Guide*, "Unified Memory"; NVIDIA's blog, *Improving GPU Memory Oversubscription
#   Performance*. Yu et al. 2020, *A Quantitative Evaluation of Unified Memory in GPUs* (LRU, and where it thrashes).
# - torchtune's README, "Optimization flags", and pull request 990 (2024: paging alone, and what 32 bits did).
#   pytorch/ao issue 1213 (2024: paging and 8 bits together).
# - bitsandbytes 0.50: `optim/optimizer.py` (`min_8bit_size`, `get_state_buffer`, `prefetch_state`, `load_state_dict`),
#   `functional.py` (`get_paged`), `backends/cpu/ops.py`; its repository's `csrc/cpu_ops.cpp` (the table) and
#   `csrc/kernels.cu` (the kernel: `kOptimizerStatic8bit2StateBlockwise`, read at version 0.50.1). transformers 5.23:
#   `trainer.py` (`create_optimizer`, embeddings), `trainer_optimizer.py`.
# - Ours: `cria_tricks/techniques/adamw_8bit.py`, `cria_tricks/techniques/paged_optimizer.py`, their tests in
#   `tests/techniques/`, `cria_tricks/trainer/checkpoint.py`; rates in `cria_tricks/hardware/cards.py`.
