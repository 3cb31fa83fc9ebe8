# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # The bill: where the bytes of a training step go
# > **Promise.** You predict the memory of a training step to the last byte. A weight is said to cost 16 bytes, and you
# > find 4 of them that cost nothing on long rows: 4.6 GiB for Llama-3.2-1B.
#
# > **Card.** saves nothing / costs a millisecond / exact for the small model, within 3 % of a dry run for real ones /
# > 25 minutes / the first lesson
#
# This course does one real job on one small card: QLoRA ([LoRA](lora.py) and [NF4](nf4.py) say what that is) of
# Llama-3.2-1B on 107 training rows of 2,048 tokens, on a free Colab T4, which has 14.74 GiB. Every lesson adds one
# technique: you write it from scratch, prove what it claims, and see what it saves and what it costs. Read them in one
# way, *predict, then run*: where a number is predicted write down your own first; an `assert` holds prediction and
# count together.
#
# Trained plainly, the model does not fit. This lesson says what is in the way.

# %% Imports and settings tags=["hide-input"]
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cria_tricks import course
from cria_tricks.bench import results
from cria_tricks.bench.figures import capacity
from cria_tricks.bench.style import Theme
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import SavedBytes, peak_bytes
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.recipe import with_settings

KIB, MIB, GIB = 2**10, 2**20, 2**30

# %% [markdown]
# ## 1. The bill
# We take a decoder small enough to count by hand: $V$ words in the vocabulary, $D$ numbers a token, $L$ blocks with
# attention and an MLP that is $H$ wide inside. Like Llama-3.2-1B it is *tied*: one matrix turns words into vectors and,
# at the end, vectors into scores for all words. These scores are the *logits*.

# %%
V, D, H, L = 512, 32, 128, 4  # vocabulary, width, inner width, blocks
B, T = 2, 64  # rows, tokens of a row
future = torch.full((T, T), -torch.inf).triu(1)  # the mask: no token looks ahead


class Block(nn.Module):
    """From (B, T, D) to (B, T, D)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(D, 3 * D, bias=False),
            nn.Linear(D, D, bias=False),
        )
        self.up, self.down = nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(F.layer_norm(x, (D,))).chunk(3, dim=-1)
        scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=D**-0.5)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (D,)))))


class Tiny(nn.Module):
    """From token numbers (B, T) to logits (B, T, V)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(L)))

    def forward(self, ids):
        return F.linear(
            F.layer_norm(self.blocks(self.embedding(ids)), (D,)), self.embedding.weight
        )


# %% [markdown]
# Five things take memory. Each number is 4 bytes in fp32. What do they take here? Write five guesses down.
#
# - **weights**, $P$ of them: $VD$ in the embedding, $4D^2 + 2DH$ in each block
# - **gradients**: one for each weight
# - **optimizer states**: AdamW remembers two numbers for each weight (and a counter for each tensor, 4 bytes). We take
#   the *fused* one, transformers' default, which makes no tensor of its own
# - **activations**: what each block keeps for the backward pass. Per token that is $8D$ numbers (two norms' inputs and
#   outputs, $q$, $k$, $v$, what attention gave), $2H$ (before and after gelu) and 4 (of the norms); and per row $T^2$
#   softmaxed scores
# - **logits**: $BTV$ numbers, three times: when the loss goes back, log-softmax, its gradient, and the logits' gradient
#   live at once

# %% Your guess: KiB of the logits tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
P = V * D + L * (4 * D * D + 2 * D * H)
STATES = 8 * P + 4 * (1 + 4 * L)  # 17 tensors


def blocks_keep(rows):
    n = rows * T  # tokens
    return 4 * L * (n * (8 * D + 2 * H + 4) + rows * T * T)


predicted = {
    "weights": 4 * P,
    "gradients": 4 * P,
    "optimizer states": STATES,
    "blocks": blocks_keep(B),
    "logits": 3 * 4 * B * T * V,
}

