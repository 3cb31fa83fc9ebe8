# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Paged optimizer: states that step aside
# > **Promise.** You train with AdamW's states in a memory that holds two pages of them, every weight right to the bit;
# > and you can say in advance what crosses the bus: nothing, what was too much, or everything.
#
# > **Card.** saves optimizer states, while something else needs the room / costs their way over PCIe and back, only
# > then / exact, bit for bit / 35 minutes / after [8-bit AdamW](adamw_8bit.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. [The lesson on
# 8-bit AdamW](adamw_8bit.py) left its bill at 5,385 MiB, and of that 22 are optimizer states. There is next to nothing
# to page, so this lesson borrows two larger runs.

# %% Imports and settings tags=["hide-input"]
import warnings
from collections import OrderedDict
from itertools import pairwise
from unittest import mock

import bitsandbytes as bnb
import torch
from torch import nn

from cria_tricks import course
from cria_tricks.bench.style import Theme
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target, longest
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks import paged_optimizer as reference
from cria_tricks.tricks.folds import estimate, step

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# States are touched in the optimizer's step. Through the forward and the backward pass they lie idle. Where is the peak
# of [the lesson on checkpointing](gradient_checkpointing.py)'s full fine-tuning, and what would it be if the idle ones
# were elsewhere? Guess; it needed 23.8 GiB.

# %% Your guess: GiB needed without the idle states tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before, after = course.so_far("adamw_8bit"), course.so_far("paged_optimizer")
full = course.so_far("gradient_checkpointing")
full_paged = with_settings(full, ["tricks.paged_optimizer=true"])
for with_states, without in zip(
    course.bill(full).moments, course.bill(full_paged).moments, strict=True
):
    print(
        f"{with_states.name:16}{with_states.bytes / MIB:10,.0f} MiB, "
        f"without states {without.bytes / MIB:10,.0f}"
    )
for name, recipe in (("kept", full), ("paged", full_paged)):
    needed = course.bill(recipe).least_bytes
    print(
        f"{name:6} needs {needed / MIB:10,.1f} MiB, with CUDA's own, "
        f"and a T4 has {T4.memory_bytes / MIB:,.1f}"
    )
assert course.bill(full_paged).fits
assert not course.bill(full).fits
course.reveal(guess, course.bill(full_paged).least_bytes / 2**30, "GiB")

# %% [markdown]
# On the bill it fits, with 109 MiB to spare: `cria plan` calls that tight. But 9.2 GiB of states must be somewhere, and
# at every optimizer's step they must come by. This lesson is about that price.
#
# ## 2. From scratch, in three steps
# There is no GPU here, so this is a *model*: a card with room for some pages, a host with the rest, and a count of all
# bytes between them. It shows what moves, and when. It cannot show how fast, nor what a driver really does. In earnest
# CUDA's *unified memory* does this: one address for both, and pages that move when somebody touches them.
#
# **Pages and a rule.** Cut the states into *pages* of one size. A page that is asked for must be on the card; if the
# card is full, the page that was not used for longest leaves (*least recently used*, LRU).

# %%
PAGE = 256  # numbers of a page
PAGE_BYTES = 4 * PAGE


class Card:
    """Room for so many pages, and a host behind a bus."""

    def __init__(self, room):
        self.room, self.here, self.host = room, OrderedDict(), {}
        self.out = self.back = 0  # bytes over the bus

    def keep(self, room):
        """Let pages leave until no more than so many are here."""
        while len(self.here) > room:
            key, page = self.here.popitem(last=False)
            self.host[key] = page
            self.out += page.nbytes

    def page(self, key, size):
        if key not in self.here:
            self.keep(self.room - 1)
            if key in self.host:
                self.here[key] = self.host.pop(key)
                self.back += self.here[key].nbytes
            else:
                self.here[key] = torch.zeros(size)  # a new page comes from nowhere
        self.here.move_to_end(key)
        return self.here[key]


card = Card(2)
for key in "abac":
    card.page(key, PAGE)
assert list(card.host) == ["b"]  # a is older, but was used after b
assert (card.out, card.back) == (PAGE_BYTES, 0)