# %% [markdown]
# Now count, each thing alone.

# %%
torch.manual_seed(0)
model, ids = Tiny(), torch.randint(V, (B, T))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
with SavedBytes(besides=(*model.parameters(), ids)) as kept:
    hidden = model.blocks(model.embedding(ids))
logits = torch.randn(B * T, V, requires_grad=True)
of_loss = peak_bytes(
    lambda: F.cross_entropy(logits, ids.flatten()).backward(), alive=(logits, ids)
)
hidden.sum().backward()
optimizer.step()

counted = {
    "weights": sum(p.nbytes for p in model.parameters()),
    "gradients": sum(p.grad.nbytes for p in model.parameters()),
    "optimizer states": sum(
        state.nbytes for states in optimizer.state.values() for state in states.values()
    ),
    "blocks": kept.peak,
    # besides, the loss itself and the gradient it starts from: two numbers
    "logits": of_loss - 8,
}
for name, size in predicted.items():
    print(
        f"{name:18}predicted {size / KIB:8,.1f} KiB   counted "
        f"{counted[name] / KIB:8,.1f} KiB"
    )
assert counted == predicted
print(f"added up: {sum(predicted.values()) / KIB:,.1f} KiB")
course.reveal(guess, counted["logits"] / KIB, "KiB")

# %% [markdown]
# 65,536 weights take 16 bytes each with their gradients and states: 1 MiB. Together with the activations and the
# logits, that is 2,952 KiB. Must the card have that much? Decide before you go on.

# %% Your guess: KiB that the card must have tags=["predict"]
guess = 0  # @param {type:"number"}

# %% [markdown]
# ## 2. From scratch, in four steps
# **Count what lives.** A tensor's bytes lie in its *storage*. Views share one, and it dies with the last of them.