# %% [markdown]
# **A step, page by page.** In AdamW no weight looks at another, only at its own gradient and its own moments $m$ and
# $v$. So a matrix can be updated piece by piece, and two pages on the card are enough.


# %%
class PagedAdamW:
    def __init__(
        self, weights, card, order=lambda steps, places: places, lr=0.1, decay=0.1
    ):
        self.weights, self.card, self.order, self.lr, self.decay = (
            weights,
            card,
            order,
            lr,
            decay,
        )
        self.places = [
            (n, at)
            for n, weight in enumerate(weights)
            for at in range(0, weight.numel(), PAGE)
        ]
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for n, at in self.order(self.steps, self.places):
            weight, grad = (
                tensor.view(-1)[at : at + PAGE]
                for tensor in (self.weights[n], self.weights[n].grad)
            )
            m, v = (self.card.page((n, at, moment), len(grad)) for moment in "mv")
            weight.mul_(1 - self.lr * self.decay)
            m.lerp_(grad, 1 - 0.9)
            v.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
            root = (v.sqrt() / (1 - 0.999**self.steps) ** 0.5).add_(1e-8)
            weight.addcdiv_(m, root, value=-self.lr / (1 - 0.9**self.steps))


# %% [markdown]
# **Step aside.** Before something large comes, `card.keep(less)`. Nothing is fetched until the optimizer asks.


# %% Draw figure 1 tags=["hide-input"]
def aside(theme: Theme):
    """A card in a forward pass and in the optimizer's step."""
    sketch = course.Sketch(theme, 50, 11)
    for left, when, here in (
        (3.5, "forward pass of a long row", 1),
        (28.5, "the optimizer's step", 4),
    ):
        sketch.text(left, 0.8, when, align="left", quiet=True)
        wide = 20 - 3 * here
        sketch.tensor(
            left,
            1.8,
            wide - 0.4,
            2.6,
            "weights, activations" if here == 1 else "weights",
            color=0,
        )
        for n in range(4):
            at = left + 3 * n
            if n >= 4 - here:
                sketch.tensor(
                    left + wide + 3 * (n - 4 + here), 1.8, 2.6, 2.6, str(n), color=1
                )
            sketch.tensor(
                at + 8,
                7.4,
                2.6,
                2.6,
                "" if n >= 4 - here else str(n),
                color=1,
                kept=n < 4 - here,
            )
    for top, name in ((3.1, "card"), (8.7, "host")):
        sketch.text(0, top, name, align="left")
    sketch.text(11, 8.7, "pages", align="right", quiet=True)
    sketch.arrow((15.7, 4.8), (15.7, 7.0))
    sketch.text(16.3, 5.9, "out", align="left", quiet=True)
    sketch.arrow((40.7, 7.0), (40.7, 4.8))
    sketch.text(41.3, 5.9, "back", align="left", quiet=True)
    return sketch.figure


course.show(
    aside,
    "Figure 1. A long row pushes three of four pages to the host; "
    "the optimizer's step fetches them.",
)

# %% [markdown]
# ## 3. Prove it
# The claim is *exact*: the same numbers in another place. So on a card of any size every weight must have the bits of
# torch's AdamW, and of our package's reference. And predict the traffic. There are 80 pages, always used in the same
# order. With room for 80 nothing moves. With room for 79, how many come back in each step?

# %%
SHAPES, STEPS, PAGES = ((64, 64), (64, 32), (128, 32)), 5, 80


def run(make, before_a_step=lambda: None):
    """The weights after five steps, always with the same gradients."""
    torch.manual_seed(1)
    optimizer = make(
        weights := [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    )
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        before_a_step()
        optimizer.step()
    return weights


def same(first, second):
    return all(map(torch.equal, first, second))


def ours(card, **how):
    return run(lambda weights: PagedAdamW(weights, card, **how))


plain = run(
    lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, foreach=False)
)
for room in (2, 40, 79, 80):
    card, pager = Card(room), reference.Pager(room, PAGE)
    assert same(ours(card), plain)
    theirs = run(
        lambda weights, pager=pager: reference.PagedAdamW(
            weights, pager, lr=0.1, weight_decay=0.1
        )
    )
    assert same(theirs, plain)
    assert (card.out, card.back) == (pager.bytes_to_host, pager.bytes_to_device)
    print(
        f"room for {room}: {card.back // PAGE_BYTES / (STEPS - 1):.0f} pages come "
        "back in each step after the first"
    )
    assert card.back == (0 if room == PAGES else (STEPS - 1) * PAGES * PAGE_BYTES)
    assert card.out == (0 if room == PAGES else (STEPS * PAGES - room) * PAGE_BYTES)