# %%
class Alive(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.now, self.known = 0, set()

    def count(self, tensor):
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            # called when it dies
            weakref.finalize(storage, self.gone, key, storage.nbytes())

    def gone(self, key, size):
        self.known.remove(key)
        self.now -= size


alive, some = Alive(), torch.zeros(256)
alive.count(some)
alive.count(some[:10])  # a view: nothing new
assert alive.now == 1024
del some
assert alive.now == 0

# %% [markdown]
# **Film it.** torch shows a *dispatch mode* every operation, in the backward pass and in the optimizer too. After each
# one we write down what lives. And we refuse beyond a capacity, as a card does; section 6 needs that.


# %%
class Film(Alive):
    def __init__(self, kib=torch.inf):
        super().__init__()
        self.capacity, self.frames, self.cuts = kib * KIB, [], [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, out = self.now, func(*args, **(kwargs or {}))
        for made in tree_iter(out):
            if isinstance(made, torch.Tensor):
                self.count(made)
        if self.now > self.capacity:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. "
                f"Tried to allocate {(self.now - before) / KIB:.2f} KiB."
            )
        self.frames.append(self.now)
        return out


with Film() as film:
    torch.ones(256) + 1
assert film.frames == [1024, 2048]  # the ones, and then the sum beside them
assert film.now == 0

# %% [markdown]
# **Train before it.** Two steps of a fresh model; `cuts` remembers where forward pass, backward pass and update end.


# %%
def train(film, rows=B, steps=2, set_to_none=True, way="fused"):
    torch.manual_seed(0)
    model, batch = Tiny(), torch.randint(V, (2, rows, T))
    optimizer = torch.optim.AdamW(model.parameters(), **{way: True})
    for tensor in (*model.parameters(), batch, future):
        film.count(tensor)
    with film:
        for _ in range(steps):
            loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
            film.cuts.append(len(film.frames))
            loss.backward()
            film.cuts.append(len(film.frames))
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            film.cuts.append(len(film.frames))


def peaks(film):
    return [
        max(film.frames[start:end])
        for start, end in zip(film.cuts, film.cuts[1:], strict=False)
    ]


train(film := Film())
assert len(peaks(film)) == 2 * 3

# %% [markdown]
# **Write a bill for each moment.** The five things do not live at the same time. When backpropagation starts, no weight
# gradients exist yet. When the optimizer steps, all activations are gone. So there are two bills, and the card must
# have the larger one.


# %%
def bills(rows=B, states=STATES):
    n = rows * T
    # 8 bytes a token, and the mask
    always = {"weights": 4 * P, "states": states, "batch": 2 * 8 * n + 4 * T * T}
    kept = {
        "blocks": blocks_keep(rows),
        "final norm": 4 * n * (2 * D + 2),
        "logits": 3 * 4 * n * V,
    }
    update = {"states": STATES, "gradients": 4 * P}
    return always | kept | {"scalars": 8}, always | update | {"scalars": 4}


at_loss, at_update = (sum(rows.values()) for rows in bills())
print(
    f"predicted: {at_loss / KIB:,.1f} KiB at the loss, "
    f"{at_update / KIB:,.1f} KiB in the update"
)
assert max(peaks(film)) == max(at_loss, at_update) == at_loss


# %% Draw figure 1 tags=["hide-input"]
def who_lives(theme: Theme):
    """The five things at three moments, in KiB."""
    sketch = course.Sketch(theme, 41, 15.2)
    for column, when in enumerate(
        ("backpropagation starts", "back at the first block", "in the update")
    ):
        sketch.text(13 + 10.5 * column, 0.7, when)
    for row, (name, color, sizes) in enumerate(
        (
            ("weights", 0, ("256", "256", "256")),
            ("optimizer states", 0, ("512", "512", "512")),
            ("blocks", 1, ("1,160", "one block's", "")),
            ("logits", 2, ("768", "", "")),
            ("gradients", 3, ("", "nearly all", "256")),
        )
    ):
        top = 1.6 + 2.1 * row
        sketch.text(0, top + 0.8, name, align="left")
        for column, size in enumerate(sizes):
            sketch.tensor(
                8.5 + 10.5 * column, top, 9, 1.6, size, color=color, kept=bool(size)
            )
    for name, y, sizes in (
        ("all else", 12.7, ("51", "...", "18")),
        ("together", 14.2, ("2,747", "less", "1,042")),
    ):
        sketch.text(0, y, name, align="left", quiet=name == "all else")
        for column, size in enumerate(sizes):
            sketch.text(13 + 10.5 * column, y, size, quiet=name == "all else")
    return sketch.figure


assert [round(size / KIB) for size in (at_loss, at_update)] == [2747, 1042]  # as drawn
course.show(
    who_lives,
    "Figure 1. Filled boxes are alive, dashed boxes are not (sizes in KiB). "
    "Activations and gradients take turns, so "
    "the peak is less than the sum of all.",
)

# %% [markdown]
# ## 3. Prove it
# The claim is *exact*: not about right, but the same number of bytes, at both moments of both steps. In the first step
# the states do not exist until the update. And the package's own counter, `LiveBytes`, must see the same.

# %%
first_loss, _ = (sum(rows.values()) for rows in bills(states=0))
expected = [first_loss, at_update, at_loss, at_update]
# backward pass and update of both steps
found = [peak for phase, peak in enumerate(peaks(film)) if phase % 3]
print(f"predicted {expected} bytes\ncounted   {found}")
assert found == expected

package = LiveBytes()
# what `train` asks of a film
package.count, package.frames, package.cuts = package.track, [], []
train(package)
assert package.peak == at_loss
gradients = 4 * P
print(
    f"all rows added up: {(at_loss + gradients) / KIB:,.1f} KiB; "
    f"the card needs {at_loss / KIB:,.1f}"
)
course.reveal(guess, at_loss / KIB, "KiB")


# %% Draw figure 2 tags=["hide-input"]
def over_time(theme: Theme):
    """Bytes alive, operation by operation; every phase is drawn equally wide."""
    drawn, axes = course.figure(height=3.4)
    for phase, (start, end) in enumerate(zip(film.cuts, film.cuts[1:], strict=False)):
        frames = film.frames[start:end]
        places = [phase + n / len(frames) for n in range(len(frames))]
        axes.plot(
            places,
            [now / KIB for now in frames],
            color=theme.series[phase % 3],
            drawstyle="steps-post",
        )
    for left, peak in ((0, first_loss), (3, at_loss)):
        axes.hlines(
            peak / KIB,
            left,
            left + 3,
            color=theme.quiet,
            linewidth=1,
            linestyle=(0, (4, 3)),
        )
        axes.text(
            left + 2.95,
            peak / KIB - 60,
            f"predicted {peak / KIB:,.0f}",
            ha="right",
            va="top",
            color=theme.quiet,
        )
    added = (at_loss + gradients) / KIB
    axes.axhline(added, color=theme.alarm, linewidth=1, linestyle=(0, (1, 2)))
    axes.text(
        0.02,
        added + 40,
        f"all rows added up: {added:,.0f}",
        va="bottom",
        color=theme.alarm,
    )
    axes.set_xticks([n + 0.5 for n in range(6)], ["forward", "backward", "AdamW"] * 2)
    axes.set(
        xlabel="two steps, operation by operation",
        ylabel="alive, KiB",
        xlim=(0, 6),
        ylim=(0, 3450),
    )
    axes.grid(axis="y")
    return drawn


course.show(
    over_time,
    "Figure 2. Two steps: the peak is where backpropagation starts, "
    "and the second step is higher by the optimizer's "
    "states.",
)

# %% [markdown]
# That is the lesson's surprise. **These gradients cost nothing**, because the activations are gone when the gradients
# are complete. The peak is a *maximum over moments*, not a sum of everything. Halving the gradients would not lower
# this peak. (With short rows it would. Section 5 says how short.)
#
# The optimizer is part of the bill too. Without `fused=True`, `torch.optim.AdamW` uses *foreach* on a card: it updates
# all tensors at once, so it makes the square roots of all second states. Predict how much they add to the update.

# %%
train(foreach := Film(), way="foreach")
roots = peaks(foreach)[-1] - at_update
print(
    f"foreach adds {roots:,} bytes to the update, {roots / P:.0f} for each weight; "
    "in Llama-3.2-1B 4.6 GiB"
)
assert roots == 4 * P
assert max(peaks(foreach)) == at_loss  # it does not add to the peak here

# %% [markdown]
# ## 4. What it costs
# A bill costs a millisecond of arithmetic, so its price is its error. The package walks a block on paper as we did, for
# every technique. We held 3,000 such bills against a *dry run*: the real modules (most models cut to 2 to 4 blocks),
# loss and optimizer on tensors without data, every storage counted. Model, card, length and every switch were drawn at
# random. And we held the dry run against 24 real trainings of SmolLM2-135M on a CPU, two steps each. What error would
# you accept?

# %%
study, dry_runs, on_a_card = (
    results.study(f"{name}_error") for name in ("estimate", "dry_run", "gpu")
)
if study and dry_runs:
    print(
        f"by hand against dry run, {study['settings']:,} settings: "
        f"half are within {study['median_size']:.2%},"
    )
    print(
        f"    the worst is {study['worst_over']:+.1%}, "
        f"the worst that is too low {study['worst_under']:+.1%}"
    )
    print(
        f"dry run against real steps, {len(dry_runs['cases'])} cases: "
        f"the worst is {dry_runs['worst']:+.5%}"
    )
    allocator = (
        f"the worst is {on_a_card['by_hand_worst']:+.1%}"
        if on_a_card
        else "not measured yet"
    )
    print(f"by hand against CUDA's allocator: {allocator}")
    assert -0.006 < study["worst_under"] < study["worst_over"] < 0.031
else:
    print(
        "the committed results are not beside this package: "
        "see benchmarks/results/cpu in the repository"
    )


# %% Draw figure 3 tags=["hide-input"]
def errors(theme: Theme):
    """Every case: its size, and how far the bill by hand is off."""
    drawn, axes = course.figure(height=3.0)
    # counted, and by hand
    pairs = [[int(size) for size in case.split()[1:3]] for case in study["cases"]]
    off = [100 * (by_hand / counted - 1) for counted, by_hand in pairs]
    axes.scatter(
        [counted / GIB for counted, _ in pairs],
        off,
        s=6,
        color=theme.series[0],
        alpha=0.4,
    )
    axes.axhline(0, color=theme.quiet, linewidth=1)
    axes.axvline(
        T4.memory_bytes / GIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3))
    )
    axes.text(T4.memory_bytes / GIB, 1.75, " a T4", color=theme.alarm, va="center")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(
        xlabel="peak of a training step by dry run, GiB",
        ylabel="error of the bill, %",
        ylim=(-2, 3.5),
    )
    axes.grid(axis="y")
    return drawn