# %% [markdown]
# All 80, whether there is no room for 78 or for one. LRU sends away the page that was not used for longest, and in a
# fixed order that is the very one that is needed next. This is *thrashing*; papers on unified memory know LRU for it.
#
# Now the other case: the step has room for all, and only the forward pass needs some. Predict for room for 30.

# %%
card = Card(PAGES)
weights = run(
    lambda weights: PagedAdamW(weights, card), before_a_step=lambda: card.keep(30)
)
print(
    f"{card.out // PAGE_BYTES / (STEPS - 1):.0f} pages go and come back in each "
    "step after the first"
)
assert same(weights, plain)
assert card.out == card.back == (STEPS - 1) * (PAGES - 30) * PAGE_BYTES

# %% Draw figure 2 tags=["hide-input"]
rooms = [2, *range(10, 80, 10), 78, 79, 80, 84]
thrashing, stepping = [], []
for space in rooms:
    ours(small := Card(space))
    thrashing.append(small.back / PAGE_BYTES / (STEPS - 1))
    large = Card(PAGES)
    run(
        lambda weights, large=large: PagedAdamW(weights, large),
        lambda large=large, space=space: large.keep(space),
    )
    stepping.append(large.back / PAGE_BYTES / (STEPS - 1))


def cliff(theme: Theme):
    """Pages that come back in a step against the pages that there is room for."""
    drawn, axes = course.figure(height=2.7)
    axes.plot(
        rooms,
        thrashing,
        color=theme.series[1],
        label="too little room in the optimizer's step",
    )
    axes.plot(
        rooms,
        stepping,
        color=theme.series[0],
        label="too little room in the forward pass only",
    )
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
    "Figure 2. If only the forward pass is short of room, what was too much moves. "
    "If the optimizer's step is, "
    "everything moves, until everything fits.",
)

# %% [markdown]
# ## 4. What it costs
# **Full fine-tuning.** In the optimizer's step 9.2 GiB of states meet at most 5.1 GiB of room, so all of them travel,
# both ways, in every step. The T4's link carries 16 GB/s one way; bitsandbytes' documentation expects half of that at
# best. Beside it our estimate of a step's own time (the middle of its range), for one and eight micro-batches:

# %%
link, shape = CARDS["t4"].link_rate / 2, find_shape(full.model)


def state_bytes(recipe):
    return next(
        line.bytes
        for line in course.bill(recipe).lines
        if line.name == "optimizer states"
    )


def pageable(recipe):
    on, off = (
        with_settings(recipe, [f"tricks.paged_optimizer={value}"])
        for value in ("true", "false")
    )
    return state_bytes(off) - state_bytes(on)


paged_bytes = {}
for optimizer in ("adamw", "adamw_8bit"):
    for k in (1, 8):
        chosen = with_settings(
            full, [f"tricks.optimizer={optimizer}", f"tricks.gradient_accumulation={k}"]
        )
        paged_bytes[optimizer] = pageable(chosen)
        work, way = (
            step(chosen, shape, CARDS["t4"]).seconds,
            2 * paged_bytes[optimizer] / link,
        )
        print(
            f"{optimizer:10} {k} x 2,048 tokens: {work:4.1f} s of work, "
            f"{way:.1f} s for states out and back"
        )
fixed = (
    sum(line.bytes for line in course.bill(full_paged).around)
    + course.bill(full_paged).moments[-1].bytes
)
assert T4.memory_bytes - fixed < paged_bytes["adamw"]