if study:
    course.show(
        errors,
        "Figure 3. 3,000 bills by hand: most errors are too small to see, "
        "and nearly every error over half a per cent "
        "is a bill that is too high.",
    )

# %% [markdown]
# What these errors do not cover: a bill counts tensors. A card also holds a CUDA context and cuBLAS's workspaces (we
# bill 400 MB and 16 MiB), and its allocator *reserves* more than it gives out ([allocated and reserved
# memory](a_full_card.py)). Until then a bill is the *least* that a card must have.
#
# ## 5. The production switch
# There is none yet: every later lesson has one, and shows this bill before and after. For Llama-3.2-1B the same
# formulas hold. A block keeps $26\,D$ numbers a token: three of each norm, $q$, $k$, $v$, what attention gave, and
# four tensors of the MLP that are $4D$ wide. And for each of its 32 heads $T^2$ scores. Predict the four large rows;
# then ask the package.

# %%
# KEYS: width of keys, and of values
V1, D1, H1, L1, T1, KEYS = 128_256, 2048, 8192, 16, 2048, 512
P1 = V1 * D1 + L1 * (2 * D1 * D1 + 2 * D1 * KEYS + 3 * D1 * H1 + 2 * D1) + D1
by_hand = {
    "weights": 4 * P1,
    "optimizer states": 8 * P1,
    "saved activations": 4 * L1 * (T1 * (26 * D1 + 2) + 32 * T1 * T1),
    "logits": 3 * 4 * T1 * V1,
}

plain = course.so_far("the_bill")  # the job with every switch off
bill = course.bill(plain)
for line in bill.lines:
    print(f"{line.name:26}{line.bytes / MIB:10,.1f} MiB  {line.why}")
print(
    f"{'peak, at the ' + bill.peak.name:26}{bill.peak_bytes / MIB:10,.1f} MiB = "
    f"{bill.peak_bytes / GIB:.1f} GiB"
)
print(
    f"{'least, with CUDA':26}{bill.least_bytes / MIB:10,.1f} MiB; "
    f"a T4 has {T4.memory_bytes / MIB:,.1f}"
)
for name, size in by_hand.items():
    assert size == sum(
        line.bytes for line in bill.lines if line.name.startswith(name)
    ), name
assert P1 == bill.facts.shape.weights == 1_235_814_400

# %% [markdown]
# The same from a shell: `cria plan kwanzaa --gpu t4 --ladder` prints the bill of the finished job, and a ladder
# that begins with this 31.3. Read the lines: 1.24 billion weights and their states are 13.8 GiB, the saved
# activations 14.5 (8 of them $T \times T$ scores), the logits 2.9. There is no line for the gradients, although they
# take 4.6 GiB, because they are not there at the peak. It was the same in the small model.
#
# That holds for long rows. Shorter rows have smaller activations and logits, but the gradients stay as large. At which
# length does the peak move to a moment that has gradients in it?