# %% [markdown]
# So thrashing is expensive with one micro-batch a step, and bearable with eight. (And the host must hold what leaves.
# Colab's shows 12.7 GB.)
#
# **Measured by others**, in full fine-tuning with torchtune on a single card. *Paging alone*: paged 8-bit AdamW lowered
# the peak memory of Llama-3-8B by about 46 % against 8-bit AdamW, at equal speed. Paged AdamW *in 32 bits* was far too
# slow there. It took more than 6 s an iteration, because the large states of the embedding and the output matrix went
# out and came back in every step: thrashing (both torchtune, pull request 990). You will also meet "55 % less memory
# for 18 % fewer tokens a second" (pytorch/ao issue 1213). That compares fused AdamW with paged 8-bit AdamW, so it mixes
# the saving of 8 bits with that of paging.
#
# **Spikes** are what paging was made for. Take Llama-3.1-8B with adapters of rank 64, and rows as long as ours: half of
# the 107 have fewer than 1,465 tokens (of SmolLM2's), a tenth more than 2,033, and all end at 2,048.

# %%
big = with_settings(
    after, ["model=llama-3.1-8b", "lora.r=64", "tricks.optimizer=adamw"]
)
big_shape = find_shape(big.model)
for how in ("paged_optimizer=false", "optimizer=adamw_8bit", "paged_optimizer=true"):
    chosen = with_settings(big, ["tricks.paged_optimizer=false", f"tricks.{how}"])
    tokens = longest(Target(big_shape, T4), chosen)
    needed = estimate(chosen, big_shape, T4).least_bytes / MIB
    print(f"{how:24}needs {needed:9,.1f} MiB for 2,048 tokens; rows of {tokens:,} fit")

# %% [markdown]
# With states kept, in 32 bits, the first long row ends the run. In 8 bits, or paged, all rows pass. Let 24 rows go
# through our model, eight for each optimizer's step, in pages of 2 MiB. One question is open: after a long row torch
# *keeps* the memory that it got from CUDA, and pages cannot push that out. So we play both: it gives it back, or not.

# %%
SHORT, LONG = (
    (1465, 920, 1733, 1301, 484, 1612, 1102, 1540),
    (1380, 2033, 760, 1950, 1420, 2048, 1199, 1670),
)
all_pages = pageable(big) // (2 * MIB)


def room_at(tokens):
    """Pages that a row of so many tokens leaves room for."""
    return min(
        all_pages,
        (T4.memory_bytes - estimate(big, big_shape, T4, tokens).least_bytes)
        // (2 * MIB),
    )