# %%
for tokens in (256, 1000, 1001, 1032, 1033, 2048):
    short = course.bill(with_settings(plain, [f"data.max_length={tokens}"]))
    held = sum(line.bytes for line in short.lines if line.name == "gradients")
    print(
        f"{tokens:5,} tokens: {short.peak_bytes / GIB:.1f} GiB, "
        f"at the {short.peak.name}; gradients {held / GIB:.1f}"
    )
    expected = (
        (4 * P1, "embedding")
        if tokens <= 1000
        else (0, "head")
        if tokens <= 1032
        else (0, "loss")
    )
    assert (held, short.peak.name) == expected

# %% [markdown]
# Up to 1,000 tokens the peak is at the end of the backward pass, where the *embedding* gets its gradient. There all
# gradients are alive, at 4 bytes each. From 1,033 tokens on they cost nothing. In between the peak is at the *head*,
# whose gradient comes first, on a line of its own.


# %% Draw figure 4 tags=["hide-input"]
def all_moments(theme: Theme):
    """The bill of Llama-3.2-1B at every moment that might be the peak."""
    kinds = {
        "weights": (("weights",), theme.series[0]),
        "optimizer states": (("optimizer states",), theme.series[3]),
        "blocks, batch": (("saved", "open block", "batch"), theme.series[1]),
        "logits": (("logits", "final norm"), theme.series[2]),
        "gradients": (("gradients", "embedding", "head"), theme.quiet),
    }
    drawn, axes = course.figure(height=3.6)
    found = bill.moments
    for place, moment in enumerate(found):
        left = 0.0
        for starts, color in kinds.values():
            size = (
                sum(line.bytes for line in moment.lines if line.name.startswith(starts))
                / GIB
            )
            axes.barh(place, size, left=left, color=color, height=0.66)
            left += size
        assert abs(left - moment.bytes / GIB) < 1e-9
        axes.text(left, place, f" {left:.1f} GiB", va="center", color=theme.ink)
    for name, (_, color) in kinds.items():
        axes.barh(0, 0, color=color, label=name)
    capacity(axes, theme)
    axes.set_yticks(range(len(found)), [moment.name for moment in found])
    axes.set(xlabel="alive, GiB", xlim=(0, 36), ylim=(len(found) - 0.4, -1.2))
    axes.grid(axis="x")
    drawn.legend(loc="outside lower center", ncols=5, fontsize=8)
    return drawn


course.show(
    all_moments,
    "Figure 4. Eight moments of one step of Llama-3.2-1B: "
    "most gradients appear after a block's activations "
    "are freed, and no moment fits a T4.",
)

# %% [markdown]
# Figure 4 also says what a trick can gain. Removing the 2.9 GiB of logits lowers the peak by only 1.1 GiB, because then
# the last block is the peak. **A trick shrinks its own line; you gain the distance to the next moment.**
#
# Why not look the number up? For QLoRA of a model of $x$ billion weights, LLaMA-Factory's README says $x/2$ GB, here
# 0.6. axolotl's guide says 6 to 8 GB for 1 to 3 billion. A factor of ten; neither rule has the vocabulary in
# it. Between them lies what you switch on:

# %%
early, finished = (
    course.bill(recipe).least_bytes / 1e9
    for recipe in (course.so_far("nf4"), course.CAPSTONE)
)
print(
    f"our bill: {early:.1f} GB after the lesson on NF4, where QLoRA is complete, "
    f"{finished:.1f} GB after the last"
)

# %% [markdown]
# ## 6. Where it breaks
# A CPU has no small card, but our film has a capacity, and refuses in the words of CUDA's allocator.


# %%
def said(card, **how):
    try:
        train(card, **how)
    except torch.OutOfMemoryError as error:
        return str(error)
    return "fine"


# %% [markdown]
# **`torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB.`** The bill left the logits out. The
# number in the message is the *one* tensor that was asked for, so look for its shape:
# $2{,}048 \times 128{,}256 \times 4$ bytes are 1,002 MiB to the byte, logits of one row. In the small model, 256 KiB.
# Cure: put three of them on the bill, and train as many rows as it allows (a better cure: `tricks.chunked_loss`).