for gives_back in (True, False):
    card, least, moved = Card(all_pages), all_pages, [0]
    for window in (SHORT, LONG, SHORT):
        for tokens in window:
            least = min(least, room_at(tokens))
            card.keep(room_at(tokens) if gives_back else least)
        card.room = all_pages if gives_back else least
        for n in range(all_pages):  # the optimizer's step
            card.page(n, 1)
        moved.append(card.back // 4 * 2)  # 4 bytes stand for 2 MiB
    steps = [now - then for then, now in pairwise(moved)]
    print(
        f"torch {'gives back' if gives_back else 'keeps'}: "
        f"{steps} MiB come back in three steps"
    )
    overflow = 2 * (all_pages - room_at(2048))
    assert steps == (
        [0, overflow, 0] if gives_back else [0, 2 * all_pages, 2 * all_pages]
    )
way, work = 2 * pageable(big) / link, step(big, big_shape, CARDS["t4"]).seconds
print(f"at worst {way:.1f} s a step, beside {work:.0f} s of work")


# %% Draw figure 3 tags=["hide-input"]
def rows_of_a_run(theme: Theme):
    """What each row needs, and whether all states may stay."""
    drawn, axes = course.figure(height=3.0)
    states = 2 * all_pages / 1024
    for n, tokens in enumerate(SHORT + LONG + SHORT):
        needed = estimate(big, big_shape, T4, tokens).least_bytes / 2**30
        stay, first = room_at(tokens) * 2 / 1024, n == 0
        axes.bar(
            n,
            needed,
            color=theme.series[0],
            width=0.7,
            label="all but states" if first else None,
        )
        axes.bar(
            n,
            stay,
            bottom=needed,
            color=theme.series[1],
            width=0.7,
            label="states" if first else None,
        )
        if stay < states:
            edge = {
                "facecolor": "none",
                "edgecolor": theme.series[1],
                "linestyle": "--",
            }
            axes.bar(n, states - stay, bottom=needed + stay, width=0.7, **edge)
    axes.bar(
        -9,
        1,
        facecolor="none",
        edgecolor=theme.series[1],
        linestyle="--",
        label="states that must leave",
    )
    axes.axhline(
        T4.memory_bytes / 2**30, color=theme.alarm, linewidth=1, linestyle=(0, (4, 3))
    )
    axes.text(
        23.5,
        T4.memory_bytes / 2**30 + 0.1,
        "a T4 has 14.7 GiB",
        color=theme.alarm,
        ha="right",
        va="bottom",
    )
    for edge in (7.5, 15.5):
        axes.axvline(edge, color=theme.quiet, linewidth=1)
    axes.set(
        xlabel="row; a line is the optimizer's step",
        ylabel="GiB",
        ylim=(0, 18.5),
        xlim=(-0.6, 23.6),
    )
    axes.set_xticks(range(0, 24, 4))
    axes.legend(loc="upper left", ncols=3, fontsize=8)
    return drawn


course.show(
    rows_of_a_run,
    "Figure 3. Llama-3.1-8B, rank 64, rows as long as ours: "
    "three of 24 rows need the room of some states.",
)

# %% [markdown]
# If torch gives back, only what was too much moves, and only after long rows. As it keeps, one long row is enough, and
# from then on everything moves in every step; `torch.cuda.empty_cache()` before the step should help. *Should*: we have
# no card to try it on. Beside an 8B model's work either is little. (How fast unified memory is depends on much: NVIDIA
# measured up to a factor of 100, by platform, hints, and how much is too much. On Windows it is limited.) Nor does our
# benchmark show anything, as on a CPU the switch has no effect:

# %%
step_of = "peft=side_network attention=best precision=best gradient_checkpointing=true"
course.on_a_gpu("paged_optimizer", off=step_of, on=f"{step_of} paged_optimizer=true")

# %% [markdown]
# Without a card these two rows ran the same code. What differs is the noise of a shared machine.
#
# ## 5. The production switch

# %%
print("--set tricks.paged_optimizer=true")
print(diff(resolve(before, T4), resolve(after, T4)))
course.show_bill(before, after)
saved = state_bytes(before) - state_bytes(after)
wide = sum(
    many * elements
    for many, elements in course.bill(after).facts.trained
    if elements >= 100_000
)
print(
    f"paged: {wide:,} weights of {course.bill(after).facts.trained_weights:,}, "
    f"{saved / MIB:.1f} MiB"
)
assert saved == wide * (2 + 8 / 256)

# %% [markdown]
# One row changed, by 12 of 22 MiB, as bitsandbytes pages only states of 100,000 elements or more: of a block's 14 thin
# matrices three, the wide halves of gate, up and down. And those 12 are not gone. They are on the card while there is
# room; torch's allocator does not see them, but `nvidia-smi` does (where a paged run has shown *more*: bitsandbytes
# issue 801). The verdict, "fits", was and stays. What has paging bought our run?

# %%
rows = [longest(Target(shape, T4), chosen) for chosen in (before, after)]
print(f"rows of {rows[0]:,} tokens fit without paging, of {rows[1]:,} with it")
assert rows[1] - rows[0] == 4
adamw = run(lambda weights: bnb.optim.AdamW32bit(weights, lr=0.1, weight_decay=0.1))
furthest = max(
    (mine - other).abs().max().item() for mine, other in zip(adamw, plain, strict=True)
)
print(f"bitsandbytes' AdamW in 32 bits is {furthest:.0e} away from torch's")
assert 0 < furthest < 1e-5

# %% [markdown]
# Four tokens. It is on in our recipe because it costs nothing there, and for the day that you choose a larger model.
# (The last line is a footnote to *exact*: paging moves no bit, but in 32 bits the switch also takes bitsandbytes' AdamW
# for torch's, which rounds elsewhere.)

# %%
course.show(
    course.staircase("paged_optimizer"),
    "Figure 4. The bill so far: 12 MiB are too few to be seen.",
)

# %% [markdown]
# ## 6. Where it breaks
# **`Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.`** There is a card, but bitsandbytes
# found no library for its CUDA, or it is Apple's. Cure: `cria doctor` says which library was loaded; install one that
# matches, or do not page. On a CPU proper bitsandbytes only warns, and does not page:

# %%
try:
    bnb.functional.get_paged(100_000, device=torch.device("cuda", 0))
except RuntimeError as error:
    print(str(error).splitlines()[0])
    assert "cget_managed_ptr" in str(error)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    fallen_back = run(
        lambda weights: bnb.optim.PagedAdamW32bit(weights, lr=0.1, weight_decay=0.1)
    )
print(said[-1].message)
assert "Falling back to non-paged optimizer behavior" in str(said[-1].message)
assert same(fallen_back, adamw)

# %% [markdown]
# **Out of memory after a resume, in a run that had fitted.** Paged states are saved well, but bitsandbytes 0.50 loads
# them into the card's own memory, and nobody pages them again. Cure: ask for their buffers anew, as our trainer does
# after each resume. Here torch's device `meta`, which holds nothing, plays the card:

# %%
weight = nn.Parameter(torch.zeros(100_000, device="meta"))
optimizer = bnb.optim.PagedAdamW8bit([weight])


def stand_in(*shape, dtype, device):
    """What bitsandbytes gets from CUDA: memory at an address of the host, marked as
    paged."""
    page = torch.zeros(shape, dtype=dtype)
    page.is_paged = True
    return page


with mock.patch.multiple(bnb.functional, get_paged=stand_in, fill=lambda *_: None):
    optimizer.state[weight] = {
        "state1": optimizer.get_state_buffer(weight, torch.uint8)
    }
    assert optimizer.state[weight]["state1"].is_paged
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[weight]
    print(
        "after loading:",
        state["state1"].device,
        "paged:",
        getattr(state["state1"], "is_paged", False),
    )
    assert state["state1"].device == weight.device
    # the cure; then copy the loaded state into it
    state["state1"] = optimizer.get_state_buffer(weight, torch.uint8)
    assert state["state1"].is_paged

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** bitsandbytes pages the states of a matrix of 100,000 elements or more. What is the lowest rank at
#    which A of `q_proj`, of shape $(r, 2048)$, is paged? Your answer is a whole number.
# 2. **Build.** LRU and a fixed order are the worst pair, and any order is allowed. Fill in `order(steps, places)`. It
#    gets the step's number (from 1) and the list of places, and returns a list of the same places in your order. With
#    room for $F$ of $P$ pages only $P - F$ may come back in each step after the first.
# 3. **Reach.** Take this lesson's full fine-tuning with paged 32-bit states. How many micro-batches must a step have at
#    least, so that moving the states out and back takes at most a tenth of the seconds of work? Your answer is a whole
#    number. (Use `step(...).seconds`, `paged_bytes` and `link`.)

# %% tags=["exercise"]
lowest_rank = None


def order(steps, places):
    """FILL ME IN: return a list of the same places."""


micro_batches = None


# %% Check the exercises tags=["hide-input"]
def of_order(answer):
    places = [(n, at) for n in range(2) for at in range(0, 4 * PAGE, PAGE)]
    for steps in (1, 2, 3):
        if (found := answer(steps, list(places))) is None:
            raise NotImplementedError
        assert isinstance(found, list), f"this is a {type(found).__name__}, not a list"
        assert sorted(found) == places, (
            "every place must come exactly once in each step, "
            "or a weight is not updated"
        )
    for room in (20, 40, 78):
        found = ours(card := Card(room), order=answer)
        assert same(found, plain), (
            "the weights are not torch's: "
            "every place must come exactly once in each step"
        )
        back = card.back // PAGE_BYTES / (STEPS - 1)
        assert back <= PAGES - room, (
            f"room for {room} of {PAGES} pages: {back:.0f} come back in each step, "
            "and fewer are possible; which pages "
            "does the last step leave on the card?"
        )


def work_of(k):
    return step(
        with_settings(full, [f"tricks.gradient_accumulation={k}"]), shape, CARDS["t4"]
    ).seconds


def enough(times):
    """Return how many micro-batches work `times` as long as it takes to move the states
    in one direction."""
    return next(
        k for k in range(1, 100) if work_of(k) >= times * paged_bytes["adamw"] / link
    )


right = enough(10 * 2)
hint = (
    "each micro-batch adds work, but the time to move the states stays the same; "
    "compare these two times"
)
mistakes = {
    enough(10): "the states go out, and they come back, so count two transfers",
    enough(
        10 / 2
    ): "the link carries half of its data sheet's rate, and states go both ways",
    right - 1: "just too few: there moving the states still takes more than a "
    "tenth of the work",
    right + 1: "that is enough, but one micro-batch fewer is enough, too",
}
course.check(
    1,
    lowest_rank,
    course.about(
        49,
        "how many elements has A at that rank, and how many does bitsandbytes ask for?",
        within=1e-9,
        mistakes={
            48: "at that rank A still has fewer than 100,000 elements",
            100_000 / 2048: "a rank is a whole number",
            25: "the limit is for the elements of the matrix, "
            "not of its two moments together",
            13: "the limit counts elements, not bytes",
            2: "4,096 elements are the limit for 8-bit states; "
            "paging has another limit",
        },
    ),
    "a whole number, the rank",
)
course.check(
    2,
    order,
    of_order,
    "a function (steps, places) -> a list of the same places, in another order",
)
course.check(
    3,
    micro_batches,
    course.about(
        right,
        hint,
        within=1e-9,
        mistakes={n: its for n, its in mistakes.items() if n != right},
    ),
    "a whole number of micro-batches",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# lowest_rank = 49  # 48 * 2048 = 98,304
#
#
# def order(steps, places):
#     # begin with what the last step left on the card
#     return places if steps % 2 else places[::-1]
#
#
# micro_batches, work = 0, 0.0
# while work < 10 * 2 * paged_bytes["adamw"] / link:
#     micro_batches += 1
#     chosen = with_settings(full, [f"tricks.gradient_accumulation={micro_batches}"])
#     work = step(chosen, shape, CARDS["t4"]).seconds
# print(micro_batches)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the room of large states while it is needed; in full fine-tuning 9.2 of 23.8 GiB, on our run 12 MiB.
# - **Costs** nothing while all fits; what was too much, if only the forward pass is short of room; all states both ways
#   in every step, if the optimizer's step is.
# - **Exact**, bit for bit.
# - **When**: rows of uneven length on a card that nearly fits, or full fine-tuning with many micro-batches a step.
# - **When not**: small adapters. Or when 8 bits suffice, which save always and not for a moment.
#
# ## Sources
# - Dettmers et al. 2023, *QLoRA*, arXiv 2305.14314, section 3 (paged optimizers). bitsandbytes' documentation, "8-bit
#   optimizers", section "Paged optimizers" (half of PCIe's rate); its issues 801, 962 (pages of 2 MiB) and 2069.
# - NVIDIA's *CUDA Programming Guide*, "Unified Memory"; NVIDIA's blog, *Improving GPU Memory Oversubscription
#   Performance*. Yu et al. 2020, *A Quantitative Evaluation of Unified Memory in GPUs* (LRU, and where it thrashes).
# - torchtune, pull request 990 (2024: paging alone, and what 32 bits did). pytorch/ao issue 1213 (2024: paging and 8
#   bits together). bitsandbytes 0.50: `optim/optimizer.py` (`get_state_buffer`, `prefetch_state`,
#   `load_state_dict`), `functional.py` (`get_paged`).
# - Ours: `cria_tricks/tricks/paged_optimizer.py`, `tests/tricks/test_paged_optimizer.py`,
#   `cria_tricks/trainer/resumable.py`, rates in `cria_tricks/hardware/cards.py`.