# %%
assert 4 * T1 * V1 == 1002 * MIB
without = sum(size for name, size in bills()[0].items() if name != "logits")
print(
    f"the bill without logits says {without / KIB:,.0f} KiB, the card has 2,100: "
    f"{said(Film(2_100))}"
)
assert without < 2_100 * KIB
assert said(Film(2_100)) == "CUDA out of memory. Tried to allocate 256.00 KiB."
assert sum(bills(rows=1)[0].values()) < 2_100 * KIB
assert said(Film(2_100), rows=1) == "fine"

# %% [markdown]
# **`the first step runs, the second: CUDA out of memory`**. AdamW's states come to life in the first `step()`, so the
# first forward and backward pass never met them. Even a search for the largest batch has forgotten this. Cure:
# believe no measurement of a first step. The third is no larger than the second, so two steps are a rehearsal.

# %%
print("a card of 2,500 KiB, one step: ", said(Film(2_500), steps=1))
print("a card of 2,500 KiB, two steps:", said(Film(2_500), steps=2))
assert said(Film(2_500), steps=1) == "fine" != said(Film(2_500), steps=2)
train(longer := Film(), steps=3)
assert peaks(longer)[1] < peaks(longer)[4] == peaks(longer)[7]

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** `optimizer.zero_grad(set_to_none=False)` fills gradients with zeros instead of dropping them. By how
#    many bytes does the small model's peak grow? The answer is a number of bytes.
# 2. **Build.** Let no gradient wait: update each weight as soon as its gradient has come, then drop it.
#    `p.register_post_accumulate_grad_hook(f)` calls `f(p)` at that moment. Fill in `update_on_the_way(model)`: make one
#    `torch.optim.AdamW` with default settings for each parameter, register a hook, and return the optimizers in a list
#    or a dict. (About seven lines. Before you check: what does it save at the peak?)
# 3. **Reach.** Rows of Llama-3.2-1B may be as short as you like. How much memory does a step of plain fp32 training
#    take at least, by our bill? The answer is the peak in GiB, within 1 %. (Which moment of Figure 4 keeps the most
#    bytes when $T$ is tiny? `bill.moments` gives the lines of each moment.)

# %% tags=["exercise"]
bytes_more = None


def update_on_the_way(model):
    """FILL ME IN."""


least_gib = None


# %% Check the exercises tags=["hide-input"]
def learnt(prepare, every_step):
    """The weights before and after two steps."""
    torch.manual_seed(0)
    model, batch = Tiny(), torch.randint(V, (2, B, T))
    start = [p.detach().clone() for p in model.parameters()]
    if (made := prepare(model)) is None:
        raise NotImplementedError
    for _ in range(2):
        F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()).backward()
        every_step(model, made)
    return start, [p.detach() for p in model.parameters()]


def of_updates(answer):
    waited = []

    def prepare(model):
        made = answer(model)
        # hooks run in the order in which they were registered, so these come last
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda _: waited.append(
                    sum(p.grad is not None for p in model.parameters())
                )
            )
        return made

    def nothing_waits(model, made):
        assert all(p.grad is None for p in model.parameters()), (
            "a gradient is left after the backward pass"
        )
        assert not any(waited), (
            f"during the backward pass {max(waited)} gradients wait together; "
            "drop each when used"
        )
        if not isinstance(made, list | tuple | dict) or len(made) != 4 * L + 1:
            raise TypeError(f"{type(made).__name__} is not {4 * L + 1} optimizers")

    def plainly(model, made):
        made.step()
        made.zero_grad()

    start, mine = learnt(prepare, nothing_waits)
    stuck = sum(torch.equal(p, q) for p, q in zip(start, mine, strict=True))
    assert not stuck, (
        f"{stuck} of {len(mine)} weights never move: "
        "does each hook step the optimizer of its own weight?"
    )
    rights = [
        learnt(
            lambda model, way=way: torch.optim.AdamW(model.parameters(), **way), plainly
        )[1]
        for way in ({}, {"fused": True}, {"foreach": True})
    ]
    same = any(all(map(torch.equal, right, mine)) for right in rights)
    hint = (
        "use the same settings, and the same optimizers in each step, "
        "because they hold the states"
    )
    assert same, f"after two steps the weights are not those of plain AdamW: {hint}"


def of_bytes(answer):
    keeps = Film()
    train(keeps, set_to_none=False)
    grown = max(keeps.frames) - max(film.frames)
    right = course.equal(
        grown,
        "which gradients are alive now when backpropagation starts? A "
        "number takes 4 bytes",
    )
    assert answer != 0, "not 0; a gradient of zeros takes as many bytes as any other"
    assert answer * KIB != grown, f"{answer} is in KiB; give it in bytes"
    right(answer)


def of_least(answer):
    least = course.bill(with_settings(plain, ["data.max_length=8"])).peak_bytes
    found = float(answer)
    assert abs(found * 1e9 / least - 1) > 0.01, (
        f"{found:.2f} is in GB of 10^9 bytes; a GiB has 2^30"
    )
    assert found <= 1.01 * least / GIB, (
        f"not {found:.1f}: too much; our fused AdamW makes no tensor of its own"
    )
    course.about(
        least / GIB, "too little; look at all lines of the moment 'embedding'"
    )(answer)


course.check(1, bytes_more, of_bytes, "a number of bytes")
course.check(
    2,
    update_on_the_way,
    of_updates,
    "a function (model) -> its optimizers in a list or a dict",
)
course.check(3, least_gib, of_least, "a number of GiB")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # now gradients do wait at the loss, so the peak is the sum of all lines
# bytes_more = 4 * 65_536
#
#
# def update_on_the_way(model):
#     optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
#
#     def update(p):
#         optimizers[p].step()
#         p.grad = None
#
#     for p in model.parameters():
#         p.register_post_accumulate_grad_hook(update)
#     return optimizers  # at the peak it saves nothing: no gradient lived there
#
#
# # 16 bytes a weight, and two more tensors of the embedding's size: the tied head has a
# # gradient of its own, and torch adds both gradients into a third tensor.
# # The result is 20.4, so no row fits a T4.
# least_gib = (16 * 1_235_814_400 + 2 * 4 * 128_256 * 2048) / 2**30
# ```
#
# </details>
#
# ## In one breath
# - **Saves** nothing; it says what every trick can save.
# - **Costs** a millisecond, and an error: at most 3.0 % in 3,000 settings, held against a dry run.
# - **Exact** for what we wrote by hand: weights $4P$, states $8P$, what blocks keep, three times the logits.
# - **When**: before every run, for the second step, at the moment when most lives.
# - **When not** to trust one: when it is a sum of everything, or has no $T$ and no $V$ in it.
#
# ## Sources
# - Rajbhandari et al. 2020, *ZeRO*, arXiv 1910.02054, section 3 (where the memory goes).
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, arXiv 2205.05198, section 4 (what a block keeps).
# - Kingma and Ba 2015, *Adam*, arXiv 1412.6980, section 2. `torch/optim/adam.py` of torch 2.13: `_fused_adam`, and
#   `_multi_tensor_adam`, which is *foreach*. `training_args.py` of transformers 5.23: `adamw_torch_fused`.
# - Rules: LLaMA-Factory, `README.md`, *Hardware Requirement*; axolotl, `docs/choosing_method.qmd`, *Hardware Mapping*.
#   A search for the largest batch that forgot the states: rf-detr, pull request 1342.
# - Ours: `cria_tricks/bill/moments.py`, `block.py`, `shape.py`, `cria_tricks/measure/memory.py`;
#   `tests/memory/test_estimate.py`, `tests/test_measure.py`, `benchmarks/estimate_error.py`.
